"""A process that pushes is killed at a random instant, again and again, over one growing registry.

After each kill everything that was acknowledged is there and the registry is sound; the process
that comes next takes the run over and goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.face.registry import Registry
from tests.crash.pusher import push_until_killed, state_at
from tests.support.inline import without_threads
from tests.support.pictures import RUN
from tests.support.processes import start_telling
from tests.support.sameness import assert_same

pytestmark = pytest.mark.xdist_group("forked")

_LONGEST_S = 0.3
_DEEP_EVERY = 20

Acks = list[tuple[str, int]]


def _push_and_kill(url: str, patience_s: float) -> Acks:
    """Kill a pusher some time after its first acknowledgement; return what it acknowledged."""
    pusher, receiving = start_telling(push_until_killed, url)
    acks: Acks = [receiving.recv()]
    time.sleep(patience_s)
    pusher.kill()
    pusher.join()
    while True:
        try:
            acks.append(receiving.recv())
        except EOFError:
            receiving.close()
            return acks


def _check_all(reg: Registry, acked: int, tagged: int, since: int) -> None:
    """Check that every acknowledged step from `since` on loads, and that older ones are listed."""
    run = reg.run(RUN)
    checkpoints = {checkpoint.step: checkpoint for checkpoint in run.checkpoints()}
    # A kill between the commit and its acknowledgement leaves an unacknowledged step.
    assert list(checkpoints) == list(range(1, len(checkpoints) + 1))
    assert len(checkpoints) >= acked
    for step in range(since, len(checkpoints) + 1):
        assert_same(checkpoints[step].load(), state_at(step))
    if tagged:
        assert run.manifest.by_n[run.manifest.tags["newest"]].step >= tagged
        assert checkpoints[tagged].metrics == {"loss": 1 / tagged}


def _kill_again_and_again(place: Path, kills: int) -> tuple[int, int]:
    """Return the numbers of checkpoints acknowledged and of those found."""
    url = str(place)
    holdfast.init(url, skip_race_probe=True).close()
    chance = random.Random(kills)
    acked = tagged = saves = 0
    for kill in range(1, kills + 1):
        known = acked
        for event, step in _push_and_kill(url, chance.uniform(0, _LONGEST_S)):
            if event == "saved":
                assert step > acked
                acked = step
                saves += 1
            else:
                tagged = step
        thorough = kill % _DEEP_EVERY == 0 or kill == kills
        with without_threads(holdfast.open(url)) as reg:
            assert reg.verify(deep=thorough).findings == ()
            _check_all(reg, acked, tagged, since=1 if thorough else known + 1)
    with holdfast.open(url) as reg:
        return saves, len(reg.run(RUN).checkpoints())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.soak)])
def test_acknowledged_checkpoints_survive_kill(
    tmp_path: Path, kills: int, record_property: Callable[[str, object], None]
) -> None:
    acked, found = _kill_again_and_again(tmp_path / "registry", kills)
    # At every kill at most one commit can have landed without an acknowledgement.
    assert acked <= found <= acked + kills
    record_property("acknowledged", acked)
    print(f"{kills} kills: {acked} checkpoints acknowledged, {found} found")
