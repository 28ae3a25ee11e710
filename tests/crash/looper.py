"""The training loop that gets signals: tiny steps, and a note of each before anybody else knows."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import holdfast
from holdfast.registry.saving.pending import PendingSave
from tests.support.pictures import RUN


def state_at(step: int) -> dict[str, Any]:
    """Return the state of a step, the same in every process."""
    return {"model": np.random.default_rng(step).standard_normal(50), "step": step}


def train_until_told(url: str, every_steps: int, said: Connection) -> None:
    """Train until a signal ends it; tell of each step that is complete, and of each durable one."""
    run = holdfast.open(url).run(RUN, create=True, seed=7)
    restored = run.restore()
    step = restored.state["step"] if restored else 0
    running: list[PendingSave] = []
    with run.checkpointer(every_steps=every_steps) as checkpointer:
        said.send(("ready", step))
        while True:
            step += 1
            state = state_at(step)
            said.send(("complete", step))
            saved = checkpointer.step(step, state)
            running += [saved] if saved else []
            while running and running[0].done():
                said.send(("durable", running.pop(0).wait().step))
