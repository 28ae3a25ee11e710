"""What a run keeps and what it lets go: a plan by pure functions, with a reason for every verdict.

Protected in any case are the newest checkpoint of each phase, the best by each monitor, what a gate
or a tag names, what a follower works on, and what was brought back by hand. Entries of the pool,
releases and artifacts keep their own state, so they need no checkpoint. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest

from holdfast.registry.history.actions import Action, Evict, Eviction
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.spec import Retention, RunSpec

_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        reasons: Why it stays, or why it goes.
    """

    checkpoint: CheckpointRecord
    reasons: tuple[str, ...]


class RetentionPlan:
    """The plan of retention for a run. The reasons of kept checkpoints are computed on request.

    Args:
        groups: Every phase and tier that has checkpoints.
    """

    def __init__(self, groups: Iterable[_Group]) -> None:
        self._groups = tuple(groups)
        self._going = {record.n for group in self._groups for record in group.going}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RetentionPlan):
            return NotImplemented
        return (self.kept, self.evicted) == (other.kept, other.evicted)

    __hash__ = None  # type: ignore[assignment]  # as of every value with records in it

    def __repr__(self) -> str:
        return f"RetentionPlan(kept={self.kept!r}, evicted={self.evicted!r})"

    @cached_property
    def kept(self) -> tuple[Verdict, ...]:
        """The kept checkpoints, in log order."""
        return self._verdicts(stays=True)

    @cached_property
    def evicted(self) -> tuple[Verdict, ...]:
        """The checkpoints to evict, in log order."""
        return self._verdicts(stays=False)

    def _verdicts(self, *, stays: bool) -> tuple[Verdict, ...]:
        found = [
            Verdict(record, group.reasons(record) if stays else (group.why_it_goes(record),))
            for group in self._groups
            for record in (group.members if stays else group.going)
            if not (stays and record.n in self._going)
        ]
        return tuple(sorted(found, key=lambda verdict: verdict.checkpoint.n))

    def actions(self) -> list[Action]:
        """Return what a commit says to carry it out; nothing where nothing goes."""
        evictions = tuple(
            Eviction(checkpoint=verdict.checkpoint.n, reason="; ".join(verdict.reasons))
            for verdict in self.evicted
        )
        return [Evict(evictions=evictions)] if evictions else []


def plan_retention(
    run: RunManifest, now_ms: int, override: Retention | None = None
) -> RetentionPlan:
    """Plan what a run lets go.

    Args:
        run: The run.
        now_ms: Milliseconds since the epoch, for `for_days` and for what followers hold.
        override: A policy in place of those of the run; what was brought back by hand then counts
            like any other.
    """
    return RetentionPlan(_Group(run, now_ms, override, *group) for group in _groups(run, override))


def has_policies(spec: RunSpec) -> bool:
    """Return whether a run lets anything go at all."""
    return spec.retention is not None or any(
        phase.tiers or phase.retention is not None for phase in spec.phases
    )


def _groups(
    run: RunManifest, override: Retention | None
) -> Iterator[tuple[str, str | None, Retention]]:
    """Yield every phase and tier with its policy."""
    for phase, tier in dict.fromkeys((phase, tier) for phase, tier, _ in run.by_class):
        rules = run.spec.phase(phase)
        policies = {one.name: one.retention for one in rules.tiers}
        policy = override or policies.get(tier or "", rules.retention) or Retention(all=True)
        yield phase, tier, policy


class _Group:
    """One phase and tier under its policy."""

    def __init__(
        self,
        run: RunManifest,
        now_ms: int,
        override: Retention | None,
        phase: str,
        tier: str | None,
        policy: Retention,
    ) -> None:
        self.run = run
        self.now_ms = now_ms
        self.overridden = override is not None
        self.phase = phase
        self.tier = tier
        self.policy = policy
        self.line = run.by_class.get((phase, tier, False), ())
        # Superseded checkpoints are evicted before those of the current line.
        self.numbers = (*run.by_class.get((phase, tier, True), ()), *self.line)
        self.monitors = run.spec.phase(phase).monitors

    @property
    def members(self) -> list[CheckpointRecord]:
        """The checkpoints, the first to go first."""
        return [self.run.by_n[n] for n in self.numbers]

    @cached_property
    def going(self) -> list[CheckpointRecord]:
        """The members that nothing keeps."""
        policy = self.policy
        if policy.all:
            return []
        # Every save runs this: no reasons are computed, and most members are skipped.
        candidates, last = self.numbers, set[int]()
        if policy.counts_protected:
            last = self.last
        elif policy.last is not None:
            candidates = candidates[: -policy.last]
        young_ms = self.now_ms - policy.for_days * _DAY_MS if policy.for_days else None
        going = []
        for n in candidates:
            record = self.run.by_n[n]
            if n in self.protected or n in self.waiting or self._is_back(record) or n in last:
                continue
            if not record.superseded and (
                n in self.best
                or (policy.every and record.step % policy.every == 0)
                or (young_ms is not None and record.time_ms > young_ms)
            ):
                continue
            going.append(record)
        return going

    def _is_back(self, record: CheckpointRecord) -> bool:
        """Return whether a member stays because it was brought back by hand."""
        return record.recovered and not self.overridden and not record.superseded

    def reasons(self, record: CheckpointRecord) -> tuple[str, ...]:
        """Return why a member stays."""
        back = ["brought back by hand"] if self._is_back(record) else []
        waits = [self.waiting[record.n]] if record.n in self.waiting else []
        named = self.protected.get(record.n, ())
        return (*named, *back, *waits, *self._kept_by_policy(record))

    @cached_property
    def protected(self) -> dict[int, list[str]]:
        """The reasons that keep checkpoints whatever the policy says, by number."""
        run = self.run
        found: dict[int, list[str]] = {}
        key = self.phase, self.tier

        def protect(n: int | None, reason: str) -> None:
            record = None if n is None else run.by_n.get(n)
            if record is None or record.evicted is not None:
                return
            if (record.phase, record.tier) == key:
                found.setdefault(record.n, []).append(reason)

        newest = run.latest(self.phase)
        protect(newest.n if newest else None, "latest")
        last = next(run.newest_first(self.phase), None)
        if last is not None and last.held_back:
            protect(last.n, "newest, held back")
        for monitor in self.monitors:
            best = run.best(monitor, self.phase)
            protect(best.n if best else None, f"best/{monitor.label}")
        if run.pinned:
            for pin in run.pins:
                if pin.kind in ("gate", "tag"):
                    protect(pin.checkpoint, pin.ref)
        for group in run.groups:
            for claim in group.claims:
                if claim.until_ms > self.now_ms:
                    protect(claim.checkpoint, f"held by {group.name}")
        return found

    @cached_property
    def waiting(self) -> dict[int, str]:
        """The newest that lack a metric; evicted ones count towards `wait`."""
        wait = self.policy.wait
        if not wait:
            return {}
        gone = self.run.evicted_on_line(self.phase, self.tier)
        found = {}
        for newer, n in enumerate(reversed(self.line)):
            position = newer + (gone >> n).bit_count()
            if position >= wait:
                break
            lacking = self._lacking(self.run.by_n[n])
            if lacking:
                found[n] = f"waits for {', '.join(lacking)} ({position} of {wait})"
        return found

    def _lacking(self, record: CheckpointRecord) -> list[str]:
        return [
            metric
            for monitor in self.monitors
            if monitor.value(record.metrics) is None
            for metric in monitor.needs
            if metric not in record.metrics
        ]

    @cached_property
    def last(self) -> set[int]:
        """The members that are among the last."""
        if self.policy.last is None:
            return set()
        room, candidates = self.policy.last, self.numbers
        if self.policy.counts_protected:
            back = {record.n for record in self.members if self._is_back(record)}
            stays = self.protected.keys() | self.waiting.keys() | back
            room -= len(stays)
            candidates = tuple(n for n in candidates if n not in stays)
        return set(candidates[-room:] if room > 0 else ())

    @cached_property
    def best(self) -> set[int]:
        """The members that are among the best."""
        if not self.policy.best:
            return set()
        # A policy of the run has a monitor; one that is given by hand may not find any.
        rated = (
            one
            for monitor in self.monitors[:1]
            for one in self.run.rated(monitor, self.phase)
            if one[2].tier == self.tier
        )
        return {n for _, n, _ in nsmallest(self.policy.best, rated)}

    def _kept_by_policy(self, record: CheckpointRecord) -> Iterator[str]:
        policy = self.policy
        if policy.all:
            yield "all"
        if record.n in self.last:
            yield f"last {policy.last}"
        if record.superseded:
            return
        if record.n in self.best:
            yield f"best {policy.best}"
        if policy.every and record.step % policy.every == 0:
            yield f"every {policy.every}"
        if policy.for_days and self.now_ms - record.time_ms < policy.for_days * _DAY_MS:
            yield f"for {policy.for_days} days"

    def why_it_goes(self, record: CheckpointRecord) -> str:
        """Return why a member is evicted."""
        policy = self.policy
        wanted = [
            f"last {policy.last}" if policy.last else "",
            f"best {policy.best}" if policy.best else "",
            f"every {policy.every}" if policy.every else "",
            f"{policy.for_days} days" if policy.for_days else "",
        ]
        place = f"tier {self.tier}" if self.tier else f"phase {self.phase}"
        state = "superseded; " if record.superseded else ""
        return f"{state}not among {', '.join(filter(None, wanted))} of {place}; no pin"
