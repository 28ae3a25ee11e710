"""Save the steps of a trainer that is not ours, and capture what every rank needs to resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed

from holdfast.backends.escape import quoted
from holdfast.registry import rng
from holdfast.registry.errors import InvalidInput
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.refs import find_in_run
from holdfast.registry.runs.run import Run
from holdfast.registry.training.pending import PendingSave

_LOGGER = logging.getLogger("holdfast")
OnSave = Callable[[Checkpoint], object]


class Saver:
    """Saves states of a run, in the foreground or in the background.

    Attributes:
        run: The run.
        step: Step of the newest state that was handed over or resumed from; `None` before any.

    Args:
        run: The run.
        background: Whether a save returns when the state has been copied.
        on_save: Called with each checkpoint once it is durable; for a save in the background at the
            next save or at the end, on the caller's thread.
    """

    def __init__(self, run: Run, *, background: bool, on_save: OnSave | None) -> None:
        self.run = run
        self.step: int | None = None
        self._background = background
        self._on_save = on_save
        self._pending: PendingSave | None = None
        self._newest: Checkpoint | None = None

    def save(
        self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float], meta: Any = None
    ) -> None:
        """Save the state of a step; an error of the save before is raised here."""
        self.settle()
        if self._background:
            pending = self.run.save_async(state, step=step, metrics=metrics, meta=meta)
            self._pending = pending
        else:
            self._tell(self.run.save(state, step=step, metrics=metrics, meta=meta))
        self.step = step

    def settle(self) -> Checkpoint | None:
        """Wait for the save under way; return the newest checkpoint, if one was saved."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._tell(pending.wait())
        return self._newest

    def _tell(self, checkpoint: Checkpoint) -> None:
        self._newest = checkpoint
        if self._on_save is not None:
            self._on_save(checkpoint)


def checkpoint_of(run: Run, ref: str) -> Checkpoint:
    """Return the checkpoint of a run that a ref names.

    Raises:
        InvalidInput: The ref names another run, or a state that is no checkpoint.
        NotFound: It names nothing.
    """
    name, _, rest = ref.partition("/")
    if name != run.id:
        raise InvalidInput(
            "a checkpoint of another run",
            where=quoted(ref),
            expected=f"{run.id}/...",
            hint="To continue it, open that run; to branch from it, `reg.fork(ref)`.",
        )
    found = find_in_run(run.refresh(), rest)
    if not isinstance(found, Checkpoint):
        raise InvalidInput("this is a stored state and no checkpoint", where=found.ref)
    return found


def capture_ranks() -> list[dict[str, Any]]:
    """Return the random number generators of every rank; every rank must call this."""
    own = rng.capture()
    if not torch.distributed.is_initialized():
        return [own]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def restore_rank(states: list[dict[str, Any]]) -> None:
    """Set the generators of this rank, if as many ranks train as did when they were captured."""
    shared = torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if shared else 1
    if ranks != len(states):
        _LOGGER.warning(
            "the state has random generators of %d ranks, and %d train: they keep their seeds, "
            "so this resume is not bit for bit",
            len(states),
            ranks,
        )
        return
    rng.restore(states[torch.distributed.get_rank() if shared else 0])
