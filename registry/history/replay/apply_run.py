"""Replay of actions on the run as a whole."""

from __future__ import annotations

from holdfast.registry.history.actions import (
    CreateRun,
    DropRun,
    EnterPhase,
    PhaseFields,
    Rewind,
    SetStatus,
    TakeOver,
)
from holdfast.registry.history.replay.apply_streams import cut_streams
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_parts import PhaseRecord, WriterRecord


def create(draft: Draft, action: CreateRun) -> None:
    """Begin the run."""
    draft.require(draft.created is None, "the run is begun twice")
    draft.created = action
    draft.fields["created_ms"] = draft.time_ms


def set_status(draft: Draft, action: SetStatus) -> None:
    """Change how the run stands."""
    draft.fields["status"] = action.status


def take_over(draft: Draft, action: TakeOver) -> None:
    """Change who may save."""
    draft.fields["writer"] = WriterRecord(
        token=action.token, host=action.host, time_ms=draft.time_ms
    )


def rewind(draft: Draft, action: Rewind) -> None:
    """Supersede what came after a checkpoint: later ones, phases entered, entries of streams."""
    to = None if action.to is None else draft.checkpoint(action.to)
    draft.supersede(-1 if to is None else to.n)
    draft.phase = None if to is None else to.phase
    cut_streams(draft, {} if to is None else to.streams)


def enter_phase(draft: Draft, action: EnterPhase) -> None:
    """Begin a phase."""
    draft.enter(
        PhaseRecord(
            **action.shared(PhaseFields),
            n=draft.commits,
        )
    )
    draft.phase = action.to_phase


def drop(draft: Draft, action: DropRun) -> None:
    """Release everything."""
    draft.fields["dropped"] = action.reason
