"""Promise 7: what comes back is, byte for byte and type for type, the state that went in."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.backends import Backend
from tests.promises.training import Training, train
from tests.support.pictures import RUN
from tests.support.processes import start_process
from tests.support.sameness import assert_same
from tests.support.stores import opened


def test_promise_7_resume_is_bit_exact(store: Backend) -> None:
    training = Training(seed=7)
    for _ in range(3):
        training.step()
    with opened(store) as reg:
        reg.create_run(RUN, seed=7).save(training, step=3)
    with opened(store) as reg:
        restored = reg.run(RUN).restore()
    assert restored is not None
    assert_same(restored.state, training.state_dict())
    other = Training(seed=8)
    other.load_state_dict(restored.state)
    assert_same(other.state_dict(), training.state_dict())


@pytest.mark.xdist_group("forked")
def test_promise_7_training_that_was_interrupted_ends_like_one_that_was_not(tmp_path: Path) -> None:
    holdfast.init(tmp_path, skip_race_probe=True).close()
    for run_id, stop in (("straight", 8), ("resumed", 3), ("resumed", 8)):
        process = start_process(train, str(tmp_path), run_id, 7, stop)
        process.join()
        assert process.exitcode == 0
    with holdfast.open(tmp_path) as reg:
        straight, resumed = reg.checkpoint("straight"), reg.checkpoint("resumed")
        assert (straight.step, resumed.step) == (8, 8)
        assert straight.digest == resumed.digest
        assert_same(straight.load(), resumed.load())
