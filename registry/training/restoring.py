"""Coming back to a run: the newest checkpoint that is whole, and what was passed over for it."""

from __future__ import annotations

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
)
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.load_to_train import load_to_train
from holdfast.registry.training.trainer import Trainer
from holdfast.registry.values.digest import Digest


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint that `restore` passed over.

    Attributes:
        ref: Which one.
        digest: Its id.
        reason: What was wrong with it.
    """

    ref: str
    digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` came back with.

    Attributes:
        state: The state.
        checkpoint: Where it is from.
        report: The newer checkpoints that could not be loaded, newest first.
    """

    state: Any
    checkpoint: Checkpoint
    report: tuple[Attempt, ...]


def check_source(run_id: str, at: Checkpoint) -> None:
    """Refuse what a run cannot be restored from.

    Raises:
        InvalidInput: It is no checkpoint, or another run's.
        Conflict: It is superseded or evicted.
    """
    if not isinstance(at, Checkpoint):
        raise InvalidInput(
            "not a checkpoint",
            expected="run.restore(at=reg.checkpoint('RUN/...'))",
            found=quoted(at),
        )
    if at.run_id != run_id:
        raise InvalidInput(
            "a run is restored from a checkpoint of its own", where=run_id, found=at.ref
        )
    if at.superseded:
        raise Conflict(
            "training has gone back behind this checkpoint already",
            where=at.ref,
            hint="Load it with `checkpoint.load()`, or fork a run of its own from it.",
        )
    if at.is_evicted:
        raise Conflict(
            "this checkpoint is not kept any more",
            where=at.ref,
            found=at.eviction(),
            hint="`holdfast undo` brings it back until it is collected.",
        )


def restore_newest(
    trainer: Trainer, newest_first: Callable[[], Sequence[Checkpoint]], map_location: object
) -> Restored | None:
    """Return the first state that can be loaded whole, and go on from there.

    Args:
        trainer: Goes on from it.
        newest_first: Gives the checkpoints that are kept, as the log has them now.
        map_location: Device for the tensors.

    Raises:
        RestoreFailed: There are candidates, and none could be loaded.
    """
    while True:
        try:
            return _first_whole(trainer, newest_first(), map_location)
        except _LetGo:
            continue  # and collected, while we looked: what took its place is newer


class _LetGo(Exception):
    """A candidate is kept no more: the list that it stands in is out of date."""


def _first_whole(
    trainer: Trainer, candidates: Sequence[Checkpoint], map_location: object
) -> Restored | None:
    passed: list[Attempt] = []
    for checkpoint in candidates:
        if checkpoint.record.held_back:
            why = f"weights that are not finite: {', '.join(checkpoint.nonfinite)}"
            passed.append(Attempt(checkpoint.ref, checkpoint.digest, why))
            continue
        try:
            state = load_to_train(checkpoint, map_location)
        except BeyondLimit:
            raise  # it may be whole, so do not silently restore an older one
        except IntegrityError as error:
            if checkpoint.is_evicted:
                raise _LetGo from error
            trainer.suspect(checkpoint)
            passed.append(Attempt(checkpoint.ref, checkpoint.digest, error.summary))
            continue
        trainer.resume_at(checkpoint)
        return Restored(state, checkpoint, tuple(passed))
    if not passed:
        return None
    damaged = any(not checkpoint.record.held_back for checkpoint in candidates)
    listed = "".join(f"\n  {a.ref} ({a.digest.short}): {a.reason}" for a in passed)
    raise RestoreFailed(
        f"none of {len(passed)} checkpoints could be loaded{listed}",
        where=candidates[0].run_id,
        hint="Restore the damaged files from a mirror; `holdfast verify --deep` names them."
        if damaged
        else "Go on from an older checkpoint by run.restore(at=...), or begin another run.",
    )
