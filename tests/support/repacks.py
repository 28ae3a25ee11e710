"""Plans of a repack, for tests whose registry fits into one batch."""

from __future__ import annotations

from typing import Any

from holdfast.registry.store.store import Store
from holdfast.registry.upkeep.repacking import repack_plan
from holdfast.registry.upkeep.repacking.repack_plan import RepackPlan

#: The plan of a registry in which nothing may be rewritten.
_NOTHING = RepackPlan({}, (), {}, {}, {}, {}, {}, {})


def plan_repack(store: Store, *args: Any, **options: Any) -> RepackPlan:
    """Return the plan of the only batch."""
    plans = list(repack_plan.plan_repack(store, *args, **options))
    assert len(plans) <= 1
    return plans[0] if plans else _NOTHING
