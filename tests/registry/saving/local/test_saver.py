"""What a trainer must not do to others, nor its own interrupted calls to its own saves."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch

from holdfast import Monitor
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import Conflict, Damaged, Fenced, IncompatibleState, InvalidInput
from holdfast.registry.face.factory import open as open_place
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.syncing import sync
from holdfast.registry.history import slots
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.saving.pending import PendingSave
from holdfast.registry.store.store import create_config
from tests.support.faults import Gate, Silent, flip
from tests.support.states import save_small, small_state
from tests.support.stores import new_backend, packs_of


def test_an_interrupted_wait_does_not_forget_the_save_under_way(
    backend, open_registry, monkeypatch
):
    gate = Gate(backend)
    run = open_registry(gate).create_run("run")
    state = {"m": {"w": np.ones(1000)}}
    pending = run.save_async(state, step=1)
    assert gate.reached.wait(300)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.save_async({"m": {"w": np.full(1000, 2.0)}}, step=2)
    # The next one must wait for the first, whose copy is in the memory that it needs.
    late = threading.Thread(
        target=lambda: run.save_async({"m": {"w": np.full(1000, 3.0)}}, step=3).wait()
    )
    late.start()
    late.join(0.1)
    assert late.is_alive()
    gate.open.set()
    late.join(300)
    assert (pending.wait().load()["m"]["w"] == 1).all()


def test_an_interrupted_wait_does_not_count_as_being_told(backend, open_registry, monkeypatch):
    class Failing(Gate):
        def put_if_absent(self, key, body):
            super().put_if_absent(key, body)
            raise StoreUnavailable("down", where=key)

    gate = Failing(backend)
    run = open_registry(backend).create_run("run")
    run = open_registry(gate).run("run")
    pending = run.save_async(small_state(), step=1)
    with pytest.raises(TimeoutError):
        pending.wait(0.01)
    gate.open.set()
    with pytest.raises(StoreUnavailable):
        run.save(small_state(), step=2)


def test_a_reader_that_leaves_its_block_leaves_the_status(run, backend, open_registry):
    run.save(small_state(), step=1)
    with open_registry(backend).run("run") as reader:
        reader.latest().load()
    assert open_registry(backend).run("run").status == "running"
    run.save(small_state(2), step=2)


def test_a_fenced_trainer_that_leaves_its_block_leaves_the_status(run, backend, open_registry):
    other = open_registry(backend).run("run")

    def train():
        with run:
            run.save(small_state(1), step=1)
            other.save(small_state(2), step=2)
            run.save(small_state(3), step=3)

    with pytest.raises(Fenced):
        train()
    assert open_registry(backend).run("run").status == "running"
    other.save(small_state(4), step=4)


def test_a_last_background_save_that_fails_leaves_the_run_failed(backend, open_registry):
    run = open_registry(Silent(backend, "packs/")).create_run("run")

    def train():
        with run:
            run.save_async(small_state(), step=1)

    with pytest.raises(StoreUnavailable):
        train()
    assert open_registry(backend).run("run").status == "failed"


def test_saving_on_after_a_failure_says_that_the_run_goes_on(run):
    def train():
        with run:
            run.save(small_state(1), step=1)
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        train()
    assert run.status == "failed"
    run.save(small_state(2), step=2)
    assert run.status == "running"


def test_a_repeated_save_whose_first_landed_unheard_commits_once(backend, open_registry):
    class Deaf(Wrapper):
        """Puts slots and answers nothing; reads of that slot fail too."""

        deaf = False

        def put_if_absent(self, key, body):
            done = super().put_if_absent(key, body)
            if self.deaf and "/log/" in key:
                raise StoreUnavailable("no answer", where=key)
            return done

        def get(self, key, byte_range=None, *, into=None):
            if self.deaf and "/log/" in key:
                raise StoreUnavailable("no answer", where=key)
            return super().get(key, byte_range, into=into)

    first = open_registry(backend).create_run("run")
    save_small(first, 1, 2)
    store = Deaf(backend)
    run = open_registry(store).run("run")
    run.restore(at=run.checkpoints()[0])
    store.deaf = True
    with pytest.raises(StoreUnavailable):
        run.save(small_state(3), step=2)
    store.deaf = False
    saved = run.save(small_state(3), step=2)
    assert [c.step for c in run.checkpoints()] == [1, 2]
    assert len(run.manifest.checkpoints) == 3
    assert not saved.superseded


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_another_trainer(tmp_path):
    from holdfast import init

    with init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("run")
        run.save_async(small_state(1), step=1).wait()
        child = os.fork()
        if child == 0:
            try:
                run.save_async(small_state(2), step=2).wait(300)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(Fenced):
            run.save(small_state(3), step=3)


class Held(Wrapper):
    """Holds the put of a slot in the process that made it."""

    def __init__(self, inner, key: str) -> None:
        super().__init__(inner)
        self._pid, self._key = os.getpid(), key
        self.reached, self.go_on = threading.Event(), threading.Event()

    def put_if_absent(self, key, body):
        if key == self._key and os.getpid() == self._pid:
            self.reached.set()
            self.go_on.wait(300)
        return super().put_if_absent(key, body)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_waits_for_no_lock_of_its_parents_save(tmp_path):
    backend = LocalBackend(tmp_path / "reg")
    create_config(backend, "skipped")
    held = Held(backend, slot_key("run", 1))
    with open_on(held) as reg:
        run = reg.create_run("run", seed=1)
        pending = run.save_async(small_state(1), step=1)
        assert held.reached.wait(300)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(120)
                run.pins.artifacts.set("kept", small_state(2))
                run.exchange.push(small_state(3), step=1, phase="other")
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        held.go_on.set()
        assert status == 0
        assert pending.wait(300).step == 1


class Reading(Wrapper):
    """Holds each read of a pack in the process that made it."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self._pid, self._readers = os.getpid(), threading.Semaphore(0)
        self.go_on = threading.Event()

    def get(self, key, byte_range=None, *, into=None):
        if key.startswith("packs/") and os.getpid() == self._pid:
            self._readers.release()
            self.go_on.wait(300)
        return super().get(key, byte_range, into=into)

    def await_readers(self, count: int) -> None:
        for _ in range(count):
            assert self._readers.acquire(timeout=300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_waits_for_no_pack_that_its_parent_verifies(tmp_path):
    backend = LocalBackend(tmp_path / "reg")
    create_config(backend, "skipped")
    noise = np.random.default_rng(0)
    state = {f"part{n}": {"w": noise.standard_normal(300_000)} for n in range(4)}
    with open_on(backend) as first:
        first.create_run("first", seed=1).save(state, step=1)
    reading = Reading(backend)
    with open_on(reading) as reg:
        run, other = (reg.create_run(name, seed=1) for name in ("run", "other"))
        pending = run.save_async(state, step=1)
        reading.await_readers(2)
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(120)
                other.save(state, step=1)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        reading.go_on.set()
        assert status == 0
        assert pending.wait(300).step == 1


def test_a_training_that_restored_nothing_does_not_begin_before_the_newest_step(
    run, backend, open_registry
):
    run.save(small_state(1), step=60)
    again = open_registry(backend).run("run")
    with pytest.raises(Conflict, match="already has later steps"):
        again.save(small_state(2), step=5)
    assert again.exchange.push(small_state(2), step=5).step == 5
    again.save(small_state(3), step=5, phase="other")


def test_a_superseded_checkpoint_is_found_by_its_ref_and_not_restored(run, reg):
    run.save(small_state(1), step=1)
    old = run.save(small_state(2), step=2)
    run.restore(at=run.checkpoints()[0])
    run.save(small_state(3), step=2)
    assert reg.checkpoint(old.ref).digest == old.digest
    with pytest.raises(Conflict, match="is superseded"):
        run.restore(at=old)
    with pytest.raises(InvalidInput, match="not a checkpoint"):
        run.restore(at="run/latest")


def test_other_monitors_than_the_runs_are_refused(reg):
    loss = Monitor(metric="loss", mode="min")
    reg.run("r", create=True, monitor=loss)
    reg.run("r", create=True, monitor=loss)
    with pytest.raises(Conflict, match="loss:min"):
        reg.run("r", create=True, monitor=Monitor(metric="acc", mode="max"))
    with pytest.raises(InvalidInput):
        Monitor(metric="loss", mode="lower")


def test_a_look_up_keeps_no_run(reg, run):
    run.save(small_state(), step=1)
    held = len(reg._opened)
    for _ in range(3):
        reg.checkpoint("run/latest")
    assert len(reg._opened) == held


def test_the_environment_names_the_registry(tmp_path, monkeypatch):
    from holdfast import init

    init(tmp_path / "reg", skip_race_probe=True).close()
    monkeypatch.setenv("HOLDFAST_REGISTRY", str(tmp_path / "reg"))
    open_place().close()
    monkeypatch.delenv("HOLDFAST_REGISTRY")
    with pytest.raises(InvalidInput, match="HOLDFAST_REGISTRY"):
        open_place()


def test_tensors_of_a_target_that_share_memory(run):
    weight = torch.arange(100.0)
    same = run.save({"m": {"a": weight, "b": weight.clone()}}, step=1)
    other = run.save({"m": {"a": weight, "b": weight + 1}}, step=2)
    shared = torch.zeros(100)
    same.load_into({"a": shared, "b": shared}, component="m")
    assert torch.equal(shared, weight)
    with pytest.raises(IncompatibleState, match="share memory"):
        other.load_into({"a": shared, "b": shared}, component="m")


def test_one_damaged_run_does_not_keep_the_others_from_the_mirror(reg, backend, open_registry):
    damaged = reg.create_run("a").save(small_state(1), step=1)
    reg.create_run("b").save(small_state(2), step=1)
    flip(backend, packs_of(damaged)[0])
    target = open_registry(new_backend("mirror"))
    with pytest.raises(Damaged, match=r"Not copied: a\. Copied or up to date: b"):
        sync(open_registry(backend), target)
    assert target.run("b").latest().step == 1


def test_a_save_that_landed_without_an_answer_is_no_reason_to_go_back_again(
    backend, open_registry, monkeypatch
):
    class Deaf(Wrapper):
        ears = True

        def put_if_absent(self, key, body):
            created = super().put_if_absent(key, body)
            if not self.ears and "/log/" in key:
                raise StoreUnavailable("no answer", where=key)
            return created

        def get(self, key, byte_range=None, *, into=None):
            if not self.ears and key == slot_key("run", 3):
                raise StoreUnavailable("no answer", where=key)
            return super().get(key, byte_range, into=into)

    monkeypatch.setattr(slots, "_LONGEST_PAUSE_S", 0.0)
    run = open_registry(backend).create_run("run")
    first = run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    deaf = Deaf(backend)
    again = open_registry(deaf).run("run")
    again.restore(at=first)
    deaf.ears = False
    with pytest.raises(StoreUnavailable):
        again.save(small_state(3), step=2)
    deaf.ears = True
    saved = again.save(small_state(3), step=2)
    assert [ck.handle.newest_record().superseded for ck in (saved, first)] == [False, False]
    assert (saved.handle.n, again.manifest.commits) == (3, 4)
