"""Replay of actions on streams."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.registry.history.actions import AppendStream, ArchiveStream
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_parts import Archive, Segment, StreamMark, StreamRecord


def append(draft: Draft, action: AppendStream) -> None:
    """Append a segment, in place of what stood from its start on."""
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
    segment = Segment(
        manifest=action.manifest,
        start=action.start,
        count=action.count,
        first_step=action.first_step,
        last_step=action.last_step,
    )
    before = stream.at(stream.mark.model_copy(update={"count": action.start}))
    segments = (*before, segment)
    draft.set_stream(stream.model_copy(update={"segments": segments}))


def archive(draft: Draft, action: ArchiveStream) -> None:
    """Put what a stream holds aside."""
    draft.require(action.stream in draft.streams, f"no stream {action.stream}")
    stream = draft.streams[action.stream]
    draft.require(stream.lifetime != "forever", f"stream {stream.name} is kept for ever")
    standing = stream.archive(action.label)
    draft.require(standing is None, f"archive {action.label} stands already")
    archives = (*stream.archives, Archive(label=action.label, segments=stream.segments))
    draft.set_stream(stream.model_copy(update={"segments": (), "archives": archives}))


def cut_streams(draft: Draft, marks: Mapping[str, StreamMark]) -> None:
    """Take every stream back to how it stood at a checkpoint; archives stay what they are."""
    for name, stream in list(draft.streams.items()):
        segments = stream.at(marks.get(name))
        draft.set_stream(stream.model_copy(update={"segments": segments}))
