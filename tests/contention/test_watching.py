"""Processes of one group follow a run that is trained: they share its checkpoints, none is lost."""

from __future__ import annotations

from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import Acknowledge
from tests.contention.processes import all_at_once
from tests.support.states import make_state

pytestmark = pytest.mark.xdist_group("forked")

_FOLLOWERS = 4
_CHECKPOINTS = 12


def follow_or_train(reg: Registry, number: int, barrier: Barrier) -> list[int]:
    """Train where the number is the last one, else follow; return the steps that came.

    Follower 0 dies over its first checkpoint.
    """
    run = reg.run("shared")
    barrier.wait(300)
    if number == _FOLLOWERS:
        for step in range(1, _CHECKPOINTS + 1):
            run.save(make_state(step), step=step)
        run.status = "completed"
        return []
    came = []
    hold_s = 0.2 if number == 0 else 3600
    for checkpoint in run.follow.checkpoints(hold_s=hold_s, poll_s=0.01, longest_poll_s=0.05):
        assert checkpoint.load(only="model")
        came.append(checkpoint.step)
        if number == 0:
            break
    return came


def test_4_followers_share_a_run_while_it_is_trained(tmp_path: Path) -> None:
    url = str(tmp_path / "registry")
    with holdfast.init(url) as reg:
        reg.create_run("shared", seed=1)
    *told, _ = all_at_once(url, follow_or_train, _FOLLOWERS + 1)
    came = Counter(step for steps in told for step in steps)
    # Once each; the one that follower 0 died over, where it got any, once more.
    assert came == Counter([*range(1, _CHECKPOINTS + 1), *told[0]])
    assert len(told[0]) <= 1
    with holdfast.open(url) as reg:
        run = reg.run("shared")
        by_n = run.history.manifest().by_n
        done = [
            by_n[action.checkpoint].step
            for commit in run.history.commits()
            for action in commit.actions
            if isinstance(action, Acknowledge)
        ]
        assert sorted(done) == list(range(1, _CHECKPOINTS + 1))
        assert run.manifest.group("default").claims == ()
        assert reg.verify(deep=True).findings == ()
