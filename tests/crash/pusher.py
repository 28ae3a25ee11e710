"""The process that gets killed: it comes back to its run and saves until it is gone."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import holdfast
from tests.support.pictures import RUN

#: Steps at which the trainer also reports a metric and moves a tag.
ANNOTATE_EVERY = 3
_KEPT = np.arange(4000, dtype=np.float32).reshape(40, 100)


def state_at(step: int) -> dict[str, Any]:
    """Return the state of a step, the same in every process."""
    fresh = np.random.default_rng(step)
    weights = fresh.standard_normal((40, 100)).astype(np.float32)
    return {
        "model": {"kept": _KEPT, "trained": weights},
        "optimizer": {"moments": fresh.standard_normal(500), "step": step},
        "rng": fresh.bit_generator.state,
    }


def push_until_killed(url: str, acks: Connection) -> None:
    """Save step after step, and tell of each once it is acknowledged."""
    reg = holdfast.open(url)
    run = reg.run(RUN, create=True, seed=7)
    restored = run.restore()
    step = restored.state["optimizer"]["step"] if restored else 0
    while True:
        step += 1
        if step % 2:
            checkpoint = run.save(state_at(step), step=step)
        else:
            checkpoint = run.save_async(state_at(step), step=step).wait()
        acks.send(("saved", step))
        if step % ANNOTATE_EVERY == 0:
            checkpoint.report({"loss": 1 / step})
            run.pins.tags.set("newest", checkpoint)
            acks.send(("annotated", step))
