"""A save that finds another one running: it waits, is skipped, or supersedes, and says so."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.saving import pipeline
from holdfast.registry.store import Threads
from tests.support.faults import Hooked
from tests.support.loads import steps


def state(value: float) -> dict[str, dict[str, np.ndarray]]:
    return {"m": {"w": np.full(1000, value)}}


@pytest.fixture
def held(gate, open_registry):
    """A run whose first save is running, and stays so until the gate is opened."""
    run = open_registry(gate).create_run("run")
    first = run.save_async(state(1), step=1)
    assert gate.reached.wait(300)
    return run, first


def test_a_skipped_save_says_so_and_is_not_made(held, gate):
    run, first = held
    skipped = run.save_async(state(2), step=2, busy="skip")
    assert (first.outcome, skipped.outcome, skipped.done()) == ("running", "skipped", True)
    with pytest.raises(Conflict, match="skipped"):
        skipped.wait()
    gate.open.set()
    assert first.wait().step == 1
    third = run.save_async(state(3), step=3, busy="skip")
    third.wait()
    assert (first.outcome, third.outcome, steps(run)) == ("saved", "saved", [1, 3])


def test_the_newest_of_the_waiting_saves_is_made_with_the_entries_of_all(held, gate):
    run, first = held
    waiting = [
        run.save_async(state(n), step=n, busy="supersede", streams={"loss": [{"step": n}]})
        for n in (2, 3, 4)
    ]
    assert [one.outcome for one in waiting] == ["superseded", "superseded", "running"]
    gate.open.set()
    run.close()
    assert [one.outcome for one in waiting] == ["superseded", "superseded", "saved"]
    assert steps(run) == [1, 4]
    assert (run.history.checkpoint(first.wait().handle.n).load()["m"]["w"] == 1).all()
    assert (waiting[-1].wait().load()["m"]["w"] == 4).all()
    assert [entry["step"] for entry in run.streams["loss"].read()] == [2, 3, 4]


def test_a_waiting_save_is_finished_before_a_save_in_the_foreground(held, gate):
    run, _ = held
    run.save_async(state(2), step=2, busy="supersede")
    threading.Timer(0.05, gate.open.set).start()
    run.save(state(3), step=3)
    assert steps(run) == [1, 2, 3]


def test_a_save_that_waits_says_for_how_long(held, gate, monkeypatch):
    run, first = held
    gate.open.set()
    first.wait()
    times_s = iter((99.0, 100.0, 107.0, 108.0))  # of the call, and of its wait
    clock = SimpleNamespace(monotonic=times_s.__next__)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "time", clock)
        second = run.save_async(state(2), step=2)
    assert (second.waited_s, second.wait().step) == (7.0, 2)


@pytest.mark.parametrize("busy", ["wait", "skip", "supersede"])
def test_the_next_call_raises_the_error_of_a_save_whatever_its_policy(backend, open_registry, busy):
    broken = Hooked(backend)
    run = open_registry(broken).create_run("run")
    broken.before = refuse_packs
    failed = run.save_async(state(1), step=1)
    with pytest.raises(TimeoutError):
        failed.wait(0)  # which is no report
    while not failed.done():
        pass
    broken.before = lambda method, key: None
    with pytest.raises(StoreUnavailable):
        run.save_async(state(2), step=2, busy=busy)
    run.save_async(state(3), step=3, busy=busy).wait()
    assert (failed.outcome, steps(run)) == ("failed", [3])


def refuse_packs(method: str, key: str) -> None:
    if method == "put_if_absent" and key.startswith("packs/"):
        raise StoreUnavailable("down", where=key)


def test_an_unknown_policy_is_refused(run):
    with pytest.raises(InvalidInput, match="wait or skip or supersede"):
        run.save_async(state(1), step=1, busy="later")
    assert steps(run) == []


class Greedy(Wrapper):
    """A store for whose objects of one kind there is no memory."""

    prefix = "none"

    def put_if_absent(self, key, body):
        if key.startswith(self.prefix):
            raise MemoryError
        return super().put_if_absent(key, body)


@pytest.mark.parametrize("prefix", ["packs/", "manifests/", "placements/", "runs/"])
def test_no_memory_in_the_saving_thread_leaves_nothing_visible(backend, open_registry, prefix):
    greedy = Greedy(backend)
    run = open_registry(greedy).create_run("run")
    run.save(state(1), step=1)
    greedy.prefix = prefix
    failed = run.save_async(state(2), step=2)
    with pytest.raises(MemoryError):
        failed.wait()
    assert failed.outcome == "failed"
    greedy.prefix = "none"
    assert steps(open_registry(backend).run("run")) == [1]
    run.save_async(state(2), step=2).wait()
    assert steps(run) == [1, 2]


def test_a_fork_while_a_save_runs_leaves_it_to_the_parent(held, gate, backend, open_registry):
    run, first = held
    child = os.fork()
    if not child:
        try:
            # The child is another trainer: it has no save to wait for, and none to repeat.
            run.handle.saver.pipeline.settle()
            os._exit(run.handle.saver.pipeline._background.is_busy)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert steps(open_registry(backend).run("run")) == []
    gate.open.set()
    first.wait()
    assert steps(run) == [1]


def test_ctrl_c_while_a_call_waits_for_a_save_leaves_that_save_whole(held, gate):
    run, first = held
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may ignore it
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        run.save_async(state(2), step=2)
    signal.signal(signal.SIGINT, before)
    assert steps(run) == []
    gate.open.set()
    assert first.wait().step == 1
    run.save_async(state(3), step=3).wait()
    assert steps(run) == [1, 3]


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, InvalidInput("the registry was closed")])
def test_a_call_that_ends_before_its_save_begins_leaves_no_wait(
    held, gate, monkeypatch, error, is_given
):
    run, first = held
    real = Threads.submit

    def submit(pool, work, *given):
        if pool._thread_name_prefix != "holdfast-save":
            return real(pool, work, *given)
        if is_given:  # the interrupt comes behind it
            gate.open.set()
            real(pool, work, *given).result()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Threads, "submit", submit)
        with pytest.raises((KeyboardInterrupt, InvalidInput)):
            run.save_async(state(2), step=2, busy="supersede")
    gate.open.set()
    run.wait(timeout_s=60)
    assert first.wait().step == 1
    run.save(state(3), step=3)
    assert steps(run) == ([1, 2, 3] if is_given else [1, 3])
