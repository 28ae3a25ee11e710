"""Charts of bytes: by what needs them, by run, by time, and the sizes of packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.registry.maintenance.usage import RunUsage, Usage
from holdfast.registry.ui.charts import Chart, figure, moment, table
from holdfast.registry.ui.queries.storage import StorageView
from holdfast.registry.ui.units import byte_axis
from holdfast.registry.values.amounts import size

#: Runs that have a bar.
_BARS = 25
_LEGEND = {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0}


def growth_chart(view: StorageView) -> Chart:
    """Return the bytes that were put until each moment and are still there."""
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
    rows = [(moment(point.time_ms), point.nbytes) for point in view.growth]
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
        "text": [f"{one.packs:,}" for one in view.packs],
        "marker": {"color": "var(--accent)"},
        "customdata": [size(one.nbytes) for one in view.packs],
        "hovertemplate": "%{x}: %{text} packs, %{customdata}<extra></extra>",
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
    """Return one bar of all bytes on the store, by what needs them."""
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
    """Return a bar for each of the largest runs: what it alone needs, and what it shares."""
    shown = [one for one in runs[:_BARS] if one.own_bytes or one.shared_bytes][::-1]
    names = [one.run for one in shown]
    traces = [
        _bar([one.own_bytes for one in shown], names, "its own", "var(--accent)"),
        _bar([one.shared_bytes for one in shown], names, "shared with other runs", "var(--good)"),
    ]
    rows = [
        (one.run, len(one.states), one.own_bytes, one.shared_bytes, one.log_bytes) for one in runs
    ]
    return figure(
        "Bytes by run",
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
