"""Many processes promote and rate at once: every version is given once, every match counts once."""

from __future__ import annotations

from collections import Counter
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import EvictEntries, Promote
from holdfast.registry.spec import Phase, Pool, RunSpec
from tests.contention.processes import all_at_once

pytestmark = pytest.mark.xdist_group("forked")

_PROCESSES = 8
#: How many checkpoints each of them promotes.
EACH = [1, pytest.param(4, marks=pytest.mark.soak)]
_SIZE = 5
_PATIENCE_S = 300
_SPEC = RunSpec(
    phases=(Phase(name="league"),), inference=("model",), pool=Pool(phase="league", size=_SIZE)
)


def _player(i: int) -> dict[str, Any]:
    weights = np.arange(300, dtype=np.float32)
    return {"model": {"w": weights + i}, "optimizer": {"m": weights * i}}


def _fill(url: str, checkpoints: int) -> None:
    with holdfast.open(url) as reg:
        run = reg.create_run("shared", seed=1, preset=_SPEC)
        for step in range(checkpoints):
            run.save(_player(step), step=step, phase="league")


def promote(reg: Registry, number: int, barrier: Barrier, each: int) -> list[tuple[int, int]]:
    """Promote checkpoints that no other process does; return each one's step and version."""
    run = reg.run("shared")
    mine = [one for one in run.checkpoints() if one.step // each == number]
    barrier.wait(_PATIENCE_S)
    return [(one.step, run.pool.promote(one).version) for one in mine]


def promote_the_newest(reg: Registry, number: int, barrier: Barrier) -> int:
    """Promote the checkpoint that all others promote as well; return its version."""
    run = reg.run("shared")
    newest = run.latest()
    assert newest is not None
    barrier.wait(_PATIENCE_S)
    return run.pool.promote(newest).version


def play(reg: Registry, number: int, barrier: Barrier, matches: int) -> None:
    """Record matches of this process's own, and some that every process records."""
    run = reg.run("shared")
    barrier.wait(_PATIENCE_S)
    for match in range(matches):
        for name in (f"{number}-{match}", f"all-{match}"):
            run.pool.record_match([1, 2], [1, 2], match=name)


def _check_promotions(url: str, each: int) -> None:
    total = _PROCESSES * each
    _fill(url, total)
    told = dict(pair for pairs in all_at_once(url, promote, _PROCESSES, each) for pair in pairs)
    assert sorted(told) == list(range(total))
    assert sorted(told.values()) == list(range(1, total + 1))
    with holdfast.open(url) as reg:
        run = reg.run("shared")
        assert [entry.version for entry in run.pool.entries()] == list(range(1, total + 1))
        assert {entry.step: entry.version for entry in run.pool.entries()} == told
        playing = [entry.version for entry in run.pool.roster()]
        assert playing == list(range(total - _SIZE + 1, total + 1))
        # In the log: each version promoted once, each of the others evicted once, oldest first.
        actions = [action for commit in run.history.commits() for action in commit.actions]
        promoted = [action.version for action in actions if isinstance(action, Promote)]
        evicted = [
            v for action in actions if isinstance(action, EvictEntries) for v in action.versions
        ]
        assert promoted == list(range(1, total + 1))
        assert evicted == list(range(1, total - _SIZE + 1))
        for entry in run.pool.roster():
            assert entry.load()["model"]["w"][0] == entry.step
        assert reg.verify(deep=True).findings == ()
    with holdfast.open(url) as reg:
        run = reg.run("shared")
        gone = next(one for one in run.checkpoints() if told[one.step] == 1)
        assert run.pool.promote(gone).version == total + 1


@pytest.mark.parametrize("each", EACH)
def test_8_processes_promote_into_one_pool_in_a_folder(folder: str, each: int) -> None:
    _check_promotions(folder, each)


@pytest.mark.soak  # as in a folder; test_processes.py annotates one run in a bucket
@pytest.mark.radosgw
@pytest.mark.parametrize("each", EACH)
def test_8_processes_promote_into_one_pool_in_a_bucket(bucket: str, each: int) -> None:
    _check_promotions(bucket, each)


def test_a_checkpoint_that_8_processes_promote_enters_once(folder: str) -> None:
    _fill(folder, 2)
    assert all_at_once(folder, promote_the_newest, _PROCESSES) == [1] * _PROCESSES
    with holdfast.open(folder) as reg:
        assert [entry.version for entry in reg.run("shared").pool.entries()] == [1]
        assert reg.verify(deep=True).findings == ()


def test_matches_of_8_processes_count_once_each(folder: str) -> None:
    matches = 3
    _fill(folder, 2)
    with holdfast.open(folder) as reg:
        run = reg.run("shared")
        for checkpoint in run.checkpoints():
            run.pool.promote(checkpoint)
    all_at_once(folder, play, _PROCESSES, matches)
    with holdfast.open(folder) as reg:
        pool = reg.run("shared").pool
        expected = _PROCESSES * matches + matches
        assert [entry.games for entry in pool.roster()] == [expected, expected]
        assert [entry.wins for entry in pool.roster()] == [expected, 0]
        names = Counter(event.match for event in pool.history(1) if event.event == "rated")
        assert len(names) == expected
        assert set(names.values()) == {1}
        last = pool.history(1)[-1]
        assert (last.mu, last.games) == (pool.entry(1).mu, expected)
