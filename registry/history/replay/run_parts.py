"""The parts of a run manifest: checkpoints, pins, pool entries, streams, followers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from functools import cached_property
from typing import Literal

from pydantic import Field

from holdfast.registry.history.actions import (
    CheckpointFields,
    EntryFields,
    Lifetime,
    PhaseFields,
    PinFields,
)
from holdfast.registry.spec.monitors import Monitor
from holdfast.registry.values.records import (
    DigestField,
    Metrics,
    Name,
    Record,
    Step,
)


class StreamMark(Record):
    """How a stream stood at a checkpoint.

    Attributes:
        count: Entries that it held.
        archives: How often it had been archived.
    """

    count: int
    archives: int = 0


class CheckpointRecord(CheckpointFields):
    """A checkpoint of a run.

    Attributes:
        n: Number of the commit that added it: its name within the run's history.
        metrics: The newest value of each metric.
        size_bytes: Bytes of all tensors.
        time_ms: When it was added, by its author's clock.
        superseded: Whether training resumed from an earlier one; it is never latest or best.
        companions: Ids of the states beside it, by name.
        nonfinite: Paths of weights that hold NaN or infinity, the first few.
        held_back: Whether it is never latest or best for that reason.
        evicted: Why it is found no more; `None` while it is kept.
        recovered: Whether it was evicted and brought back; retention lets it alone then.
        streams: How each stream stood when it was added: where a resume from it continues them.
    """

    n: int
    metrics: Metrics
    size_bytes: int
    time_ms: int
    superseded: bool = False
    companions: dict[Name, DigestField] = Field(default={})
    nonfinite: tuple[str, ...] = ()
    held_back: bool = False
    evicted: str | None = None
    recovered: bool = False
    streams: dict[Name, StreamMark] = Field(default={})

    @property
    def is_live(self) -> bool:
        """Whether it is on the current line of training and kept."""
        return not self.superseded and self.evicted is None

    def is_rated_in(self, phase: str | None) -> bool:
        """Whether it counts when the checkpoints of a phase, or of a run, are compared."""
        counts = self.is_live and not self.held_back
        return counts and (phase is None or self.phase == phase)

    def rank(self, monitor: Monitor) -> float:
        """Return a number that is lower for better values; NaN where there is none."""
        key = monitor.metric, monitor.mode
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = monitor.rank(self.metrics)
        return found

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], float]:
        return {}


class WriterRecord(Record):
    """The trainer that may save.

    Attributes:
        token: Random, of its handle.
        host: Where it runs.
        time_ms: When it took the run over, by its own clock.
    """

    token: str
    host: str
    time_ms: int


class Pin(PinFields):
    """A name that keeps a stored state.

    Attributes:
        kind: `gate`, `release`, `artifact` or `tag`.
        name: The name.
        time_ms: When it was set, by its author's clock.
        replaced: Ids of the damaged states that stood here before.
    """

    kind: Literal["gate", "release", "artifact", "tag"]
    name: str
    time_ms: int
    replaced: tuple[DigestField, ...] = ()

    @property
    def ref(self) -> str:
        """Its ref within the run."""
        return f"{self.kind}s/{self.name}"


class PoolRecord(EntryFields):
    """An entry of the opponent pool.

    Attributes:
        version: Its number; never given again.
        games: Games played.
        wins: Games won.
        time_ms: When it was promoted, by its author's clock.
        evicted: Why it is drawn no more; `None` while it plays.
    """

    version: int
    games: int = 0
    wins: int = 0
    time_ms: int
    evicted: str | None = None


class Segment(Record):
    """A part of a stream.

    Attributes:
        manifest: Id of the state that holds it.
        start: Position in the stream of its first entry.
        count: Entries of it that belong to the stream; the state may hold more behind them.
        first_step: Least step in it.
        last_step: Greatest step in it.
    """

    manifest: DigestField
    start: int
    count: int
    first_step: Step
    last_step: Step


class Archive(Record):
    """What a stream held when it was archived.

    Attributes:
        label: Its name.
        segments: What the stream held.
    """

    label: Name
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        """Entries in it."""
        return self.segments[-1].start + self.segments[-1].count if self.segments else 0


class StreamRecord(Record):
    """A stream.

    Attributes:
        name: Its name.
        lifetime: `forever` or `resettable`.
        segments: What it holds, in order.
        archives: What it held each time that it was begun anew, in order.
    """

    name: Name
    lifetime: Lifetime
    segments: tuple[Segment, ...] = ()
    archives: tuple[Archive, ...] = ()

    @property
    def count(self) -> int:
        """Entries that it holds."""
        return self.segments[-1].start + self.segments[-1].count if self.segments else 0

    def archive(self, label: str) -> Archive | None:
        """Return an archive by its label."""
        return next((archive for archive in self.archives if archive.label == label), None)

    @property
    def mark(self) -> StreamMark:
        """How it stands now."""
        return StreamMark(count=self.count, archives=len(self.archives))

    def at(self, mark: StreamMark | None) -> tuple[Segment, ...]:
        """Return what it held at a checkpoint, whatever was appended or archived since."""
        if mark is None:
            return ()
        archived = mark.archives < len(self.archives)
        segments = self.archives[mark.archives].segments if archived else self.segments
        return tuple(
            segment.model_copy(update={"count": min(segment.count, mark.count - segment.start)})
            for segment in segments
            if segment.start < mark.count
        )


class PhaseRecord(PhaseFields):
    """A phase that was entered by a transition.

    Attributes:
        n: Number of the commit.
        superseded: Whether training went back behind it.
    """

    n: int
    superseded: bool = False


class ClaimRecord(Record):
    """A checkpoint that a follower works on.

    Attributes:
        checkpoint: Its commit number.
        follower: Who.
        until_ms: Until when, by the follower's clock.
    """

    checkpoint: int
    follower: str
    until_ms: int


class GroupRecord(Record):
    """Followers that share a run's checkpoints out among themselves.

    Attributes:
        name: Of the group.
        done: Commit numbers of the checkpoints that it is done with, ascending; evicted ones only
            where the run is complete.
        claims: What is being worked on.
    """

    name: Name
    done: tuple[int, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()

    def knows(self, n: int) -> bool:
        """Return whether a checkpoint was ever worked on, as far as this record knows."""
        at = bisect_left(self.done, n)
        is_done = at < len(self.done) and self.done[at] == n
        return is_done or any(claim.checkpoint == n for claim in self.claims)

    def without(self, kept: Container[int]) -> GroupRecord:
        """Return a copy without the checkpoints that are not among `kept`."""
        return GroupRecord.model_construct(
            name=self.name,
            done=tuple(n for n in self.done if n in kept),
            claims=tuple(claim for claim in self.claims if claim.checkpoint in kept),
        )
