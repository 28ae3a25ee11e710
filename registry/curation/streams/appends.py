"""Append to streams: write a segment, merged with small ones before it, and make its action.

Also reads segments, for merging and for `holdfast.registry.curation.streams.stream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.curation.streams.segments import (
    MERGE_CAP,
    merge_count,
    pack_entries,
    steps,
    unpack_entries,
)
from holdfast.registry.errors import Archived, IntegrityError, InvalidInput, Malformed
from holdfast.registry.history.actions import AppendStream, Lifetime
from holdfast.registry.history.replay import RunManifest, Segment, StreamRecord
from holdfast.registry.loading import StateHandle
from holdfast.registry.store import abandon
from holdfast.registry.values import near
from holdfast.registry.writing import Stale, StateWriter, Written

_LIFETIME: Lifetime = "forever"
#: Segments read at once. A reader whose segment has moved refreshes the log in threads of the same
#: pool, so readers must never use all of them.
_AT_ONCE = 16
#: Segments of byte strings, such as pictures, are not merged beyond this number of entries: they
#: are large, and who looks at them wants the newest.
_BYTES_CAP = 16

Entries = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PlannedAppend:
    """A segment that is on the store and is not committed yet."""

    written: Written  # the segment
    before: StreamRecord  # the stream for which it was written
    body: AppendStream  # the action for that stream
    merged: bool  # whether it also has entries of older segments

    def action(self, run: RunManifest) -> AppendStream:
        """Return the action for a run.

        A segment of only new entries also fits if others have appended meanwhile.
        """
        now = _stream(run, self.before.name, self.before.lifetime)
        if now.lifetime != self.before.lifetime or (self.merged and now != self.before):
            raise Stale
        return self.body.changed(start=now.count) if not self.merged else self.body


def plan_append(
    writer: StateWriter,
    run: RunManifest,
    name: str,
    entries: Sequence[Mapping[str, Any]],
    lifetime: Lifetime | None = None,
    *,
    merge: bool = True,
) -> PlannedAppend:
    """Write a segment of new entries, merged with the small ones before it.

    A segment that cannot be read is not merged, and neither are those before it: damaged old
    entries do not prevent new ones.
    """
    stream = _stream(run, name, stream_lifetime(run, name, lifetime) or _LIFETIME)
    older = stream.segments
    counts = [segment.count for segment in older] if merge else []
    has_bytes = any(isinstance(value, bytes) for one in entries for value in one.values())
    count = merge_count(counts, len(entries), cap=_BYTES_CAP if has_bytes else MERGE_CAP)
    merged = _readable(writer, name, older[len(older) - count :])
    kept = older[: len(older) - len(merged)]
    joined = [*(entry for part in merged for entry in part), *entries]
    known = [entry["step"] for entry in joined]
    written = writer.write_plain(pack_entries(joined))
    body = AppendStream(
        stream=name,
        lifetime=stream.lifetime,
        manifest=written.state.manifest.digest,
        start=kept[-1].start + kept[-1].count if kept else 0,
        count=len(joined),
        first_step=min(known),
        last_step=max(known),
    )
    return PlannedAppend(written, stream, body, bool(merged))


def read_segments(
    writer: StateWriter,
    name: str,
    segments: Sequence[Segment],
    first_step: int,
    last_step: int,
    most_bytes: int | None = None,
) -> Entries:
    """Return the entries of segments with steps within bounds, both inclusive.

    Only segments that can have such entries are fetched, several at once; a segment of more than
    `most_bytes` is refused (`BeyondLimit`).
    """
    wanted = [
        segment
        for segment in segments
        if segment.first_step <= last_step and segment.last_step >= first_step
    ]
    found: Entries = []
    for segment, loaded in _loaded(writer, name, wanted, most_bytes):
        found += _between(_checked(loaded, name, segment), segment, first_step, last_step)
    return found


def stream_lifetime(run: RunManifest, name: str, given: Lifetime | None = None) -> Lifetime | None:
    """Return the lifetime of a stream: the declared one, that of its first append, or `given`."""
    declared = {stream.name: stream.lifetime for stream in run.spec.streams}
    if declared and name not in declared:
        raise InvalidInput(
            "the run has no such stream",
            where=f"{run.run_id}: stream {name}",
            expected=", ".join(declared),
            hint=near(name, declared) or "Streams are declared by the run's preset.",
        )
    stream = run.stream(name)
    lifetime = declared.get(name) or (stream.lifetime if stream else given)
    if given is not None and given != lifetime:
        raise InvalidInput(
            "the stream has another lifetime",
            where=f"{run.run_id}: stream {name}",
            expected=lifetime,
            found=given,
        )
    return lifetime


def _stream(run: RunManifest, name: str, lifetime: Lifetime) -> StreamRecord:
    return run.stream(name) or StreamRecord(name=name, lifetime=lifetime)


def _readable(writer: StateWriter, name: str, segments: Sequence[Segment]) -> list[Entries]:
    """Return the entries of the last segments, up to one that cannot be read."""
    found: list[Entries] = []
    try:
        for segment, loaded in _loaded(writer, name, segments[::-1]):
            found.append(unpack_entries(_checked(loaded, name, segment), 0, segment.count))
    except (Archived, IntegrityError):
        pass
    return found[::-1]


def _loaded(
    writer: StateWriter, name: str, segments: Sequence[Segment], most_bytes: int | None = None
) -> Iterator[tuple[Segment, Any]]:
    """Yield each segment with its state, in order; several are loaded at once."""
    store, log = writer.store, writer.log
    for start in range(0, len(segments), _AT_ONCE):
        batch = segments[start : start + _AT_ONCE]
        states = [StateHandle(store, log, one.manifest, f"streams/{name}") for one in batch]
        futures = [store.pools.bulk.submit(state.load, most_bytes=most_bytes) for state in states]
        try:
            for segment, future in zip(batch, futures, strict=True):
                yield segment, future.result()
        finally:
            abandon(futures)


def _checked(loaded: Any, name: str, segment: Segment) -> Any:
    """Return the state of a segment, checked to have as many entries as the log says."""
    count = len(steps(loaded))
    if count < segment.count:
        raise Malformed(
            "a segment has fewer entries than the log says",
            where=f"stream {name}, entry {segment.start}: {segment.manifest.short}",
            expected=segment.count,
            found=count,
        )
    return loaded


def _between(loaded: Any, segment: Segment, first_step: int, last_step: int) -> Entries:
    """Return the entries of a segment that belong to the stream and are within bounds."""
    known = steps(loaded)[: segment.count]
    inside = ((known >= first_step) & (known <= last_step)).nonzero()[0]
    if not len(inside):
        return []
    window = unpack_entries(loaded, int(inside[0]), int(inside[-1]) + 1)
    if len(window) == len(inside):
        return window
    return [entry for entry in window if first_step <= entry["step"] <= last_step]
