"""Rank the keys of configurations by how strongly they go with a metric over several runs.

It says which values come with which results, never that a key is the cause.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.spec import Monitor
from holdfast.registry.tables import config_of
from holdfast.registry.values import abridged, number

#: The fewest runs that are ranked; shuffles of the metric.
_LEAST, _SHUFFLES = 6, 1000
#: Numbers with more distinct values are compared in this many ranges.
_VALUES, _RANGES = 8, 4
#: A hump is stronger than the one, and its correlation is below the other.
_STRONG, _WEAK = 0.2, 0.3


@dataclass(frozen=True, slots=True)
class KeyRank:
    """How a key of the configurations goes with a metric.

    Attributes:
        key: Its name, as in a filter: `optimizer.lr`.
        runs: How many have it; of a text all, since its absence counts as a value.
        strength: From 0 to 1: the share of the variance of the metric's ranks between the groups of
            runs with one value or range (eta squared), or the correlation squared, if that is more;
            adjusted for the numbers of runs and groups.
        correlation: Spearman's rank correlation, from -1 to 1; `None` for texts.
        chance: The share of 1,000 random shuffles of the metric that are at least as strong.
        best: The value or range with the best mean; one of a single run only where all are.
        best_mean: The mean of the metric there.
        best_runs: How many runs have it.
        confounded: Keys that differ only together with it.
        is_hump: Whether the best range is in the middle, so that it is strong (above 0.2) and
            hardly correlated (below 0.3).
    """

    key: str
    runs: int
    strength: float
    correlation: float | None
    chance: float
    best: str
    best_mean: float
    best_runs: int
    confounded: tuple[str, ...] = ()
    is_hump: bool = False


@dataclass(frozen=True, slots=True)
class Ranking:
    """Keys of configurations, ranked by how strongly they go with a metric.

    Attributes:
        monitor: The metric, and whether its lowest or highest value is the best.
        runs: How many have a finite value of it.
        keys: The keys that vary, the strongest first.
        unranked: Other keys that vary, each with the reason.
        unlike: Names of the runs among them that are forks, or lack keys, where most are not so.
        damaged: Runs that could not be read, each with its error.
    """

    monitor: Monitor
    runs: int
    keys: tuple[KeyRank, ...]
    unranked: Mapping[str, str]
    unlike: tuple[str, ...] = ()
    damaged: Mapping[str, RegistryError] = field(default_factory=dict)

    @property
    def about(self) -> tuple[str, ...]:
        """How to read it, in sentences."""
        humps = ", ".join(one.key for one in self.keys if one.is_hump)
        together = (", ".join((one.key, *one.confounded)) for one in self.keys if one.confounded)
        n, names = len(self.unlike), abridged(self.unlike, ", ")
        those = f"{n} of them {'is a fork or lacks' if n == 1 else 'are forks or lack'} keys"
        unlike = f"{those} that most have: {names}. " if n else ""
        return (
            f"{self.runs} runs, each with its best {self.monitor.label} ({self.monitor.mode}). "
            f"{unlike}Nothing here says that a key is the cause.",
            "Strength: the share of its differences that goes with a key, each key alone: together "
            "they may pass 100 %; chance: how often shuffled values are as strong; best: the value "
            "or range with the best mean.",
            *([f"Best at middle values, so the correlation is near 0: {humps}."] if humps else []),
            *(f"Nothing tells {some} apart: they differ only together." for some in together),
        )


def rank_config(
    runs: Sequence[RunManifest],
    monitor: Monitor | None = None,
    damaged: Mapping[str, RegistryError] | None = None,
) -> Ranking:
    """Rank the keys of the configurations of some runs, by default by the usual monitor."""
    usual = Counter(one for run in runs for one in run.monitors[:1]).most_common(1)
    if monitor is None and not usual:
        raise InvalidInput("no run has a monitor", expected="a metric to rank by")
    by = monitor or usual[0][0]
    bests = [(run, run.own_best(by)) for run in sorted(runs, key=lambda run: run.run_id)]
    known = [(run, one.rank(by)) for run, one in bests if one and math.isfinite(one.rank(by))]
    if len(known) < _LEAST:
        names = {name for run in runs for one in run.live() for name in one.metrics}
        raise InvalidInput(
            "too few runs to rank their configurations",
            where=by.metric,
            expected=f"at least {_LEAST} runs with a value of it",
            found=len(known),
            hint=f"They have {abridged(sorted(names), ', ')}." if names - {by.metric} else None,
        )
    costs, configs = np.array([one for _, one in known]), [config_of(run) for run, _ in known]
    ranked: dict[tuple[int, ...], KeyRank] = {}
    unranked: dict[str, str] = {}
    for key in dict.fromkeys(key for one in configs for key in one):
        column = [one.get(key) for one in configs]
        pattern = _pattern(column)
        if same := ranked.get(pattern):
            ranked[pattern] = replace(same, confounded=(*same.confounded, key))
        elif any(pattern):
            one = _rank(key, column, costs, 1 if by.mode == "min" else -1)
            if isinstance(one, str):
                unranked[key] = one
            else:
                ranked[pattern] = one
    keys = sorted(ranked.values(), key=lambda one: (-one.strength, one.chance))
    unlike = _unlike([run for run, _ in known], configs)
    return Ranking(by, len(known), tuple(keys), unranked, unlike, damaged or {})


def _unlike(runs: Sequence[RunManifest], configs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the runs that lack a key that most have, or are forks where most are not."""
    made = [
        {*one, *([] if run.created and run.created.parent else [None])}
        for run, one in zip(runs, configs, strict=True)
    ]
    counts = Counter(trait for one in made for trait in one)
    usual = {trait for trait, n in counts.items() if 2 * n > len(runs)}
    return tuple(run.run_id for run, one in zip(runs, made, strict=True) if usual - one)


def _numbers(column: Sequence[Any]) -> Any:
    """Return the numbers of a key, NaN where it is absent; `None` if it is not about numbers."""
    given = [one for one in column if one is not None]
    are = all(type(one) in (int, float) and abs(one) < 1e300 for one in given)
    return np.array(column, np.float64) if are and len({*given}) > 1 else None


def _pattern(column: Sequence[Any]) -> tuple[int, ...]:
    """Return how runs differ in a key: equal for keys that differ only together, zeros for none."""
    numbers, first = _numbers(column), dict[str, int]()
    pattern = tuple(first.setdefault(repr(one), len(first)) for one in column)
    if len(first) <= len(column) // 2:
        return pattern
    if numbers is None:
        return (-1, *pattern)
    # Almost every run has a number of its own: such keys differ together if their orders agree.
    orders = (np.unique(one, return_inverse=True)[1] for one in (numbers, -numbers))
    return min(tuple(np.where(np.isnan(numbers), -1, one).tolist()) for one in orders)


def _groups(column: Sequence[Any], numbers: Any) -> tuple[Any, list[str]]:
    """Return the group of each run, and the names of the groups: values, or ranges of them."""
    if numbers is None:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in column]
        found, codes = np.unique(texts, return_inverse=True)
        return codes, ["absent" if one == "null" else one for one in found.tolist()]
    distinct, codes = np.unique(numbers, return_inverse=True)
    if len(distinct) <= max(2, min(_VALUES, len(numbers) // 2)):
        return codes, [number(one) for one in distinct.tolist()]
    parts = (_ranks(numbers) / len(numbers) + 0.5) * min(_RANGES, len(numbers) // 3)
    codes = np.unique(parts.astype(int), return_inverse=True)[1]
    some = [numbers[codes == one] for one in range(codes.max() + 1)]
    return codes, [f"{one.min():.3g} to {one.max():.3g}" for one in some]


def _rank(key: str, column: Sequence[Any], costs: Any, sign: int) -> KeyRank | str:
    """Return how a key goes with the metric, which is `sign * costs`, or why it is not ranked."""
    numbers, correlation = _numbers(column), None
    if numbers is not None:
        costs, numbers = costs[~np.isnan(numbers)], numbers[~np.isnan(numbers)]
    if len(costs) < _LEAST:
        return f"only {len(costs)} runs have it"
    codes, names = _groups(column, numbers)
    if len(names) > len(costs) // 2:
        return "almost every run has another value"
    rows = np.tile(_ranks(sign * costs), (1 + _SHUFFLES, 1))
    np.random.default_rng(0).permuted(rows[1:], axis=1, out=rows[1:])
    member = np.eye(len(names))[codes]
    counts, means = member.sum(0), costs @ member / member.sum(0)
    etas = ((rows @ member) ** 2 / counts).sum(1) / ((rows[0] ** 2).sum() or 1.0)
    strengths = _adjusted(etas, len(costs), len(names) - 1)
    if numbers is not None:
        order = _ranks(numbers)
        rhos = rows @ order / (np.linalg.norm(rows[0]) * np.linalg.norm(order) or 1.0)
        strengths = np.maximum(strengths, _adjusted(rhos**2, len(costs), 1))
        correlation = float(rhos[0])
    best = np.where(counts > (counts.max() > 1), means, np.inf).argmin()
    strength, mean = max(0.0, float(strengths[0])), float(sign * means[best])
    chance = float((strengths >= strengths[0] - 1e-9).mean())
    is_weak = correlation is not None and abs(correlation) < _WEAK
    return KeyRank(
        *(key, len(costs), strength, correlation, chance, names[best], mean, int(counts[best])),
        is_hump=is_weak and strength > _STRONG and 0 < int(best) < len(names) - 1,
    )


def _ranks(values: Any) -> Any:
    """Return ranks, less their mean; equal values have the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[inverse]
    return ranks - ranks.mean()


def _adjusted(shares: Any, runs: int, freedom: int) -> Any:
    """Return shares of variance less what as many groups explain by chance."""
    return 1 - (1 - shares) * (runs - 1) / max(runs - 1 - freedom, 1)
