"""The bytes of a registry, and dry runs of what would free some."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.registry.history.epochs import DAY_S
from holdfast.registry.maintenance.gc_report import GcReport
from holdfast.registry.spec import Retention
from holdfast.registry.ui.charts import Chart
from holdfast.registry.ui.queries.storage import (
    Counted,
    PrunePlan,
    StorageView,
    count_bytes,
    plan_gc,
    plan_prune,
    storage_view,
)
from holdfast.registry.ui.queries.storage_charts import (
    growth_chart,
    packs_chart,
    parts_chart,
    runs_chart,
)
from holdfast.registry.ui.queries.trouble import Trouble, tried, trouble_of
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View


@dataclass(frozen=True, slots=True)
class StoragePage:
    """What the page of the bytes shows.

    Attributes:
        view: What is on the store.
        growth: The objects by time; `None` if there are none.
        packs: The packs by size; `None` if there are none.
        counted: The bytes by run, where they were asked for.
        parts: All bytes as one bar.
        runs: A bar for each of the largest runs.
        gc: What a collection would delete, where that was asked for.
        prune: What a prune would evict, where that was asked for.
        freed: The bytes that the evicted checkpoints alone need, if bytes were counted too.
    """

    view: StorageView
    growth: Chart | None
    packs: Chart | None
    counted: Counted | None
    parts: Chart | None
    runs: Chart | None
    gc: GcReport | None
    prune: PrunePlan | None
    freed: int | None


def _ask(source: Source, asked: Asked) -> Shown:
    troubles: list[Trouble] = []
    view = storage_view(source)
    counted = gc = prune = None
    if asked.text("bytes"):
        counted = tried(lambda: count_bytes(source), troubles)
        if counted is not None:
            troubles += map(trouble_of, counted.usage.damaged.values())
    if asked.text("gc"):
        grace_s = DAY_S * asked.number("grace", 1, most=36_500)
        gc = tried(lambda: plan_gc(source, grace_s=grace_s), troubles)
    if asked.text("prune"):
        run, policy = asked.text("prune").strip(), _policy(asked)
        prune = tried(lambda: plan_prune(source, run, policy), troubles)
    page = StoragePage(
        view,
        growth_chart(view) if view.growth else None,
        packs_chart(view) if view.packs else None,
        counted,
        None if counted is None else parts_chart(counted.usage),
        runs_chart(counted.runs) if counted is not None and counted.runs else None,
        gc,
        prune,
        _freed(counted, prune),
    )
    told = {one.what: one for one in reversed(troubles)}  # a damaged run stops each of the three
    return Shown("Storage", page, tuple(reversed(told.values())))


def _policy(asked: Asked) -> Retention | None:
    """Return the policy that a URL gives; `None` for the run's own."""
    last, best, every, days = (
        asked.number(name, 0) or None for name in ("last", "best", "every", "days")
    )
    if not any((last, best, every, days)):
        return None
    return Retention(last=last, best=best, every=every, for_days=days)


def _freed(counted: Counted | None, prune: PrunePlan | None) -> int | None:
    """Return the least number of bytes that go: those that a single evicted checkpoint needs."""
    if counted is None or prune is None:
        return None
    run = next((one for one in counted.usage.runs if one.run == prune.run), None)
    states = () if run is None else run.states
    return sum(one.freed_bytes or 0 for one in states if one.id in prune.evicted_ids)


VIEW = View("storage", "Storage", "/storage", "storage.html", _ask, place="registry")
