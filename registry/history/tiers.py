"""Choose the tier of a checkpoint within its phase: pure functions of the run and the save."""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.registry.history.replay import RunManifest
from holdfast.registry.spec import Phase, Tier


def choose_tier(
    run: RunManifest, phase: Phase, metrics: Mapping[str, float], counters: Mapping[str, int]
) -> str | None:
    """Return the tier of a new checkpoint: the first whose rule it meets, or the last one.

    Args:
        run: The run before the checkpoint.
        phase: Its phase.
        metrics: Its metrics.
        counters: Values of the counters that the tiers name.
    """
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
