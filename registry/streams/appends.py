"""Appending to streams: which trailing segments a new one swallows, and what the commit says.

Also owns the reading of segments, which merging needs as much as `holdfast.registry.streams.stream`
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.errors import IntegrityError, InvalidInput, Malformed
from holdfast.registry.history.actions import AppendStream, Lifetime
from holdfast.registry.history.replay import RunManifest, Segment, StreamRecord
from holdfast.registry.loading.stored import Stored
from holdfast.registry.storage.threads import abandon
from holdfast.registry.streams.segments import merge_count, pack_entries, steps, unpack_entries
from holdfast.registry.values.suggest import near
from holdfast.registry.writing.change import Stale
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.placing import Written

_LIFETIME: Lifetime = "forever"
#: Segments read at once. Who finds one moved reads the log on by threads of the same pool, so the
#: readers must never take all of them.
_AT_ONCE = 16

Entries = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PlannedAppend:
    """A segment that is on the store and waits for its commit.

    Attributes:
        written: The segment.
        before: The stream that it was written for.
        body: What the commit says of it.
        merged: Whether it holds entries of older segments, too.
    """

    written: Written
    before: StreamRecord
    body: AppendStream
    merged: bool

    def action(self, run: RunManifest) -> AppendStream:
        """Return what the commit says.

        A segment of new entries alone fits behind whatever others have appended meanwhile.

        Raises:
            Stale: The stream has changed: the segment has to be written anew.
            Conflict: The run was dropped.
        """
        now = _standing(run, self.before.name, self.before.lifetime)
        if now.lifetime != self.before.lifetime or (self.merged and now != self.before):
            raise Stale
        return self.body.model_copy(update={"start": now.count}) if not self.merged else self.body


def plan_append(
    committer: Committer,
    run: RunManifest,
    name: str,
    entries: Sequence[Mapping[str, Any]],
    lifetime: Lifetime | None = None,
    *,
    merge: bool = True,
) -> PlannedAppend:
    """Write a segment of new entries, merged with the small ones before it.

    A segment that cannot be read is left where it is, and so is what stands before it: damage of
    old entries keeps nobody from appending new ones.

    Args:
        committer: Of the run.
        run: The run as it will be when the segment is appended.
        name: Name of the stream.
        entries: At least one.
        lifetime: Of a stream that is begun by this.
        merge: Whether small segments are swallowed; without that the segment never gets stale.

    Raises:
        InvalidInput: Streams are declared and this one is not, or it has another lifetime.
        Conflict: The run was dropped.
    """
    stream = _standing(run, name, stream_lifetime(run, name, lifetime) or _LIFETIME)
    older = stream.segments
    counts = [segment.count for segment in older] if merge else []
    swallowed = _readable(committer, name, older[len(older) - merge_count(counts, len(entries)) :])
    kept = older[: len(older) - len(swallowed)]
    together = [*(entry for part in swallowed for entry in part), *entries]
    known = [entry["step"] for entry in together]
    written = committer.write_plain(pack_entries(together))
    body = AppendStream(
        stream=name,
        lifetime=stream.lifetime,
        manifest=written.base.manifest.digest,
        start=kept[-1].start + kept[-1].count if kept else 0,
        count=len(together),
        first_step=min(known),
        last_step=max(known),
    )
    return PlannedAppend(written, stream, body, bool(swallowed))


def read_segments(
    committer: Committer,
    name: str,
    segments: Sequence[Segment],
    first_step: int,
    last_step: int,
) -> Entries:
    """Return the entries of segments whose steps lie within bounds, both inclusive.

    Only segments that can hold such entries are fetched, several at once.

    Raises:
        IntegrityError: A segment is damaged or gone, or is not what the log says.
    """
    wanted = [
        segment
        for segment in segments
        if segment.first_step <= last_step and segment.last_step >= first_step
    ]
    found: Entries = []
    for segment, loaded in _loaded(committer, name, wanted):
        found += _between(_checked(loaded, name, segment), segment, first_step, last_step)
    return found


def stream_lifetime(run: RunManifest, name: str, given: Lifetime | None = None) -> Lifetime | None:
    """Return the lifetime of a stream: declared, or as it was begun, or `given`.

    Raises:
        InvalidInput: Streams are declared and this one is not, or it has another lifetime than
            the given one.
    """
    declared = {stream.name: stream.lifetime for stream in run.spec.streams}
    if declared and name not in declared:
        raise InvalidInput(
            "the run has no such stream",
            where=f"{run.run_id}: stream {name}",
            expected=", ".join(declared),
            hint=near(name, declared) or "Streams are declared by the run's preset.",
        )
    standing = run.stream(name)
    lifetime = declared.get(name) or (standing.lifetime if standing else given)
    if given is not None and given != lifetime:
        raise InvalidInput(
            "the stream has another lifetime",
            where=f"{run.run_id}: stream {name}",
            expected=lifetime,
            found=given,
        )
    return lifetime


def _standing(run: RunManifest, name: str, lifetime: Lifetime) -> StreamRecord:
    return run.stream(name) or StreamRecord(name=name, lifetime=lifetime)


def _readable(committer: Committer, name: str, segments: Sequence[Segment]) -> list[Entries]:
    """Return the entries of the last segments, as many as can be read one after another."""
    found: list[Entries] = []
    try:
        for segment, loaded in _loaded(committer, name, segments[::-1]):
            found.append(unpack_entries(_checked(loaded, name, segment), 0, segment.count))
    except IntegrityError:
        pass
    return found[::-1]


def _loaded(
    committer: Committer, name: str, segments: Sequence[Segment]
) -> Iterator[tuple[Segment, Any]]:
    """Yield each segment with its state, in order; several are under way at once."""
    store, log = committer.store, committer.log
    for start in range(0, len(segments), _AT_ONCE):
        batch = segments[start : start + _AT_ONCE]
        states = [Stored(store, log, one.manifest, f"streams/{name}") for one in batch]
        futures = [store.pools.bulk.submit(state.load) for state in states]
        try:
            for segment, future in zip(batch, futures, strict=True):
                yield segment, future.result()
        finally:
            abandon(futures)


def _checked(loaded: Any, name: str, segment: Segment) -> Any:
    """Return the state of a segment that holds as many entries as the log says.

    Raises:
        Malformed: It holds fewer, or is no segment.
    """
    count = len(steps(loaded))
    if count < segment.count:
        raise Malformed(
            "a segment holds fewer entries than the log says",
            where=f"stream {name}, entry {segment.start}: {segment.manifest.short}",
            expected=segment.count,
            found=count,
        )
    return loaded


def _between(loaded: Any, segment: Segment, first_step: int, last_step: int) -> Entries:
    """Return those entries of a segment that are the stream's and lie within bounds."""
    known = steps(loaded)[: segment.count]
    inside = ((known >= first_step) & (known <= last_step)).nonzero()[0]
    if not len(inside):
        return []
    window = unpack_entries(loaded, int(inside[0]), int(inside[-1]) + 1)
    if len(window) == len(inside):
        return window
    return [entry for entry in window if first_step <= entry["step"] <= last_step]
