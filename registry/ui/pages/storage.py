"""The bytes of a registry, and dry runs of prune and gc."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import Verdict, has_policies
from holdfast.registry.objects import KINDS
from holdfast.registry.spec import Retention
from holdfast.registry.store import DAY_S
from holdfast.registry.ui.charts import Chart, Moment, figure, table
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, tried, trouble_of
from holdfast.registry.ui.source import Source
from holdfast.registry.upkeep import Freeing, GcReport, RunUsage, Usage, ways_to_free
from holdfast.registry.values import Digest, counted, size

#: Maximum number of objects of each kind to list: ten requests on S3.
LISTED = 10_000
#: Steps of the curve of growth.
STEPS = 120
#: Upper bounds of the classes of pack sizes, in bytes.
PACK_SIZES = tuple(2**power for power in (16, 18, 20, 22, 24, 26))
#: Maximum rows of a table; the page counts the rest.
SHOWN = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """The listed objects of one kind."""

    name: str  # `packs`, `manifests` or `placements`
    objects: int  # number of listed objects
    nbytes: int
    is_all: bool  # whether these are all


@dataclass(frozen=True, slots=True)
class PackClass:
    """Packs of similar size."""

    below: int | None  # maximum bytes of each; `None` for the largest class
    packs: int  # how many
    nbytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The bytes that were put before a moment and still exist."""

    time_ms: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StorageView:
    """Objects on the store: by kind, by size, by time."""

    kinds: tuple[Kind, ...]  # the objects by kind
    packs: tuple[PackClass, ...]  # the packs by size; without empty classes
    growth: tuple[Growth, ...]  # the listed objects by the time when they were put, oldest first

    @property
    def nbytes(self) -> int:
        """Bytes of all listed objects."""
        return sum(kind.nbytes for kind in self.kinds)

    @property
    def is_all(self) -> bool:
        """Whether every object was listed; otherwise the listed ones are a random sample."""
        return all(kind.is_all for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Counted:
    """The bytes by run."""

    usage: Usage
    runs: tuple[RunUsage, ...]  # the runs, by the bytes that each needs alone; at most `SHOWN`


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Checkpoints that a prune of one run would evict."""

    run: str
    kept: tuple[Verdict, ...]  # the checkpoints that stay, newest first; at most `SHOWN`
    kept_count: int  # how many stay
    evicted: tuple[Verdict, ...]  # the checkpoints to evict, newest first; at most `SHOWN`
    evicted_count: int  # number of checkpoints to evict
    evicted_ids: frozenset[Digest]
    #: Bytes of the tensors to evict; bytes shared with other checkpoints stay on the store.
    evicted_bytes: int


def storage_view(source: Source) -> StorageView:
    """List the objects on the store, at most `LISTED` of each kind.

    Keys begin with digests, so the first ones of a listing are a random sample of all.
    """
    store = source.registry.handle.store

    def listed(kind: str) -> list[ObjectInfo]:
        return list(islice(store.backend.list(f"{kind}/", limit=LISTED + 1), LISTED + 1))

    found = dict(zip(KINDS, store.pools.bulk.map(listed, KINDS), strict=True))
    kinds = [
        Kind(
            kind,
            min(len(infos), LISTED),
            sum(info.size_bytes for info in infos[:LISTED]),
            len(infos) <= LISTED,
        )
        for kind, infos in found.items()
    ]
    objects = [info for infos in found.values() for info in infos[:LISTED]]
    return StorageView(tuple(kinds), _classes(found["packs"][:LISTED]), _growth(objects))


def count_bytes(source: Source) -> Counted:
    """Count the bytes on the store by the runs that need them; reads every log and placement."""
    usage = source.registry.usage()
    runs = sorted(usage.runs, key=lambda one: (-one.own_bytes, one.run))
    return Counted(usage, tuple(runs[:SHOWN]))


def plan_prune(source: Source, run_id: str, policy: Retention | None = None) -> PrunePlan:
    """Plan a prune of a run by its log alone."""
    run = source.run(run_id)
    if policy is None and not has_policies(run.manifest.spec):
        raise InvalidInput(
            "the run has no retention policy: it keeps everything",
            where=run_id,
            hint="Say how many of the last or best checkpoints to keep.",
        )
    plan = run.retention.prune(policy, dry_run=True)
    return PrunePlan(
        run_id,
        plan.kept[::-1][:SHOWN],
        len(plan.kept),
        plan.evicted[::-1][:SHOWN],
        len(plan.evicted),
        frozenset(one.checkpoint.manifest for one in plan.evicted),
        sum(one.checkpoint.size_bytes for one in plan.evicted),
    )


def _classes(packs: Sequence[ObjectInfo]) -> tuple[PackClass, ...]:
    found = []
    for low, high in zip((0, *PACK_SIZES), (*PACK_SIZES, None), strict=True):
        sizes = [
            pack.size_bytes
            for pack in packs
            if low < pack.size_bytes and (high is None or pack.size_bytes <= high)
        ]
        if sizes:
            found.append(PackClass(high, len(sizes), sum(sizes)))
    return tuple(found)


def _growth(objects: Sequence[ObjectInfo]) -> tuple[Growth, ...]:
    """Return the bytes until each of at most `STEPS` moments with equal distances."""
    if not objects:
        return ()
    times = [info.modified_s for info in objects]
    first, last = min(times), max(times)
    width = (last - first) / STEPS or 1.0
    added = [0] * (STEPS + 1)
    for info in objects:
        added[min(STEPS, int((info.modified_s - first) / width))] += info.size_bytes
    points, total = [], 0
    for step, nbytes in enumerate(added):
        total += nbytes
        if nbytes or step == STEPS:
            points.append(Growth(int(1000 * (first + step * width)), total))
    return tuple(points)


# Axes of charts in units of bytes.


#: Target number of ticks on an axis.
_STEPS = 5


def byte_axis(most: int) -> dict[str, Any]:
    """Return an axis of a chart from 0 to `most` bytes, with steps in binary units."""
    unit = 1024 ** max(0, int(math.log(max(most, 1), 1024)))
    rough = most / unit / _STEPS
    power = 10 ** math.floor(math.log10(rough)) if rough else 1
    step = unit * next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    ticks = [int(step * n) for n in range(int(most / step) + 1)] if most else [0]
    return {"rangemode": "tozero", "tickvals": ticks, "ticktext": [size(tick) for tick in ticks]}


# Charts of bytes: by use, by run, by time, by size of pack.


#: Runs that have a bar.
_BARS = 25
_LEGEND = {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0}


def growth_chart(view: StorageView) -> Chart:
    """Return the bytes that were put before each moment and still exist."""
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": [point.time_ms for point in view.growth],
        "y": [point.nbytes for point in view.growth],
        "fill": "tozeroy",
        "fillcolor": "var(--band)",
        "line": {"color": "var(--accent)", "shape": "hv", "width": 1.5},
        "customdata": [size(point.nbytes) for point in view.growth],
        "hovertemplate": "%{x}<br>%{customdata}<extra></extra>",
    }
    rows = [(Moment(point.time_ms), point.nbytes) for point in view.growth]
    return figure(
        "Growth",
        "Bytes of the objects that are on the store now, by the time when they were put",
        [trace],
        {
            "xaxis": {"type": "date", "nticks": 6},
            "yaxis": byte_axis(view.nbytes),
            "showlegend": False,
        },
        table(("time", "bytes"), rows),
    )


def packs_chart(view: StorageView) -> Chart:
    """Return the bytes of packs by the size of a pack."""
    names = [size_class(one.below) for one in view.packs]
    trace = {
        "type": "bar",
        "x": names,
        "y": [one.nbytes for one in view.packs],
        "text": [counted(one.packs, "pack") for one in view.packs],
        "marker": {"color": "var(--accent)"},
        "customdata": [size(one.nbytes) for one in view.packs],
        "hovertemplate": "%{x}: %{text}, %{customdata}<extra></extra>",
    }
    return figure(
        "Packs by size",
        "Bytes of packs by the size of a pack; the number on a bar is how many there are",
        [trace],
        {
            "xaxis": {"type": "category"},
            "yaxis": byte_axis(max((one.nbytes for one in view.packs), default=0)),
        },
        table(
            ("size of a pack", "packs", "bytes"),
            [(name, one.packs, one.nbytes) for name, one in zip(names, view.packs, strict=True)],
        ),
    )


def parts_chart(usage: Usage) -> Chart:
    """Return one bar of all bytes on the store, by their use."""
    parts = {
        "needed by one state": (usage.own_bytes, "var(--accent)"),
        "shared by several": (usage.shared_bytes, "var(--good)"),
        "dead, for repack": (usage.dead_bytes, "var(--warn)"),
        "unneeded, for gc": (usage.unneeded_bytes, "var(--bad)"),
        "tables of packs": (usage.table_bytes, "var(--second)"),
        "logs": (usage.log_bytes, "var(--muted)"),
        "other files": (usage.other_bytes, "var(--faint)"),
    }
    traces = [
        _bar([nbytes], [""], name, colour) for name, (nbytes, colour) in parts.items() if nbytes
    ]
    return figure(
        "All bytes",
        f"{usage.total_bytes:,} bytes by what needs them",
        traces,
        {
            "barmode": "stack",
            "xaxis": byte_axis(usage.total_bytes),
            "yaxis": {"visible": False},
            "margin": {"l": 24, "r": 24, "t": 22, "b": 8},
            "legend": _LEGEND,
            "showlegend": True,
        },
        table(("bytes of", "bytes"), [(name, nbytes) for name, (nbytes, _) in parts.items()]),
        height_px=190,
    )


def runs_chart(runs: Sequence[RunUsage]) -> Chart:
    """Return a bar for each of the largest runs: bytes that it alone needs, and shared bytes."""
    shown = [one for one in runs[:_BARS] if one.own_bytes or one.shared_bytes][::-1]
    names = [one.run for one in shown]
    traces = [
        _bar([one.own_bytes for one in shown], names, "its own", "var(--accent)"),
        _bar([one.shared_bytes for one in shown], names, "shared with other runs", "var(--good)"),
    ]
    rows = [
        (one.run, len(one.states), one.own_bytes, one.shared_bytes, one.log_bytes) for one in runs
    ]
    largest = f", the {len(shown)} largest of {len(runs)}" if len(shown) < len(runs) else ""
    return figure(
        f"Own and shared bytes of each run{largest}",
        f"Bytes of {len(shown)} runs: those that a run needs alone, and those that it shares",
        traces,
        {
            "barmode": "stack",
            "xaxis": byte_axis(max((one.own_bytes + one.shared_bytes for one in shown), default=0)),
            "yaxis": {"type": "category"},
            "legend": _LEGEND,
            "showlegend": True,
        },
        table(("run", "states", "own", "shared", "log"), rows),
        height_px=110 + 22 * len(shown),
    )


def size_class(below: int | None) -> str:
    """Return a class of sizes: `up to 4 MiB`, `more`."""
    if below is None:
        return "more"
    return f"up to {below >> 20} MiB" if below >= 2**20 else f"up to {below >> 10} KiB"


def _bar(x: Sequence[int], y: Sequence[str], name: str, colour: str) -> Mapping[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "x": list(x),
        "y": list(y),
        "name": name,
        "marker": {"color": colour},
        "customdata": [size(nbytes) for nbytes in x],
        "hovertemplate": "%{y} %{customdata}<extra>%{fullData.name}</extra>",
    }


@dataclass(frozen=True, slots=True)
class StoragePage:
    """Page of the stored bytes."""

    view: StorageView  # what is on the store
    growth: Chart | None  # the objects by time; `None` if there are none
    packs: Chart | None  # the packs by size; `None` if there are none
    counted: Counted | None  # the bytes by run, if the URL asks
    parts: Chart | None  # all bytes as one bar
    runs: Chart | None  # a bar for each of the largest runs
    free: Sequence[Freeing] | None  # the ways to free bytes, if the URL asks
    gc: GcReport | None  # a dry collection, if the URL asks
    prune: PrunePlan | None  # the plan of a prune, if the URL asks
    #: Bytes that only the checkpoints to evict need, if bytes were counted too.
    freed: int | None


def _ask(source: Source, asked: Asked) -> Shown:
    troubles: list[Trouble] = []
    view = storage_view(source)
    counted = free = gc = prune = None
    if asked.text("bytes"):
        counted = tried(lambda: count_bytes(source), troubles)
        if counted is not None:
            troubles += map(trouble_of, counted.usage.damaged.values())
    if asked.text("free"):
        ways = tried(lambda: ways_to_free(source.registry.handle.store), troubles)
        free, damaged = ways or (None, {})
        troubles += map(trouble_of, damaged.values())
    if asked.text("gc"):
        grace_s = DAY_S * asked.number("grace", 1, most=36_500)
        gc = tried(lambda: source.registry.gc(grace_s=grace_s, dry_run=True), troubles)
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
        free,
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
    """Return a lower bound of the freed bytes: the bytes that single checkpoints need alone."""
    if counted is None or prune is None:
        return None
    run = next((one for one in counted.usage.runs if one.run == prune.run), None)
    states = () if run is None else run.states
    return sum(one.freed_bytes or 0 for one in states if one.id in prune.evicted_ids)


VIEW = View("storage", "Storage", "/storage", "storage.html", _ask, place="registry")
