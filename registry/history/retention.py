"""Plan which checkpoints of a run retention evicts: pure functions, with a reason for each verdict.

Always protected are the newest checkpoint of each phase, the best by each monitor, those that a
gate or a tag names, those that a hold keeps or a follower works on, and those that were recovered.
Entries of the pool, releases and artifacts keep their own state, so they need no checkpoint.
Nothing is written here.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest

from holdfast.registry.history.actions import Action, Evict, Eviction
from holdfast.registry.history.holds import hold_in_words
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.spec import Phase, Retention, RunSpec, Tier
from holdfast.registry.values import markup, size

_LOGGER = logging.getLogger("holdfast")
_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one checkpoint."""

    checkpoint: CheckpointRecord
    reasons: tuple[str, ...]  # why it is kept, or why it is evicted or thinned
    #: The components that it keeps if it is thinned; of other verdicts none.
    only: tuple[str, ...] = ()


class RetentionPlan:
    """The plan of retention for a run. The reasons of kept checkpoints are computed on request.

    Args:
        groups: Every phase and tier that has checkpoints.
    """

    def __init__(self, groups: Iterable[_Group]) -> None:
        self._groups = tuple(groups)
        self._going = {one.n for group in self._groups for one in (*group.evicted, *group.thinned)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RetentionPlan):
            return NotImplemented
        mine, theirs = ((one.kept, one.thinned, one.evicted) for one in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]  # a plan holds records, which have no hash

    def __repr__(self) -> str:
        thinned = f", thinned={self.thinned!r}" if self.thinned else ""
        return f"RetentionPlan(kept={self.kept!r}{thinned}, evicted={self.evicted!r})"

    def _repr_html_(self) -> str:
        return markup.safely("Retention plan", self._html)

    def _html(self) -> str:
        kept, thinned, evicted = self.kept, self.thinned, self.evicted
        name = f"{len(kept)} kept, {len(evicted)} evicted"
        name += f", {len(thinned)} thinned" if thinned else ""
        facts = {"bytes of the evicted": size(sum(one.checkpoint.size_bytes for one in evicted))}
        return markup.describe(
            "Retention plan",
            name,
            facts,
            _rows("evicted", evicted),
            *([_rows("thinned", thinned)] if thinned else []),
            _rows("kept", kept),
        )

    @cached_property
    def unrated(self) -> dict[str, str]:
        """The phases whose evictions are decided without a best, each with its monitors in words.

        No checkpoint of the phase has a value by which it could be the best.
        """
        return {
            group.phase: " or ".join(monitor.label for monitor in group.monitors)
            for group in self._groups
            if group.is_unrated and not all(one.superseded for one in group.evicted)
        }

    @cached_property
    def kept(self) -> tuple[Verdict, ...]:
        """The checkpoints that stay as they are, in log order."""
        return _in_order(
            Verdict(record, group.reasons(record))
            for group in self._groups
            for record in group.members
            if record.n not in self._going
        )

    @cached_property
    def thinned(self) -> tuple[Verdict, ...]:
        """The checkpoints to thin, in log order."""
        return _in_order(
            Verdict(record, (group.why_evicted(record),), group.policy.then or ())
            for group in self._groups
            for record in group.thinned
        )

    @cached_property
    def evicted(self) -> tuple[Verdict, ...]:
        """The checkpoints to evict, in log order."""
        return _in_order(
            Verdict(record, (group.why_evicted(record),))
            for group in self._groups
            for record in group.evicted
        )

    def actions(self) -> list[Action]:
        """Return the actions that evict; a thinning needs places, too."""
        evictions = tuple(
            Eviction(checkpoint=verdict.checkpoint.n, reason="; ".join(verdict.reasons))
            for verdict in self.evicted
        )
        return [Evict(evictions=evictions)] if evictions else []


def _in_order(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    return tuple(sorted(verdicts, key=lambda verdict: verdict.checkpoint.n))


def _rows(what: str, verdicts: Sequence[Verdict]) -> markup.Rows:
    """Return the newest verdicts of a kind, with their reasons."""
    rows = (
        (one.checkpoint.phase, one.checkpoint.step, size(one.checkpoint.size_bytes), why)
        for one in reversed(verdicts)
        for why in ["; ".join(one.reasons)]
    )
    heads = ("phase", f"{what} step", "size", "why")
    return markup.Rows(heads, rows, len(verdicts), f"that are {what}")


def warn_of_unrated(run_id: str, unrated: Mapping[str, str], told: set[str]) -> None:
    """Warn of evictions that were decided without a best, once for each phase."""
    for phase in unrated.keys() - told:
        told.add(phase)
        text = (
            f"{run_id}: phase {phase}: checkpoints are evicted as if none were better: none has a "
            f"value of {unrated[phase]}. Give it with `metrics=`, or report it before retention "
            "evicts (`wait` of the policy)."
        )
        _LOGGER.warning(text)
        warnings.warn(text, UserWarning, stacklevel=2)


def plan_retention(
    run: RunManifest, now_ms: int, override: Retention | None = None
) -> RetentionPlan:
    """Plan which checkpoints of a run are evicted."""
    return RetentionPlan(_Group(run, now_ms, override, *group) for group in _groups(run, override))


def protections(run: RunManifest, record: CheckpointRecord, now_ms: int) -> list[str]:
    """Return why no policy evicts a checkpoint; nothing if a policy may."""
    everything = Retention(all=True)
    group = _Group(run, now_ms, everything, record.phase, record.tier, everything)
    return group.protected.get(record.n, [])


def has_policies(spec: RunSpec) -> bool:
    """Return whether a run has any retention policy."""
    return spec.retention is not None or any(
        phase.tiers or phase.retention is not None for phase in spec.phases
    )


def may_thin(spec: RunSpec) -> bool:
    """Return whether a policy of a run thins checkpoints."""
    tiers = (tier.retention for phase in spec.phases for tier in phase.tiers)
    policies = (spec.retention, *(phase.retention for phase in spec.phases), *tiers)
    return any(policy is not None and policy.then is not None for policy in policies)


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
    def is_unrated(self) -> bool:
        """Whether the phase has monitors, and none of its checkpoints has a value for any."""
        run, phase = self.run, self.phase
        return bool(self.monitors) and not any(
            run.best(one, phase) or next(run.bests_before(one, phase), None)
            for one in self.monitors
        )

    @property
    def members(self) -> list[CheckpointRecord]:
        """The checkpoints, in the order in which they are evicted."""
        return [self.run.by_n[n] for n in self.numbers]

    @property
    def evicted(self) -> list[CheckpointRecord]:
        """The members that no rule keeps, and of which nothing stays."""
        passed = self._passed.values()
        return [one for one in passed if one.superseded or not self.policy.then]

    @cached_property
    def thinned(self) -> list[CheckpointRecord]:
        """The members that no rule keeps whole, and that hold more than the policy wants."""
        only = set(self.policy.then or ())
        return [
            one
            for one in (self._passed.values() if only else ())
            if not one.superseded and not (one.parts and set(one.parts) <= only)
        ]

    @cached_property
    def _passed(self) -> dict[int, CheckpointRecord]:
        """The members that no rule keeps whole, by number."""
        policy = self.policy
        if policy.all:
            return {}
        # Every save runs this, so it computes no reasons and skips most members.
        numbers, last = self.numbers, set[int]()
        if policy.counts_protected:
            last = self.last
        elif policy.last is not None:
            numbers = numbers[: -policy.last]
        young_ms = self.now_ms - policy.for_days * _DAY_MS if policy.for_days else None
        passed = {}
        for n in numbers:
            record = self.run.by_n[n]
            if n in self.protected or n in self.waiting or self._is_recovered(record) or n in last:
                continue
            if not record.superseded and (
                n in self.best
                or (policy.every and record.step % policy.every == 0)
                or (young_ms is not None and record.time_ms > young_ms)
            ):
                continue
            passed[n] = record
        return passed

    def _is_recovered(self, record: CheckpointRecord) -> bool:
        """Return whether a member is kept because it was recovered."""
        return record.recovered and not self.overridden and not record.superseded

    def reasons(self, record: CheckpointRecord) -> tuple[str, ...]:
        """Return why a member is kept."""
        recovered = ["brought back by hand"] if self._is_recovered(record) else []
        waits = [self.waiting[record.n]] if record.n in self.waiting else []
        named = self.protected.get(record.n, ())
        return (*named, *recovered, *waits, *self._kept_by_policy(record))

    @cached_property
    def protected(self) -> dict[int, list[str]]:
        """The reasons that keep checkpoints under any policy, by number."""
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
            for pivot, before in run.bests_before(monitor, self.phase):
                protect(before.n, f"best/{monitor.label} before {pivot}")
        if run.pinned:
            for pin in run.pins:
                if pin.kind in ("gate", "tag"):
                    protect(pin.checkpoint, pin.ref)
        for hold in run.holds or ():
            for n in run.by_n if hold.checkpoint is None else (hold.checkpoint,):
                protect(n, hold_in_words(hold))
        for group in run.groups:
            for claim in group.claims:
                if claim.until_ms > self.now_ms:
                    protect(claim.checkpoint, f"held by {group.name}")
        return found

    @cached_property
    def waiting(self) -> dict[int, str]:
        """The newest members that lack a metric; evicted checkpoints count towards `wait`."""
        wait = self.policy.wait
        if not wait:
            return {}
        evicted = self.run.evicted_on_line(self.phase, self.tier)
        found = {}
        for newer, n in enumerate(reversed(self.line)):
            position = newer + (evicted >> n).bit_count()
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
        room, numbers = self.policy.last, self.numbers
        if self.policy.counts_protected:
            recovered = {record.n for record in self.members if self._is_recovered(record)}
            kept = self.protected.keys() | self.waiting.keys() | recovered
            room -= len(kept)
            numbers = tuple(n for n in numbers if n not in kept)
        return set(numbers[-room:] if room > 0 else ())

    @cached_property
    def best(self) -> set[int]:
        """The members that are among the best."""
        if not self.policy.best:
            return set()
        # The run has a monitor if its own policy keeps the best; an override may find none.
        rated = (
            one
            for monitor in self.monitors[:1]
            for one in self.run.rated(monitor, self.phase)
            if one[2].tier == self.tier
        )
        return {n for _, n, _ in nsmallest(self.policy.best, rated)}

    def _kept_by_policy(self, record: CheckpointRecord) -> Iterator[str]:
        policy = self.policy
        if policy.then and record.n in self._passed:
            yield f"only {', '.join(policy.then)}"
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

    def why_evicted(self, record: CheckpointRecord) -> str:
        """Return why a member is evicted."""
        policy = self.policy
        wanted = [
            f"last {policy.last}" if policy.last else "",
            f"best {policy.best}" if policy.best else "",
            f"every {policy.every}" if policy.every else "",
            f"{policy.for_days} days" if policy.for_days else "",
        ]
        group = f"tier {self.tier}" if self.tier else f"phase {self.phase}"
        superseded = "superseded; " if record.superseded else ""
        return f"{superseded}not among {', '.join(filter(None, wanted))} of {group}; no pin"


# Choose the tier of a checkpoint within its phase: pure functions of the run and the save.


def choose_tier(
    run: RunManifest, phase: Phase, metrics: Mapping[str, float], counters: Mapping[str, int]
) -> str | None:
    """Return the tier of a new checkpoint: the first whose rule it meets, or the last one."""
    for tier in phase.tiers:
        counter = tier.counter or phase.counter
        due = tier.every is not None and counters[counter] % tier.every == 0
        if due or _improves(run, phase, tier, metrics):
            return tier.name
    return phase.tiers[-1].name if phase.tiers else None


def tier_after_report(run: RunManifest, n: int, metrics: Mapping[str, float]) -> str | None:
    """Return the higher tier that late metrics give a checkpoint; `None` if its tier stays."""
    record = run.by_n.get(n)
    if record is None or record.tier is None or not record.is_live:
        return None
    phase = run.spec.phase(record.phase)
    merged = {**record.metrics, **metrics}
    for tier in phase.tiers:
        if tier.name == record.tier:
            return None
        if _improves(run, phase, tier, merged, except_n=n):
            return tier.name
    return None


def _improves(
    run: RunManifest,
    phase: Phase,
    tier: Tier,
    metrics: Mapping[str, float],
    except_n: int | None = None,
) -> bool:
    for monitor in phase.monitors:
        rank = monitor.rank(metrics)
        if monitor.label not in tier.improves or math.isnan(rank):
            continue
        best = run.best(monitor, phase.name)
        if best is not None and best.n == except_n:
            others = [one for one in run.ranked(monitor, phase.name) if one.n != except_n]
            best = others[0] if others else None
        if best is None or rank < best.rank(monitor):
            return True
    return False
