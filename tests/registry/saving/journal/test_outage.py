"""A start while the registry cannot be reached: from the journal, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import RolledBack, StoreFull, Stranded
from holdfast.registry.face.factory import open_on
from holdfast.registry.saving.journal import background, folder
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.registries import PrivateFolder
from holdfast.registry.store.store import create_config
from tests.registry.saving.journal.machines import RUN, Machine, actions_of, added
from tests.servers.tcp_proxy import TcpProxy
from tests.support.faults import Died
from tests.support.sameness import assert_same
from tests.support.stores import contents, new_backend


class Bucket(Wrapper):
    """A store that refuses every call while `is_down`."""

    is_down = False

    def _refuse(self) -> None:
        if self.is_down:
            raise StoreUnavailable("the connection is refused", where=self.url)


def _refusing(name: str) -> Callable[..., Any]:
    def call(self: Bucket, *given: Any, **named: Any) -> Any:
        self._refuse()
        return getattr(self.inner, name)(*given, **named)

    return call


for _name in ("get", "put", "put_if_absent", "list", "stat", "delete", "make_durable"):
    setattr(Bucket, _name, _refusing(_name))


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.arange(50.0) + step}, "step": step}


def save(run: Any, *steps: int) -> None:
    for step in steps:
        assert run.save(state(step), step=step).durable_in == "journal"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket(new_backend())


@pytest.fixture
def machine(bucket: Bucket, tmp_path: Path, by_hand: None) -> Machine:
    return Machine(bucket, tmp_path / "journal")


def _restored(machine: Machine, step: int) -> Any:
    """Start a new process, which restores a step."""
    run = machine.run()
    restored = run.restore()
    assert restored.checkpoint.step == step
    assert_same(restored.state, state(step))
    return run


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "carried"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "killed"])
def test_a_start_without_the_registry_goes_on_from_the_newest_save(
    waits: bool, ended: bool, machine: Machine, bucket: Bucket
) -> None:
    run = machine.run()
    save(run, 1, 2, 3)
    if ended:
        run.handle.saver.leave("interrupted")
    goes = iter([True, True])
    machine.carrier().carry(lambda: next(goes, False) if waits else True)
    assert machine.folder.waiting() == ([3, 4][: 1 + ended] if waits else [])
    bucket.is_down = True
    save(_restored(machine, 3), 4)
    run = _restored(machine, 4)  # and once more
    save(run, 5)
    bucket.is_down = False
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3, 4, 5]
    assert actions_of(bucket, "run.rewind") == []
    assert len(actions_of(bucket, "run.take_over")) == 1
    run.wait(remote=True)
    save(run, 6)
    machine.carry()
    assert [one.step for one in run.checkpoints()] == [1, 2, 3, 4, 5, 6]
    assert [one.step for one in _restored(machine, 6).checkpoints()] == [1, 2, 3, 4, 5, 6]
    assert machine.registry().verify(deep=True).findings == ()


def test_another_machine_that_took_the_run_over_meanwhile_strands_the_saves(
    machine: Machine, bucket: Bucket, tmp_path: Path
) -> None:
    save(machine.run(), 1)
    carrier = machine.carrier()
    carrier.carry()
    bucket.is_down = True
    run = _restored(machine, 1)
    save(run, 2)
    bucket.is_down = False
    other = open_on(bucket).run(RUN)
    other.restore()
    other.save(state(20), step=2)
    carrier.carry()  # the slot of the other one is right behind what it has read
    assert machine.outcomes() == {2: "stranded"}
    assert [step for step, _ in added(bucket)] == [1, 2]
    with pytest.raises(Stranded):
        save(run, 3)
    with pytest.raises(Stranded):
        run.wait(remote=True)
    bucket.is_down = True  # now this machine knows that its saves would be in vain
    with pytest.raises(StoreUnavailable):
        machine.run()


@pytest.mark.sometimes("the registry answers again")
def test_a_registry_that_was_replaced_meanwhile_is_told_at_once(
    machine: Machine, bucket: Bucket
) -> None:
    save(machine.run(), 1)
    machine.carry()
    bucket.is_down = True
    run = _restored(machine, 1)
    save(run, 2)
    bucket.is_down = False
    for key in list(contents(bucket)):
        bucket.delete(key)
    create_config(bucket, "skipped")
    with pytest.raises(RolledBack) as told:
        Carrier(run.handle.store, machine.folder).carry()
    run.handle.journal.line.carrier.error = told.value  # as the thread does
    for ask in (lambda: run.wait(remote=True), run.latest):
        with pytest.raises(RolledBack):
            ask()
    assert machine.folder.waiting() == [2]
    assert list(contents(bucket)) == ["registry.json"]


def _elsewhere(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal came to another machine: the first one may go on under the same takeover."""
    monkeypatch.setattr(folder, "this_machine", lambda: "another")


def _never_here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run", lambda: machine.registry().run("never", create=True))


def _another_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "url", "memory://elsewhere")


def _no_copy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path(machine.folder.path, "runs").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")


@pytest.mark.parametrize("change", [_elsewhere, _never_here, _another_place, _no_copy])
def test_what_the_journal_does_not_know_needs_the_registry(
    change: Callable[[Machine, pytest.MonkeyPatch], None],
    machine: Machine,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(machine.run(), 1)
    machine.carry()
    with monkeypatch.context() as changed:
        change(machine, changed)
        bucket.is_down = True
        with pytest.raises(StoreUnavailable):
            machine.run()
    bucket.is_down = False
    save(_restored(machine, 1), 2)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_death_at_any_write_of_the_journal_hides_no_save(
    at: int, machine: Machine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(machine.run(), 1)
    machine.carry()
    calls = 0

    def dying(name: str) -> Callable[..., Any]:
        act = getattr(PrivateFolder, name)

        def call(self: PrivateFolder, *given: Any) -> Any:
            nonlocal calls
            calls += "states" not in self.url
            if calls == at:
                raise Died
            return act(self, *given)

        return call

    run = _restored(machine, 1)
    save(run, 2, 3)
    with monkeypatch.context() as patched:
        for name in ("put", "put_if_absent", "delete"):
            patched.setattr(PrivateFolder, name, dying(name))
        with pytest.raises(Died):
            machine.carry()
            save(_restored(machine, 3), 3)
            raise Died
    bucket.is_down = True
    try:
        save(_restored(machine, 3), 4)
    except StoreUnavailable:
        bucket.is_down = False
        save(_restored(machine, 3), 4)
    bucket.is_down = False
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3, 4]


def test_a_copy_that_a_full_disk_left_behind_is_not_used(
    machine: Machine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.run()
    save(run, 1, 2, 3)
    put = PrivateFolder.put

    def full(self: PrivateFolder, key: str, body: Any) -> None:
        if key.startswith("runs/"):
            raise StoreFull("no space left", where=key)
        put(self, key, body)

    goes = iter([True])
    with monkeypatch.context() as patched:
        patched.setattr(PrivateFolder, "put", full)
        machine.carrier().carry(lambda: next(goes, False))
    bucket.is_down = True
    with pytest.raises(StoreUnavailable):
        machine.run()
    bucket.is_down = False
    machine.carry()
    bucket.is_down = True
    _restored(machine, 3)


_KILLED = """
import os, signal, sys
import numpy as np
import holdfast
run = holdfast.open(sys.argv[1], journal=sys.argv[2]).run("run", create=True)
run.save({"model": {"w": np.arange(50.0) + 1}, "step": 1}, step=1)
run.wait(remote=True)
print("carried", flush=True)
sys.stdin.readline()
run.save({"model": {"w": np.arange(50.0) + 2}, "step": 2}, step=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_is_started_again_while_its_bucket_refuses_connections(
    s3_url: Callable[[], str],
    moto_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, journal = s3_url(), str(tmp_path / "journal")
    holdfast.init(url, skip_race_probe=True).close()
    clock = iter(range(10**9))  # each look at it takes a second
    patient = SimpleNamespace(sleep=lambda s: None, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr("holdfast.backends.patience.time", patient)
    for name in ("RETRY_S", "LONGEST_RETRY_S", "LOOK_S"):
        monkeypatch.setattr(background, name, 0.01)
    with TcpProxy(moto_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        given = [sys.executable, "-c", _KILLED, url, journal]
        with subprocess.Popen(given, stdin=-1, stdout=-1, text=True) as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "carried\n"
            proxy.go_away()
            job.communicate("\n")
        assert job.returncode == -signal.SIGKILL
        with pytest.raises(StoreUnavailable):
            holdfast.open(url)
        with holdfast.open(url, journal=journal) as registry:
            run = registry.run("run", create=True)
            restored = run.restore()
            assert restored is not None
            assert_same(restored.state, state(2))
            save(run, 3, 4)
            proxy.come_back()
            run.wait(remote=True)
            assert [one.step for one in run.checkpoints()] == [1, 2, 3, 4]
            assert registry.verify(deep=True).findings == ()
