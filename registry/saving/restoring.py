"""Restore a run: load its newest checkpoint that is intact and that this program can read.

Newer ones that are damaged, held back or of another schema version are reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry.errors import (
    BeyondLimit,
    Conflict,
    IntegrityError,
    InvalidInput,
    RestoreFailed,
    Thinned,
)
from holdfast.registry.loading import Checkpoint, load_to_train
from holdfast.registry.saving.saver import RunHandle
from holdfast.registry.spec import CannotMigrate
from holdfast.registry.values import Digest

_LOGGER = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint that `restore` skipped."""

    ref: str
    digest: Digest  # its id
    reason: str  # why it was skipped


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `restore`.

    Attributes:
        state: The state.
        checkpoint: Its checkpoint.
        report: The newer checkpoints that were skipped, newest first.
        pivot: The name of a pivot after the checkpoint: the state is changed as it says.
        stale: Paths of names in the state, or in streams, whose source is gone.
    """

    state: Any
    checkpoint: Checkpoint
    report: tuple[Attempt, ...]
    pivot: str | None = None
    stale: tuple[str, ...] = ()


def check_source(run_id: str, at: Checkpoint) -> None:
    """Refuse a checkpoint from which a run cannot be restored."""
    if not isinstance(at, Checkpoint):
        raise InvalidInput(
            "not a checkpoint",
            expected="run.restore(at=reg.checkpoint('RUN/...'))",
            found=quoted(at),
        )
    if at.run_id != run_id:
        raise InvalidInput("not a checkpoint of this run", where=run_id, found=at.ref)
    if at.superseded:
        raise Conflict(
            "this checkpoint is superseded: training went back to an earlier one",
            where=at.ref,
            hint="Load it with `checkpoint.load()`, or fork a new run from it.",
        )
    if at.is_evicted:
        raise Conflict(
            "this checkpoint was evicted",
            where=at.ref,
            found=at.eviction(),
            hint="`holdfast undo` can recover it until its data is collected.",
        )


def restore_newest(
    handle: RunHandle, map_location: object, check: Callable[[Checkpoint], None] | None = None
) -> Restored | None:
    """Load the newest intact checkpoint, and continue from it."""
    while True:
        try:
            return _first_intact(handle, handle.training.newest_first(), map_location, check)
        except _Evicted:
            continue  # and collected meanwhile: read the log again


class _Evicted(Exception):
    """A checkpoint was evicted meanwhile: the list of checkpoints is out of date."""


def _first_intact(
    handle: RunHandle,
    checkpoints: Sequence[Checkpoint],
    map_location: object,
    check: Callable[[Checkpoint], None] | None,
) -> Restored | None:
    skipped: list[Attempt] = []
    strange = False
    for checkpoint in checkpoints:
        if checkpoint.handle.newest_record().held_back:
            why = f"weights that are not finite: {', '.join(checkpoint.nonfinite)}"
            skipped.append(Attempt(checkpoint.ref, checkpoint.digest, why))
            continue
        try:
            if check is not None:
                check(checkpoint)
            state = load_to_train(checkpoint, map_location)
        except BeyondLimit:
            raise  # it may be intact, so do not silently restore an older one
        except CannotMigrate as error:
            skipped.append(Attempt(checkpoint.ref, checkpoint.digest, error.summary))
            strange = True
            continue
        except IntegrityError as error:
            if checkpoint.is_evicted:
                raise _Evicted from error
            if not isinstance(error, Thinned):
                handle.ownership.suspect(checkpoint)
            skipped.append(Attempt(checkpoint.ref, checkpoint.digest, error.summary))
            continue
        handle.ownership.has_read(checkpoint)
        pivot = handle.training.resume_after(checkpoint)
        for passed in skipped:
            _LOGGER.warning(
                "restored %s and passed over the newer %s (%s): %s",
                checkpoint.ref,
                passed.ref,
                passed.digest.short,
                passed.reason,
            )
        return Restored(state, checkpoint, tuple(skipped), pivot)
    if not skipped:
        return None
    if strange:
        hint = "Register the missing migrations (register_migration)."
    elif any(not checkpoint.handle.newest_record().held_back for checkpoint in checkpoints):
        hint = "Restore the damaged files from a mirror; `holdfast verify --deep` names them."
    else:
        hint = "Continue from an older one with run.restore(at=...), or create another run."
    listed = "".join(f"\n  {a.ref} ({a.digest.short}): {a.reason}" for a in skipped)
    raise RestoreFailed(
        f"none of {len(skipped)} checkpoints could be loaded{listed}",
        where=checkpoints[0].run_id,
        hint=hint,
    )
