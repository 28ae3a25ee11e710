"""What a run keeps and what it lets go: a plan by pure functions, with a reason for every verdict.

Protected in any case are the newest checkpoint of each phase, the best by each monitor, what a gate
or a tag names, what a follower works on, and what was brought back by hand. Entries of the pool,
releases and artifacts keep their own state, so they need no checkpoint. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from registry.actions import Action, Evict, Eviction
from registry.spec import Retention, RunSpec
from registry.state import CheckpointRecord, RunManifest

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


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What retention does with a run.

    Attributes:
        kept: What stays, in log order.
        evicted: What goes, in log order.
    """

    kept: tuple[Verdict, ...]
    evicted: tuple[Verdict, ...]

    def actions(self) -> list[Action]:
        """Return what a commit says to carry it out; nothing where nothing goes."""
        evictions = tuple(
            Eviction(checkpoint=verdict.checkpoint.n, reason="; ".join(verdict.reasons))
            for verdict in self.evicted
        )
        return [Evict(evictions=evictions)] if evictions else []


def plan_retention(
    state: RunManifest, now_ms: int, override: Retention | None = None
) -> RetentionPlan:
    """Plan what a run lets go.

    Args:
        state: The run.
        now_ms: Milliseconds since the epoch, for `for_days` and for what followers hold.
        override: A policy in place of those of the run; what was brought back by hand then counts
            like any other.
    """
    verdicts = [
        verdict
        for group in _groups(state, override)
        for verdict in _Group(state, now_ms, override, *group).verdicts()
    ]
    verdicts.sort(key=lambda pair: pair[1].checkpoint.n)
    return RetentionPlan(
        tuple(verdict for stays, verdict in verdicts if stays),
        tuple(verdict for stays, verdict in verdicts if not stays),
    )


def has_policies(spec: RunSpec) -> bool:
    """Return whether a run lets anything go at all."""
    return spec.retention is not None or any(
        phase.tiers or phase.retention is not None for phase in spec.phases
    )


def _groups(
    state: RunManifest, override: Retention | None
) -> Iterator[tuple[str, str | None, Retention, list[CheckpointRecord]]]:
    """Yield every phase and tier with its policy and its checkpoints, the first to go first."""
    members: dict[tuple[str, str | None], list[CheckpointRecord]] = {}
    for record in state.checkpoints:
        if record.evicted is None:
            members.setdefault((record.phase, record.tier), []).append(record)
    for (phase, tier), records in members.items():
        rules = state.spec.phase(phase)
        policies = {one.name: one.retention for one in rules.tiers}
        policy = override or policies.get(tier or "", rules.retention) or Retention(all=True)
        # What training went back behind goes before what it goes on from.
        yield phase, tier, policy, sorted(records, key=lambda one: (not one.superseded, one.n))


class _Group:
    """One phase and tier under its policy."""

    def __init__(
        self,
        state: RunManifest,
        now_ms: int,
        override: Retention | None,
        phase: str,
        tier: str | None,
        policy: Retention,
        members: list[CheckpointRecord],
    ) -> None:
        self.state = state
        self.now_ms = now_ms
        self.overridden = override is not None
        self.phase = phase
        self.tier = tier
        self.policy = policy
        self.members = members
        self.monitors = state.spec.phase(phase).monitors
        self.protected = self._protections()

    def verdicts(self) -> Iterator[tuple[bool, Verdict]]:
        """Yield every member and whether it stays."""
        last = self._last()
        best = self._best()
        for record in self.members:
            reasons = (*self.protected.get(record.n, ()), *self._kept_by_policy(record, last, best))
            if reasons:
                yield True, Verdict(record, reasons)
            else:
                yield False, Verdict(record, (self._why_it_goes(record),))

    def _protections(self) -> dict[int, list[str]]:
        """Return what keeps checkpoints whatever the policy says."""
        found: dict[int, list[str]] = {}

        def protect(n: int | None, reason: str) -> None:
            if n is not None:
                found.setdefault(n, []).append(reason)

        newest = self.state.latest(self.phase)
        protect(newest.n if newest else None, "latest")
        last = self.state.live(self.phase)[-1:]
        if last and last[0].held_back:
            protect(last[0].n, "newest, held back")
        for monitor in self.monitors:
            best = self.state.best(monitor, self.phase)
            protect(best.n if best else None, f"best/{monitor.label}")
        for pin in self.state.pins:
            if pin.kind in ("gate", "tag"):
                protect(pin.checkpoint, pin.ref)
        for group in self.state.groups:
            for claim in group.claims:
                if claim.until_ms > self.now_ms:
                    protect(claim.checkpoint, f"held by {group.name}")
        line = self._line()
        for position, record in enumerate(line):
            if record.recovered and not self.overridden:
                protect(record.n, "brought back by hand")
            newer = len(line) - 1 - position
            lacking = self._lacking(record) if newer < self.policy.wait else []
            if lacking:
                waits = f"waits for {', '.join(lacking)} ({newer} of {self.policy.wait})"
                protect(record.n, waits)
        ours = {record.n for record in self.members}
        return {n: reasons for n, reasons in found.items() if n in ours}

    def _line(self) -> list[CheckpointRecord]:
        """Return what was saved on this line of training, also what went since: it came."""
        return [
            record
            for record in self.state.checkpoints
            if (record.phase, record.tier) == (self.phase, self.tier) and not record.superseded
        ]

    def _lacking(self, record: CheckpointRecord) -> list[str]:
        return [
            metric
            for monitor in self.monitors
            if monitor.value(record.metrics) is None
            for metric in monitor.needs
            if metric not in record.metrics
        ]

    def _last(self) -> set[int]:
        if self.policy.last is None:
            return set()
        room, candidates = self.policy.last, [record.n for record in self.members]
        if self.policy.counts_protected:
            room -= len(self.protected)
            candidates = [n for n in candidates if n not in self.protected]
        return set(candidates[-room:] if room > 0 else ())

    def _best(self) -> dict[int, str]:
        if not self.policy.best:
            return {}
        # A policy of the run has a monitor; one that is given by hand may not find any.
        ranked = [
            record
            for monitor in self.monitors[:1]
            for record in self.state.ranked(monitor, self.phase)
            if record.tier == self.tier
        ]
        return {record.n: f"best {self.policy.best}" for record in ranked[: self.policy.best]}

    def _kept_by_policy(
        self, record: CheckpointRecord, last: set[int], best: dict[int, str]
    ) -> Iterator[str]:
        policy = self.policy
        if policy.all:
            yield "all"
        if record.n in last:
            yield f"last {policy.last}"
        if record.superseded:
            return
        if record.n in best:
            yield best[record.n]
        if policy.every and record.step % policy.every == 0:
            yield f"every {policy.every}"
        if policy.for_days and self.now_ms - record.time_ms < policy.for_days * _DAY_MS:
            yield f"for {policy.for_days} days"

    def _why_it_goes(self, record: CheckpointRecord) -> str:
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
