"""What all trainers share: a checkpointer's saves, as the callbacks pass them on."""

from __future__ import annotations

import pytest
import torch

from holdfast.backends.errors import StoreUnavailable
from holdfast.registry.adapters.saving import StepSaver
from tests.support.faults import Gate
from tests.support.loads import steps


@pytest.mark.parametrize("background", [True, False])
def test_a_training_goes_on_past_a_save_that_may_fail(backend, open_registry, background) -> None:
    gate = Gate(backend)
    gate.open.set()
    run = open_registry(gate).create_run("run")
    told = []
    with run.checkpointer(every_steps=1, may_fail=1, background=background) as checkpointer:
        saver = StepSaver(
            run,
            background=False,
            on_save=lambda checkpoint: told.append(checkpoint.step),
            checkpointer=checkpointer,
        )
        for step in (1, 2, 3):
            gate.error = StoreUnavailable("away") if step == 2 else None
            state = {"w": torch.full((100,), float(step))}
            saver.end_step(step, lambda state=state: state, {}, due=False, first=True)
            run.handle.saver.pipeline.wait(60)
        saver.end()
    assert steps(run) == told == [1, 3]
    assert checkpointer.failed_saves == 1
