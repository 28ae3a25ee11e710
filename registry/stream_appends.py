"""Appending to streams: which trailing segments a new one swallows, and what the commit says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from registry.actions import AppendStream, Lifetime
from registry.committer import Committer, Stale
from registry.errors import InvalidInput
from registry.placing import Written
from registry.segments import merge_count, pack_entries, unpack_entries
from registry.state import RunManifest, Segment, StreamRecord
from registry.stored import Stored
from registry.suggest import near

_LIFETIME: Lifetime = "forever"


@dataclass(frozen=True, slots=True)
class PlannedAppend:
    """A segment that is on the store and waits for its commit.

    Attributes:
        written: The segment.
        before: The stream that it was written for.
        body: What the commit says of it.
    """

    written: Written
    before: StreamRecord
    body: AppendStream

    def action(self, state: RunManifest) -> AppendStream:
        """Return what the commit says.

        Raises:
            Stale: The stream has changed: the segment has to be written anew.
        """
        if _standing(state, self.before.name, self.before.lifetime) != self.before:
            raise Stale
        return self.body


def plan_append(
    committer: Committer,
    state: RunManifest,
    name: str,
    entries: Sequence[Mapping[str, Any]],
    lifetime: Lifetime | None = None,
) -> PlannedAppend:
    """Write a segment of new entries, merged with the small ones before it.

    Args:
        committer: Of the run.
        state: The run as it will be when the segment is appended.
        name: Name of the stream.
        entries: At least one.
        lifetime: Of a stream that is begun by this.

    Raises:
        InvalidInput: Streams are declared and this one is not, or it has another lifetime.
    """
    stream = _standing(state, name, _lifetime(state, name, lifetime))
    swallowed = merge_count([segment.count for segment in stream.segments], len(entries))
    kept, merged = _split(stream.segments, swallowed)
    together = [*_entries(committer, merged), *entries]
    steps = [entry["step"] for entry in together]
    written = committer.write_plain(pack_entries(together))
    body = AppendStream(
        stream=name,
        lifetime=stream.lifetime,
        manifest=written.base.manifest.digest,
        start=kept[-1].start + kept[-1].count if kept else 0,
        count=len(together),
        first_step=min(steps),
        last_step=max(steps),
    )
    return PlannedAppend(written, stream, body)


def _split(
    segments: tuple[Segment, ...], swallowed: int
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    border = len(segments) - swallowed
    return segments[:border], segments[border:]


def _entries(committer: Committer, segments: Sequence[Segment]) -> list[dict[str, Any]]:
    found = []
    for segment in segments:
        stored = Stored(committer.store, committer.log, segment.manifest, "stream")
        found += unpack_entries(stored.load(), 0, segment.count)
    return found


def _standing(state: RunManifest, name: str, lifetime: Lifetime) -> StreamRecord:
    return state.stream(name) or StreamRecord(name=name, lifetime=lifetime)


def _lifetime(state: RunManifest, name: str, given: Lifetime | None) -> Lifetime:
    declared = {stream.name: stream.lifetime for stream in state.spec.streams}
    if declared and name not in declared:
        raise InvalidInput(
            "the run has no such stream",
            where=f"{state.run_id}: stream {name}",
            expected=", ".join(declared),
            hint=near(name, declared) or "Streams are declared by the run's preset.",
        )
    standing = state.stream(name)
    lifetime = declared.get(name) or (standing.lifetime if standing else given or _LIFETIME)
    if given is not None and given != lifetime:
        raise InvalidInput(
            "the stream has another lifetime",
            where=f"{state.run_id}: stream {name}",
            expected=lifetime,
            found=given,
        )
    return lifetime
