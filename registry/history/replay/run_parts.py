"""The parts of a run manifest: checkpoints, pins, pool entries, streams, followers."""

from bisect import bisect_left
from collections.abc import Container, Iterable
from functools import cached_property
from typing import Literal

from holdfast.registry.history import actions
from holdfast.registry.history.replay.evicted import EvictedRating
from holdfast.registry.spec import Monitor, Pool
from holdfast.registry.values import DigestField, Name, Record, empty


class StreamMark(Record):
    """The length of a stream at a checkpoint."""

    count: int  # entries in it
    archives: int = 0  # number of its archives


class CheckpointRecord(actions.CheckpointFields):
    """A checkpoint of a run; `metrics` has the newest value of each metric."""

    n: int  # number of the commit that added it: its name within the run's history
    time_ms: int  # time of that commit, by its author's clock
    #: Whether training resumed from an earlier one; it is never latest or best.
    superseded: bool = False
    #: Ids of the states that were saved with it, by name.
    companions: dict[Name, DigestField] = empty()
    nonfinite: tuple[str, ...] = ()  # paths of weights that hold NaN or infinity, the first few
    held_back: bool = False  # whether it is never latest or best because of them
    #: The reason of its eviction; `None` while it is kept.
    evicted: str | None = None
    #: Whether it was evicted or thinned, and recovered; retention does neither again.
    recovered: bool = False
    #: The components that it holds, once it was thinned; `None`: all.
    parts: tuple[str, ...] | None = None
    #: The length of each stream at this checkpoint; a resume continues there.
    streams: dict[Name, StreamMark] = empty()

    @property
    def is_live(self) -> bool:
        """Whether it is on the current line of training and kept."""
        return not self.superseded and self.evicted is None

    def is_rated_in(self, phase: str | None) -> bool:
        """Whether it takes part when the checkpoints of a phase, or of a run, are compared."""
        counts = self.is_live and not self.held_back
        return counts and (phase is None or self.phase == phase)

    def rank(self, monitor: Monitor) -> float:
        """Return a number that is lower for better values; NaN without a value."""
        key = monitor.metric, monitor.mode
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = monitor.rank(self.metrics)
        return found

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], float]:
        return {}


class WriterRecord(actions.WriterFields):
    """The trainer that may save."""

    time_ms: int  # when it took the run over, by its own clock


class Pin(actions.PinFields):
    """A name that keeps a stored state."""

    kind: Literal["gate", "release", "artifact", "tag"]  # `gate`, `release`, `artifact` or `tag`
    name: str
    time_ms: int  # when it was set, by its author's clock
    replaced: tuple[DigestField, ...] = ()  # ids of the damaged states that it named before

    @property
    def ref(self) -> str:
        """Its ref within the run."""
        return f"{self.kind}s/{self.name}"


class Hold(actions.HoldFields):
    """A hold on a checkpoint, or on the whole run."""

    time_ms: int  # when it was set, by its author's clock
    author: str  # who set it, as `user@host`: a claim


class Note(actions.NoteFields):
    """A note on a checkpoint, or on the whole run."""

    time_ms: int  # when it was written, by its author's clock
    author: str  # who wrote it, as `user@host`: a claim


class PoolRecord(actions.EntryFields):
    """An entry of the opponent pool."""

    version: int  # its number, which is never used again
    games: int = 0  # games played
    wins: int = 0  # games won
    time_ms: int  # when it was promoted, by its author's clock
    #: The reason of its eviction; `None` while it plays.
    evicted: str | None = None

    @property
    def conservative(self) -> float:
        """A low estimate of its skill: mu - 3 sigma."""
        # Without `Rating`, which would refuse invalid stored numbers.
        return self.mu - 3 * self.sigma


class Segment(actions.SegmentFields):
    """A segment of a stream. Its state may hold further entries after the first `count`."""


class Archive(Record):
    """The archived entries of a stream."""

    label: Name  # its name
    segments: tuple[Segment, ...]  # the segments that the stream had

    @property
    def count(self) -> int:
        """Entries in it."""
        return self.segments[-1].start + self.segments[-1].count if self.segments else 0


class StreamRecord(Record):
    """A stream."""

    name: Name
    lifetime: actions.Lifetime  # `forever` or `resettable`
    segments: tuple[Segment, ...] = ()  # its segments, in order
    archives: tuple[Archive, ...] = ()  # its archives, in order

    @property
    def count(self) -> int:
        """Entries that it holds."""
        return self.segments[-1].start + self.segments[-1].count if self.segments else 0

    def archive(self, label: str) -> Archive | None:
        """Return an archive by its label."""
        return next((archive for archive in self.archives if archive.label == label), None)

    @property
    def mark(self) -> StreamMark:
        """Its length now."""
        return StreamMark(count=self.count, archives=len(self.archives))

    def at(self, mark: StreamMark | None) -> tuple[Segment, ...]:
        """Return its segments at a checkpoint, without later appends and archives."""
        if mark is None:
            return ()
        archived = mark.archives < len(self.archives)
        segments = self.archives[mark.archives].segments if archived else self.segments
        return tuple(
            segment.changed(count=min(segment.count, mark.count - segment.start))
            for segment in segments
            if segment.start < mark.count
        )


class PhaseRecord(actions.PhaseFields):
    """A phase that was entered by a transition, or again by a pivot."""

    n: int  # number of the commit
    superseded: bool = False  # whether training went back to a checkpoint before it

    @property
    def stays(self) -> bool:
        """Whether training stayed in its phase: a pivot, or a warm start."""
        return self.from_phase == self.to_phase


class ClaimRecord(actions.ClaimFields):
    """A claim of a group."""


class GroupRecord(Record):
    """A group of followers that share the checkpoints of a run."""

    name: Name
    #: Commit numbers of its finished checkpoints, ascending; evicted ones only in a complete run.
    done: tuple[int, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()  # the claims of its followers

    def knows(self, n: int) -> bool:
        """Return whether this record has a checkpoint, finished or claimed."""
        at = bisect_left(self.done, n)
        is_done = at < len(self.done) and self.done[at] == n
        return is_done or any(claim.checkpoint == n for claim in self.claims)

    def restricted(self, kept: Container[int]) -> "GroupRecord":
        """Return a copy that has only the checkpoints in `kept`."""
        return GroupRecord.unchecked(
            name=self.name,
            done=tuple(n for n in self.done if n in kept),
            claims=tuple(claim for claim in self.claims if claim.checkpoint in kept),
        )


def stays_by_phase(phases: Iterable[PhaseRecord]) -> dict[str, list[PhaseRecord]]:
    """Return the pivots and warm starts that are not superseded, by phase."""
    found: dict[str, list[PhaseRecord]] = {}
    for one in phases:
        if one.stays and not one.superseded:
            found.setdefault(one.to_phase, []).append(one)
    return found


def rating_metrics(created: actions.CreateRun | None) -> tuple[str, str]:
    """Return the metrics of a checkpoint that are its rating's mu and sigma."""
    rules = None if created is None or created.spec is None else created.spec.pool
    if rules is None:
        return Pool.mu, Pool.sigma
    return rules.mu, rules.sigma


def rating_of(record: CheckpointRecord, names: tuple[str, str]) -> EvictedRating | None:
    """Return the rating of a checkpoint, if it is on the current line and has one."""
    if record.superseded or any(name not in record.metrics for name in names):
        return None
    return EvictedRating(n=record.n, metrics={name: record.metrics[name] for name in names})
