"""Two trainers that were started together, and a run that was dropped: who says what."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.registry.errors import Conflict, Fenced


def state(value: int) -> dict:
    return {"w": np.full(20, value)}


@pytest.mark.parametrize("step", [1, 2])
def test_two_trainers_started_together_are_fenced_from_each_other(
    reg, backend, open_registry, step
) -> None:
    reg.create_run("run")
    trainers = [open_registry(backend).run("run", create=True) for _ in range(2)]
    for trainer in trainers:
        assert trainer.restore() is None
    trainers[0].save(state(0), step=step)
    with pytest.raises(Fenced, match=r"another trainer has taken this run over.* found \S+ at 20"):
        trainers[1].save(state(1), step=1)
    trainers[0].save(state(2), step=3)


def test_a_trainer_that_never_asked_is_told_to(reg, backend, open_registry) -> None:
    reg.create_run("run").save(state(0), step=1)
    other = open_registry(backend).run("run")
    for _ in range(2):  # the warning that it takes the run over is no asking
        with pytest.raises(Conflict, match=r"call `run.restore") as refused:
            other.save(state(1), step=1)
        assert not isinstance(refused.value, Fenced)


def test_a_dropped_run_is_refused_where_it_is_opened_to_train(reg, backend, open_registry) -> None:
    reg.create_run("run").retention.drop("bad")
    with pytest.raises(Conflict, match=r"the run was dropped.*dropped for the reason 'bad'"):
        open_registry(backend).run("run", create=True)
    assert open_registry(backend).run("run").manifest.dropped == "bad"


def test_a_fenced_trainer_goes_on_as_its_message_says(reg, backend, open_registry) -> None:
    first = reg.create_run("run")
    first.save(state(0), step=1)
    other = open_registry(backend).run("run")
    other.restore()
    other.save(state(1), step=2)
    with pytest.raises(Fenced) as refused:
        first.save(state(2), step=2)
    assert "To go on with this one, call `run.restore()`" in str(refused.value.hint)
    assert "Perhaps a child of this process saved" in str(refused.value.hint)
    assert first.restore().checkpoint.step == 2
    first.save(state(3), step=3)
    with pytest.raises(Fenced):
        other.save(state(4), step=3)
