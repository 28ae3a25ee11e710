"""Locks of a process: a forked child waits for none that a thread of its parent holds."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.registry.history.condemned_names import CondemnedNames
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.values import first_use
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.figures import Figures
from holdfast.registry.values.first_use import collector_paused
from holdfast.registry.values.process import cores
from tests.support.states import save_small


class Stuck(OrderedDict[Any, Any]):
    """A table at which a thread of the process that made it stops, with the table's lock."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __contains__(self, key: object) -> bool:
        self._stop()
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._stop()
        return super().get(key, default)

    def _stop(self) -> None:
        if os.getpid() == self._pid:
            self.reached.set()
            self.go_on.wait(300)


def _figures(reg: Any, stuck: Stuck) -> Callable[[], object]:
    figures = Figures()
    figures._values = stuck
    return lambda: figures.fail(ValueError(), "save")


def _store(reg: Any, stuck: Stuck) -> Callable[[], object]:
    run = reg.create_run("run", seed=1)
    save_small(run, 1)
    checkpoint = reg.run("run").latest()
    reg.handle.store._manifests = stuck
    return checkpoint.load


def _condemned_names(reg: Any, stuck: Stuck) -> Callable[[], object]:
    names, key = CondemnedNames(reg.handle.store), ObjectKey("packs", Digest.of(b"x"), 0)
    table = names.put([key], epoch=1)
    names._kept = stuck
    return lambda: names.among(table, [key])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("made", [_figures, _store, _condemned_names])
def test_a_forked_child_waits_for_no_lock_of_another_thread(made: Any, reg: Any) -> None:
    stuck = Stuck()
    act = made(reg, stuck)
    thread = threading.Thread(target=act)
    thread.start()
    assert stuck.reached.wait(300)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    stuck.go_on.set()
    thread.join(300)
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_during_a_pause_collects_cycles() -> None:
    paused, ended = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            paused.set()
            ended.wait(300)

    thread = threading.Thread(target=pause)
    thread.start()
    assert paused.wait(300)
    assert not gc.isenabled()
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended.set()
    thread.join(300)
    assert (status, gc.isenabled()) == (0, True)


@pytest.mark.parametrize("longest_s", [60.0, -1.0], ids=["short", "long"])
def test_pauses_that_overlap_end_with_the_last_one_that_began_in_time(
    monkeypatch: pytest.MonkeyPatch, longest_s: float
) -> None:
    monkeypatch.setattr(first_use, "_LONGEST_S", 60.0)
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    monkeypatch.setattr(first_use, "_LONGEST_S", longest_s)
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.isenabled() == (longest_s < 0)
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_collector_that_the_program_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_within_a_pause_turns_the_collector_on_in_the_child() -> None:
    child, code = -1, 1
    try:
        with collector_paused():
            child = os.fork()
            code = 0 if gc.isenabled() == (child == 0) else 1
    except IndexError:
        code = 1
    if child == 0:
        os._exit(code)
    assert code == 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


def test_imports_at_first_use_wait_for_no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def watched(name: str) -> object:
        seen.append(gc.isenabled())
        return importlib.import_module(name)

    monkeypatch.setattr(first_use, "import_module", watched)
    assert first_use.at_first_use("holdfast")("Digest") is Digest
    assert (seen, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize(
    ("machine", "bound", "ranks", "expected"),
    [
        (64, 64, None, 64),
        (64, 64, "8", 8),  # unbound ranks, as torchrun starts them
        (64, 8, "8", 8),  # ranks that SLURM has bound
        (2, 2, "4", 1),
        (4, 64, None, 4),  # `PYTHON_CPU_COUNT=4`
        (4, 64, "2", 2),
        (64, 64, "many", 64),
        (64, 64, "0", 64),
        (None, None, "2", 1),  # a system that does not tell
    ],
)
def test_a_rank_counts_its_own_cores(monkeypatch, machine, bound, ranks, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    if bound is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(bound))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores() == expected
