"""Weights & Biases: name a checkpoint in the history of a W&B run, and upload nothing."""

from __future__ import annotations

from typing import Any

import wandb

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.loading import Checkpoint

__all__ = ["log"]


def log(checkpoint: Checkpoint, *, run: Any = None) -> None:
    """Log ref, id and step of a checkpoint; the data stays where it is, and nothing is uploaded.

    The keys are `holdfast/ref`, `holdfast/id` and `holdfast/step`. They join what the program logs
    next, so W&B's step does not move; the run's summary shows the newest.

    Args:
        checkpoint: The checkpoint.
        run: The W&B run. Default: the one that `wandb.init` began.

    Raises:
        InvalidInput: It is not a checkpoint, or there is no W&B run.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidInput(
            "not a checkpoint",
            where="holdfast.wandb.log",
            expected="what run.save() returns, or save_async(...).wait()",
            found=quoted(checkpoint),
        )
    into = wandb.run if run is None else run
    if into is None:
        raise InvalidInput(
            "there is no W&B run to log to",
            where="holdfast.wandb.log",
            expected="wandb.init(...) before it, or run=",
        )
    values = {"ref": checkpoint.ref, "id": str(checkpoint.digest), "step": checkpoint.step}
    into.log({f"holdfast/{name}": value for name, value in values.items()}, commit=False)
