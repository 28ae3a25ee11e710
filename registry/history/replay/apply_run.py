"""Replay of actions on the run as a whole, and on its streams."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.registry.history.actions import (
    AppendStream,
    ArchiveStream,
    CreateRun,
    DropRun,
    EnterPhase,
    PhaseFields,
    Rewind,
    SegmentFields,
    SetStatus,
    TakeOver,
    WriterFields,
)
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_parts import (
    Archive,
    PhaseRecord,
    Segment,
    StreamMark,
    StreamRecord,
    WriterRecord,
)


def create(draft: Draft, action: CreateRun) -> None:
    """Create the run."""
    draft.require(draft.created is None, "the run is created twice")
    draft.created = action
    draft.fields["created_ms"] = draft.time_ms


def set_status(draft: Draft, action: SetStatus) -> None:
    """Set the status."""
    draft.fields |= {"status": action.status, "reason": action.reason}


def take_over(draft: Draft, action: TakeOver) -> None:
    """Set the trainer that may save."""
    draft.fields["writer"] = WriterRecord(**action.shared(WriterFields), time_ms=draft.time_ms)


def rewind(draft: Draft, action: Rewind) -> None:
    """Supersede later checkpoints and phases; take later entries out of the streams."""
    to = None if action.to is None else draft.checkpoint(action.to)
    draft.supersede(-1 if to is None else to.n)
    draft.phase = None if to is None else to.phase
    _cut_streams(draft, {} if to is None else to.streams)


def enter_phase(draft: Draft, action: EnterPhase) -> None:
    """Enter a phase."""
    draft.enter(PhaseRecord(**action.shared(PhaseFields), n=draft.commits))
    draft.phase = action.to_phase


def drop(draft: Draft, action: DropRun) -> None:
    """Release everything that the run holds."""
    draft.fields["dropped"] = action.reason


def append_stream(draft: Draft, action: AppendStream) -> None:
    """Append a segment; it replaces the entries from its start on."""
    stream = draft.streams.get(action.stream)
    if stream is None:
        stream = StreamRecord(name=action.stream, lifetime=action.lifetime)
    draft.require(
        stream.lifetime == action.lifetime, f"stream {stream.name} is {stream.lifetime} already"
    )
    draft.require(
        action.start <= stream.count < action.start + action.count,
        f"entries {action.start} to {action.start + action.count} of stream {stream.name}, which "
        f"has {stream.count}",
    )
    before = stream.at(stream.mark.model_copy(update={"count": action.start}))
    segments = (*before, Segment(**action.shared(SegmentFields)))
    draft.set_stream(stream.model_copy(update={"segments": segments}))


def archive_stream(draft: Draft, action: ArchiveStream) -> None:
    """Archive the entries of a stream, and empty it."""
    draft.require(action.stream in draft.streams, f"no stream {action.stream}")
    stream = draft.streams[action.stream]
    draft.require(stream.lifetime != "forever", f"stream {stream.name} is kept for ever")
    draft.require(stream.archive(action.label) is None, f"archive {action.label} exists already")
    archives = (*stream.archives, Archive(label=action.label, segments=stream.segments))
    draft.set_stream(stream.model_copy(update={"segments": (), "archives": archives}))


def _cut_streams(draft: Draft, marks: Mapping[str, StreamMark]) -> None:
    """Take every stream back to its entries at a checkpoint; archives do not change."""
    for name, stream in list(draft.streams.items()):
        segments = stream.at(marks.get(name))
        draft.set_stream(stream.model_copy(update={"segments": segments}))
