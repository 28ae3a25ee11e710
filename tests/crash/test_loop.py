"""SIGTERM and SIGKILL at random moments of a training loop that saves in the background.

After SIGTERM the last completed step is there; after SIGKILL nothing is lost that was acknowledged;
and the next process continues from there.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from tests.crash.looper import state_at, train_until_told
from tests.support.inline import without_threads
from tests.support.pictures import RUN
from tests.support.processes import start_telling
from tests.support.sameness import assert_same

pytestmark = pytest.mark.xdist_group("forked")

_LONGEST_S = 0.06
#: Signals to one registry; then another one begins, so that opening does not get slow.
_EACH = 50


def _train_and_signal(url: str, every: int, signum: int, patience_s: float) -> Counter[str]:
    """Send a signal some time after the loop has begun; return the last step of each kind."""
    process, receiving = start_telling(train_until_told, url, every)
    last = Counter([])
    kind, step = receiving.recv()
    last[kind] = step
    time.sleep(patience_s)
    assert process.pid is not None
    os.kill(process.pid, signum)
    while True:
        try:
            kind, step = receiving.recv()
        except EOFError:
            break
        last[kind] = step
    receiving.close()
    process.join()
    assert process.exitcode == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
    return last


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("signals", [12, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_loop_that_gets_signals_loses_nothing(
    tmp_path: Path, signals: int, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(signals)
    told: Counter[str] = Counter()
    for number in range(signals):
        url = str(tmp_path / f"registry{number // _EACH}")
        if number % _EACH == 0:
            holdfast.init(url, skip_race_probe=True).close()
            durable = 0
        signum = chance.choice((signal.SIGTERM, signal.SIGKILL))
        every = chance.choice((1, 3, 1000))
        last = _train_and_signal(url, every, signum, chance.uniform(0, _LONGEST_S))
        assert last["ready"] == durable
        with without_threads(holdfast.open(url)) as reg:
            run = reg.run(RUN)
            latest = run.latest()
            step = latest.step if latest else 0
            if latest is not None:
                assert_same(latest.load(), state_at(step))
            if signum == signal.SIGTERM:
                assert (step, run.status) == (max(last["complete"], durable), "interrupted")
            else:
                assert max(last["durable"], durable) <= step <= max(last["complete"], durable)
            if number % _EACH == _EACH - 1 or number == signals - 1:
                assert reg.verify(deep=True).findings == ()
                known = [checkpoint.step for checkpoint in run.checkpoints()]
                assert known == sorted(set(known))
        told.update([signal.Signals(signum).name])
        told["steps"] += max(last["complete"] - durable, 0)
        durable = step
    record_property("told", dict(told))
    print(dict(told))
