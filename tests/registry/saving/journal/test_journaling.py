"""A save with a journal: what is promised before the registry has it, and after."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import Storing
from holdfast.backends import Body
from holdfast.backends.base import as_buffers
from holdfast.backends.local.backend import LocalBackend
from holdfast.registry.errors import (
    Conflict,
    Fenced,
    IncompatibleState,
    InvalidInput,
    OnlyLocal,
    StorageError,
    StoreFull,
    StoreUnavailable,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import SetStatus
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.saving.journal import background
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import Entry
from holdfast.registry.saving.journal.settings import Journal, choose_journal
from holdfast.registry.spec import RunSpec
from holdfast.registry.store.store import create_config
from holdfast.registry.values.figures import HERE
from holdfast.registry.writing.change import Composed
from tests.crash import scenarios
from tests.registry.saving.journal.machines import RUN, Machine, Outage, actions_of, added
from tests.support.faults import Hooked
from tests.support.inline import without_threads
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import contents, new_backend, opened


@pytest.fixture
def bucket() -> Hooked:
    return Hooked(new_backend())


@pytest.fixture
def machine(bucket: Hooked, tmp_path: Path) -> Machine:
    return Machine(bucket, tmp_path / "journal")


def test_saves_go_on_without_the_registry_and_arrive_once(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run, outage = machine.run(), Outage()
    bucket.before = outage
    saved = [run.save(make_state(1), step=1, metrics={"loss": 1.0}, meta={"epoch": 1})]
    before = contents(bucket)
    outage.is_down = True
    saved += [run.save(make_state(step), step=step) for step in (2, 3)]
    assert [one.durable_in for one in saved] == ["journal"] * 3
    assert saved[0].metrics == {"loss": 1.0}
    assert saved[0].meta == {"epoch": 1}
    for one in saved:
        assert_same(one.load(), make_state(one.step))
    with pytest.raises(StoreUnavailable):
        machine.carry()
    outage.is_down = False
    assert contents(bucket) == before
    assert machine.carry()
    assert added(bucket) == [(one.step, one.digest.hex()) for one in saved]
    with opened(bucket) as registry:
        assert registry.verify(deep=True).findings == ()
        for one in registry.run(RUN).checkpoints():
            assert_same(one.load(), make_state(one.step))
        assert registry.run(RUN).checkpoints()[0].metrics == {"loss": 1.0}


def test_the_first_save_needs_the_registry(machine: Machine, bucket: Hooked, by_hand: None) -> None:
    run, outage = machine.run(), Outage()
    bucket.before, outage.is_down = outage, True
    with pytest.raises(StoreUnavailable):
        run.save(make_state(1), step=1)
    outage.is_down = False
    assert machine.folder.waiting() == []


def test_a_commit_has_the_time_and_write_of_its_entry(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    machine.run().save(make_state(1), step=1)
    entry = machine.folder.entry(1)
    machine.carry()
    with opened(bucket) as registry:
        commit = list(registry.run(RUN).history.commits())[-1]
    assert (commit.write, commit.time_ms) == (entry.write, entry.time_ms)


def test_a_checkpoint_is_found_again_in_the_registry(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    first, second = (run.save(make_state(step), step=step) for step in (1, 2))
    kept = {first, second}
    for refused in (
        lambda: first.handle.n,
        lambda: first.report({"loss": 1}),
        lambda: run.pins.tags.set("keeper", first),
        lambda: run.pins.gates.set("end", first),
        lambda: run.restore(at=first),
        lambda: run.restore_into({}, at=first),
    ):
        with pytest.raises(OnlyLocal, match="not in the registry yet"):
            refused()
    assert run.latest() is None
    machine.carry()
    assert [first.durable_in, second.durable_in] == ["registry", "registry"]
    assert not Path(machine.folder.states_path(first.entry.write)).exists()
    first.report({"loss": 1})
    run.pins.tags.set("keeper", second)
    assert_same(first.load(), make_state(1))
    assert run.checkpoints() == [first, second]
    assert {*run.checkpoints(), first} == kept
    assert run.latest().durable_in == "registry"


def test_a_load_goes_on_in_the_registry_when_its_bytes_here_are_deleted(
    machine: Machine, by_hand: None
) -> None:
    run = machine.run()
    first = run.save(make_state(1), step=1)
    first.manifest  # noqa: B018 - reads it here
    run.save(make_state(2), step=2)
    machine.carry()
    assert_same(first.load(), make_state(1))


def test_a_restart_here_continues_from_the_journal_and_elsewhere_from_the_registry(
    machine: Machine, bucket: Hooked, tmp_path: Path, by_hand: None
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    machine.carry()
    for step in (2, 3):
        run.save(make_state(step), step=step)
    here, elsewhere = machine.run(), Machine(bucket, tmp_path / "other").run()
    assert here.restore().checkpoint.step == 3
    assert_same(here.restore().state, make_state(3))
    assert elsewhere.restore().checkpoint.step == 1
    target = {"model": {name: one * 0 for name, one in make_state(3)["model"].items()}}
    filled = here.restore_into(target, strict=False)
    assert (filled.step, filled.durable_in) == (3, "journal")
    assert_same(target["model"], make_state(3)["model"])
    here.save(make_state(4), step=4)
    with pytest.raises(Fenced, match="of this machine"):
        run.save(make_state(5), step=5)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3, 4]
    assert actions_of(bucket, "run.rewind") == []


def test_a_rewind_to_an_entry_that_waits(machine: Machine, bucket: Hooked, by_hand: None) -> None:
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    again = machine.run()
    assert again.restore().checkpoint.step == 2
    run.save(make_state(3), step=3)  # the old process goes on until the new one takes over
    again.save(make_state(33), step=3)
    again.save(make_state(34), step=4)
    machine.carry()
    with opened(bucket) as registry:
        found = registry.run(RUN)
        assert [one.step for one in found.checkpoints()] == [1, 2, 3, 4]
        assert_same(found.latest().load(), make_state(34))
        assert_same(found.checkpoints()[2].load(), make_state(33))
        assert found.manifest.superseded_count == 1
    resumed = machine.run()
    machine.carry()
    assert resumed.restore(at=resumed.checkpoints()[1]).checkpoint.step == 2
    resumed.save(make_state(43), step=3)
    machine.carry()
    assert [one.step for one in resumed.checkpoints()] == [1, 2, 3]


def test_a_rewind_to_an_entry_that_was_carried_meanwhile(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    again = machine.run()
    assert again.restore().checkpoint.step == 2
    run.save(make_state(3), step=3)
    machine.carry()
    again.save(make_state(33), step=3)
    machine.carry()
    with opened(bucket) as registry:
        assert registry.run(RUN).manifest.superseded_count == 1
        assert_same(registry.run(RUN).latest().load(), make_state(33))


def test_a_restore_reads_an_entry_that_is_carried_while_it_reads(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    run.status = "interrupted"  # the newest entry alone keeps its bytes
    again = machine.run()
    newest_first = again.handle.training.newest_first

    def listed_and_carried() -> list[Checkpoint]:
        found = newest_first()
        machine.carry()
        return found

    monkeypatch.setattr(again.handle.training, "newest_first", listed_and_carried)
    restored = again.restore()
    assert restored.checkpoint.step == 2
    assert restored.report == ()
    assert_same(restored.state, make_state(2))


def test_a_save_that_the_run_refuses_is_refused_at_once(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    first = run.save(make_state(1), step=1)
    with pytest.raises(Conflict, match="another state"):
        run.save(make_state(2), step=1)
    assert run.save(make_state(1), step=1) == first
    assert machine.folder.waiting() == [1, 2]
    assert run.save(make_state(1), step=1, metrics={"loss": 2.0}) == first
    with pytest.raises(Conflict, match="restored nothing"):
        machine.run().save(make_state(0), step=0)
    assert len(actions_of(bucket, "run.take_over")) == 1
    machine.carry()
    assert added(bucket) == [(1, first.digest.hex())]
    assert run.latest().metrics == {"loss": 2.0}
    (states,) = (Path(machine.folder.path) / "states").iterdir()
    assert states.name == machine.folder.entry(3).write


def _life(registry: Any, carry: Any) -> None:
    """Live through everything that a save can say; see `tests.crash.scenarios`."""
    run = registry.run(RUN, create=True, seed=7, preset=scenarios._SPEC)
    companion = {"reference": {"policy": make_state(1)["model"]}}
    scenarios._live_on(run, 1, phase=1)
    scenarios._live_on(run, 2, phase=2, companions=companion)
    for step in (3, 4):
        scenarios._live_on(run, step)
    carry()


def test_a_run_is_the_same_with_and_without_a_journal(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    _life(machine.registry(), machine.carry)
    direct = new_backend()
    with opened(direct) as registry:
        _life(registry, lambda: None)
    with opened(bucket) as journaled, opened(direct) as plain:
        ours, theirs = journaled.run(RUN).history.manifest(), plain.run(RUN).history.manifest()
        assert len(ours.evicted) == len(theirs.evicted) > 0
        assert [one.version for one in ours.pool] == [one.version for one in theirs.pool]
        assert ours.stream("losses").count == 4
        entries = journaled.run(RUN).streams["losses"].read()
        assert entries == plain.run(RUN).streams["losses"].read()
        for one, other in zip(ours.checkpoints, theirs.checkpoints, strict=True):
            assert (one.manifest, one.tier, one.companions, one.metrics, one.evicted) == (
                (other.manifest, other.tier, other.companions, other.metrics, other.evicted)
            )
        assert journaled.verify(deep=True).findings == ()


def test_deltas_hold_their_bases(machine: Machine, bucket: Hooked, by_hand: None) -> None:
    run, noise = machine.run(), np.random.default_rng(1)
    weights = noise.standard_normal((200, 200)).astype(np.float32)
    states = {}
    for step in (1, 2, 3):
        weights = weights + np.float32(1e-6)
        states[step] = {"model": {"w": weights}}
        run.save(states[step], step=step, storing=Storing(compression="zstd", keyframe_every=8))
        machine.carry()
    with opened(bucket) as registry:
        for one in registry.run(RUN).checkpoints():
            assert_same(one.load(), states[one.step])


def test_the_end_of_a_run_is_carried_in_its_order(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    with run:
        run.save(make_state(1), step=1)
        run.status = "interrupted"
        run.save(make_state(2), step=2)
    with pytest.raises(Conflict, match="completed"):
        run.save(make_state(3), step=3)
    with pytest.raises(Conflict, match="completed"):
        run.status = "interrupted"
    machine.carry()
    assert run.refresh().status == "completed"
    statuses = [one.status for one in actions_of(bucket, "run.status")]
    assert statuses == ["interrupted", "running", "completed"]


def test_a_handle_that_saved_nothing_never_ends_a_run_before_its_saves(
    machine: Machine,
    by_hand: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_EXIT_WAIT_S", "0")
    run = machine.run()
    run.save(make_state(1), step=1)
    with run:
        run.restore()
    assert "the status was not set to completed" in caplog.text
    machine.carry()
    assert run.refresh().status == "running"
    with run:
        run.restore()
    assert run.refresh().status == "completed"


def test_a_status_is_said_once(machine: Machine, bucket: Hooked, by_hand: None) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    for _ in range(2):  # a checkpointer that stops, then the end of `with run:`
        run.handle.saver.leave("interrupted")
    machine.carry()
    assert [one.status for one in actions_of(bucket, "run.status")] == ["interrupted"]


def test_the_status_at_the_end_of_a_process_is_put_behind_what_waits_once(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    set_behind = run.handle.ownership._behind()
    for _ in range(2):
        assert set_behind(SetStatus(status="failed"))
    machine.carry()
    assert [one.status for one in actions_of(bucket, "run.status")] == ["failed"]
    assert not set_behind(SetStatus(status="failed"))


def test_other_commits_of_the_trainer_wait_for_the_registry(
    machine: Machine, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: asked.append(machine.carry()))
    run = machine.run()
    run.handle.journal.folder.waiting()
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    run.save(make_state(1), step=1)
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: asked.append(machine.carry()))
    run.exchange.push(make_state(2), step=2)
    assert asked == [True]
    assert [step for step, _ in added(bucket)] == [1, 2]
    run.save(make_state(3), step=3)
    run.wait(remote=True)
    assert [step for step, _ in added(bucket)] == [1, 2, 3]


def test_a_save_in_the_background_is_acknowledged_by_the_journal(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    for step in (1, 2):
        assert run.save_async(make_state(step), step=step).wait().durable_in == "journal"
    run.save_async(make_state(3), step=3)
    run.wait()
    assert machine.folder.waiting() == [1, 2, 3]
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3]


def test_a_handle_that_ends_says_what_is_only_here(
    machine: Machine,
    by_hand: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_EXIT_WAIT_S", "0")
    run = machine.run()
    run.save(make_state(1), step=1)
    run.close()
    assert "run: 1 saves are only in the journal" in caplog.text
    assert "holdfast journal push" in caplog.text
    caplog.clear()
    machine.run().close()  # one that has saved nothing waits for nothing
    assert caplog.text == ""
    machine.carry()
    run.close()
    assert caplog.text == ""


def begin_program(tmp_path: Path, then: str = "", patch: str = "", **variables: str) -> int:
    """Save five steps in a process whose handle is gone at its end; return the exit status."""
    program = f"""
import numpy, holdfast
{patch}
def train():
    holdfast.init({str(tmp_path / "registry")!r}, skip_race_probe=True).close()
    reg = holdfast.open({str(tmp_path / "registry")!r}, journal={str(tmp_path / "journal")!r})
    run = reg.run("run", create=True)
    for step in range(1, 6):
        run.save({{"w": numpy.arange(100) + step}}, step=step)
train()
{then}
"""
    command, env = [sys.executable, "-c", program], {**os.environ, **variables}
    return subprocess.run(command, env=env, timeout=300, check=False).returncode


def test_the_end_of_a_program_waits_for_the_registry(tmp_path: Path) -> None:
    assert begin_program(tmp_path) == 0
    with without_threads(open_on(LocalBackend(tmp_path / "registry"))) as registry:
        assert [one.step for one in registry.run(RUN).checkpoints()] == [1, 2, 3, 4, 5]


def test_the_status_at_the_end_of_a_program_comes_after_its_saves(tmp_path: Path) -> None:
    patch = (
        "from holdfast.registry.saving.journal.background import BackgroundCarrier\n"
        "BackgroundCarrier.wake = lambda self: None"  # as if the registry was out of reach
    )
    assert begin_program(tmp_path, "raise ValueError", patch, HOLDFAST_EXIT_WAIT_S="0") == 1
    machine = Machine(LocalBackend(tmp_path / "registry"), tmp_path / "journal")
    machine.carry()
    with machine.registry() as registry:
        assert [one.step for one in registry.run(RUN).checkpoints()] == [1, 2, 3, 4, 5]
        assert registry.run(RUN).status == "failed"


def test_an_interruption_behind_the_acknowledgement_loses_no_bytes(
    machine: Machine, bucket: Hooked, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, acknowledge = machine.run(), RunFolder.acknowledge

    def interrupted(self: RunFolder, entry: Entry) -> int:
        acknowledge(self, entry)
        raise KeyboardInterrupt

    run.save(make_state(1), step=1)
    with monkeypatch.context() as at_the_keyboard:
        at_the_keyboard.setattr(RunFolder, "acknowledge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.save(make_state(2), step=2)
    run.save(make_state(2), step=2)  # the same checkpoint again
    run.save(make_state(3), step=3)
    machine.carry()
    assert set(machine.outcomes().values()) == {"carried"}
    assert [step for step, _ in added(bucket)] == [1, 2, 3]


def test_the_state_that_training_resumed_from_must_change(machine: Machine, by_hand: None) -> None:
    preset = RunSpec(name="own", must_change=("*",))
    machine.run(preset=preset).save(make_state(1), step=1)
    again = machine.run(preset=preset)
    restored = again.restore()
    with pytest.raises(IncompatibleState, match="step 1"):
        again.save(restored.state, step=2)


def test_a_commit_of_nothing_keeps_what_training_resumed_from(
    machine: Machine, bucket: Hooked, by_hand: None
) -> None:
    run = machine.run()
    first, _ = (run.save(make_state(step), step=step) for step in (1, 2))
    machine.carry()
    run.restore(at=first)
    run.handle.saver.commit(Composed(lambda run: None))
    run.save(make_state(33), step=3)
    machine.carry()
    with opened(bucket) as registry:
        assert [one.step for one in registry.run(RUN).checkpoints()] == [1, 3]


def test_a_released_lock_is_free_although_a_child_has_its_descriptor(machine: Machine) -> None:
    held, other = (machine.folder.lock("acknowledging") for _ in range(2))
    held.acquire()
    copy = os.dup(held._fd)  # as a process has it that was started without exec
    held.release()
    assert other.acquire(wait=False)
    other.release()
    os.close(copy)


def test_a_disk_without_locks_is_a_typed_error_and_costs_no_file(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    lock = machine.folder.lock("writing")
    before = len(list(Path("/dev/fd").iterdir()))
    with monkeypatch.context() as faulty:
        faulty.setattr(fcntl, "flock", no_locks)
        with pytest.raises(StorageError, match="no locks"):
            lock.acquire()
    assert len(list(Path("/dev/fd").iterdir())) == before
    with lock.held():
        monkeypatch.setattr(fcntl, "flock", no_locks)  # from now on, as of a server that is gone
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_a_failure_to_close_a_lock_does_not_undo_a_save(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, run = os.close, machine.run()
    run.save(make_state(1), step=1)

    def close(fd: int) -> None:
        is_lock = "/lock-" in str(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)
        if is_lock:
            raise OSError(errno.EIO, "a disk that fails")

    with monkeypatch.context() as faulty:
        faulty.setattr(os, "close", close)
        run.save(make_state(2), step=2)
    assert machine.folder.waiting() == [1, 2]


def test_the_thread_outlives_a_disk_that_fails_while_it_looks_for_more(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    carrier, real, looks = run.handle.journal.line.carrier, RunFolder.waiting, []

    def waiting(folder: RunFolder) -> list[int]:
        looks.append(real(folder))
        if len(looks) == 3:  # after the one of the entry, and the one that finds nothing more
            raise StorageError("a disk that fails")
        return looks[-1]

    def wait(most_s: float | None) -> None:
        carrier.stop(0.0)

    monkeypatch.setattr(background, "RETRY_S", 0.001)
    monkeypatch.setattr(RunFolder, "waiting", waiting)
    monkeypatch.setattr(carrier._work, "wait", wait)
    carrier._run()  # in this thread
    assert carrier.error is None
    assert len(looks) == 5


def test_a_number_that_another_machine_has_taken_loses_no_save(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a network disk may hold for one machine alone."""
    run, real, taken = machine.run(), LocalBackend.put_if_absent, []

    def put_if_absent(files: LocalBackend, key: str, body: Body) -> bool:
        kind = key.partition("/")[0]
        if kind in ("takeovers", "entries") and kind not in taken:
            taken.append(kind)
            assert real(files, key, body)  # the other machine is faster, with a file of its own
            body = b"".join(as_buffers(body)) + b" "
        return real(files, key, body)

    run.save(make_state(1), step=1)
    again = machine.run()
    again.restore()
    monkeypatch.setattr(LocalBackend, "put_if_absent", put_if_absent)
    again.save(make_state(2), step=2)
    monkeypatch.undo()
    assert taken == ["takeovers", "entries"]
    assert machine.folder.newest_takeover() == 3
    assert machine.folder.numbers() == [1, 2, 3]


def test_waiting_has_an_end(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    run.wait(timeout_s=0)
    with pytest.raises(TimeoutError, match="1 saves are only in the journal"):
        run.wait(remote=True, timeout_s=0)
    waits = []

    def carried_meanwhile(most_s: float) -> None:
        waits.append(most_s)
        machine.carry()

    monkeypatch.setattr(run.handle.journal.line.carrier.told, "wait", carried_meanwhile)
    run.wait(remote=True, timeout_s=10.0)
    assert waits == [background.LOOK_S]


def test_the_thread_tries_again_after_failures_and_waits_when_nothing_is_left(
    machine: Machine,
    by_hand: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carrier = machine.run().handle.journal.line.carrier
    tried, waits = [], []

    class Failing:
        """A carrier that fails twice."""

        def __init__(self, *given: object) -> None:
            pass

        def carry(self, goes_on: Callable[[], bool]) -> None:
            tried.append(goes_on())
            if len(tried) > 3:  # it has not waited
                carrier.stop(0.0)
            if len(tried) < 3:
                raise StoreUnavailable("out of reach")

    def wait(most_s: float | None) -> None:
        waits.append(most_s)
        carrier.stop(0.0)

    monkeypatch.setattr(HERE, "_values", {})
    monkeypatch.setattr(background, "Carrier", Failing)
    monkeypatch.setattr(background, "RETRY_S", 0.001)
    monkeypatch.setattr(carrier._work, "wait", wait)
    carrier._run()  # in this thread
    assert (tried, waits, carrier.error) == ([True] * 3, [None], None)
    assert HERE.read(runs=False)["failures_total"] == {("StoreUnavailable", "journal"): 2}
    assert caplog.text.count("the journal cannot be carried into the registry now") == 1


def test_a_carrier_that_was_stopped_starts_again_with_the_next_save(
    machine: Machine, bucket: Hooked
) -> None:
    run = open_on(bucket, journal=machine.journal).run(RUN, create=True, seed=7)
    run.save(make_state(1), step=1)
    run.wait(remote=True)
    carrier = run.handle.journal.line.carrier
    carrier.stop(300.0)
    run.save(make_state(2), step=2)
    thread = carrier._thread
    while machine.folder.waiting() and thread.is_alive():
        thread.join(0.01)
    assert machine.folder.waiting() == []
    run.close()


def test_a_long_wait_for_the_registry_is_told(
    machine: Machine,
    by_hand: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "SILENT_S", 0.0)
    run = machine.run()
    run.save(make_state(1), step=1)
    with pytest.raises(TimeoutError):
        run.wait(remote=True, timeout_s=0.01)
    assert caplog.text.count("run: waiting until the registry has 1 saves") == 1


def test_a_save_waits_at_the_bound_and_says_so(
    bucket: Hooked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": np.zeros(5000)}
    machine, goes = Machine(bucket, tmp_path / "journal", 100_000), threading.Event()

    def hold(method: str, key: str) -> None:
        if key.startswith("packs/"):
            assert goes.wait(300)

    run = open_on(bucket, journal=machine.journal).run(RUN, create=True, seed=7)
    bucket.before = hold
    for step in (1, 2):
        run.save({"w": state["w"] + step}, step=step)
    assert run.handle.journal.waited_s == 0
    with caplog.at_level(logging.WARNING, "holdfast"):
        saving = threading.Thread(target=lambda: run.save({"w": state["w"] + 3}, step=3))
        saving.start()
        while not caplog.messages:
            saving.join(0.01)
        assert "run: the save waits: 8" in caplog.text
        assert machine.folder.numbers() == [1, 2]
        goes.set()
        saving.join()
    run.wait(remote=True)
    assert run.handle.journal.waited_s > 0
    assert [step for step, _ in added(bucket)] == [1, 2, 3]
    run.close()


def test_a_state_beyond_the_bound_is_refused(bucket: Hooked, tmp_path: Path, by_hand: None) -> None:
    run = Machine(bucket, tmp_path / "journal", 1000).run()
    with pytest.raises(StoreFull, match="larger than the bound of the journal"):
        run.save({"w": np.zeros(5000)}, step=1)


def test_a_full_disk_leaves_nothing(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    with monkeypatch.context() as full:
        full.setattr(LocalBackend, "free_bytes", lambda self: 10)
        with pytest.raises(StoreFull):
            run.save(make_state(2), step=2)
    assert machine.folder.numbers() == [1]
    assert len(list((Path(machine.folder.path) / "states").iterdir())) == 1
    run.save(make_state(2), step=2)
    assert machine.folder.numbers() == [1, 2]


def test_a_forked_child_takes_over_for_itself(by_hand: None, tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "registry")  # a folder, which both processes see
    create_config(backend, "skipped")
    machine = Machine(backend, tmp_path / "journal")
    run = machine.run()
    run.save(make_state(1), step=1)
    lock = machine.folder.lock("carrying")
    assert lock.acquire()
    child = os.fork()
    if child == 0:
        try:
            run.restore()
            run.save(make_state(2), step=2)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    lock.release()
    assert machine.folder.entry(2).takeover == 2
    with pytest.raises(Fenced):
        run.save(make_state(3), step=3)
    machine.carry()
    assert [step for step, _ in added(machine.backend)] == [1, 2]


def test_reading_with_a_journal_makes_no_folder(machine: Machine, by_hand: None) -> None:
    with machine.registry() as registry:
        registry.run(RUN, create=True, seed=7)
        assert registry.run(RUN).restore() is None
    assert not Path(machine.journal.path).exists()


@pytest.mark.parametrize("given", ["-1", "0", "many"])
def test_a_bound_is_a_number_of_bytes(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_JOURNAL_BYTES", given)
    with pytest.raises(InvalidInput, match="a number of bytes above 0"):
        Journal("somewhere")


def test_the_journal_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose_journal(None) is None
    monkeypatch.setenv("HOLDFAST_JOURNAL", str(tmp_path))
    found = choose_journal(None)
    assert found is not None
    assert (found.path, found.max_bytes) == (str(tmp_path), 64 * 2**30)
    assert choose_journal("") is None


def test_a_save_that_failed_leaves_its_entries_to_the_next(
    machine: Machine, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, entry: object) -> int:
        raise StoreFull("no room", where=self.path)

    def save(step: int, **options: Any) -> Any:
        return run.save_async({"n": step}, step=step, streams={"loss": [{"step": step}]}, **options)

    run = machine.run()
    save(1).wait()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "acknowledge", full)
        failed = save(2, may_fail=1)
        with pytest.raises(StoreFull):
            failed.wait()
    save(3).wait()
    machine.carry()
    assert [one["step"] for one in machine.run().streams["loss"].read()] == [1, 2, 3]
