"""Replay of actions on streams."""

from __future__ import annotations

from collections.abc import Mapping

from registry.actions import AppendStream, ArchiveStream
from registry.state.draft import Draft
from registry.state.records import Segment, StreamRecord


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
    segments = (*cut(stream.segments, action.start), segment)
    draft.streams[stream.name] = stream.model_copy(update={"segments": segments})


def archive(draft: Draft, action: ArchiveStream) -> None:
    """Put what a stream holds aside."""
    draft.require(action.stream in draft.streams, f"no stream {action.stream}")
    stream = draft.streams[action.stream]
    draft.require(stream.lifetime != "forever", f"stream {stream.name} is kept for ever")
    draft.require(action.label not in stream.archives, f"archive {action.label} stands already")
    archives = {**stream.archives, action.label: stream.segments}
    draft.streams[stream.name] = stream.model_copy(update={"segments": (), "archives": archives})


def cut_streams(draft: Draft, lengths: Mapping[str, int]) -> None:
    """Take every stream back to the length that it had at a checkpoint."""
    for name, stream in draft.streams.items():
        segments = cut(stream.segments, min(lengths.get(name, 0), stream.count))
        draft.streams[name] = stream.model_copy(update={"segments": segments})


def cut(segments: tuple[Segment, ...], count: int) -> tuple[Segment, ...]:
    """Return the segments of a stream's first `count` entries."""
    return tuple(
        segment.model_copy(update={"count": min(segment.count, count - segment.start)})
        for segment in segments
        if segment.start < count
    )
