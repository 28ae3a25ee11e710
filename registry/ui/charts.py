"""Charts and grids as data: the drawing of the browser, and a table of the same values.

A chart holds no markup. Plotly takes tags in labels as formatting, so every text is escaped here.
A grid is a table with coloured cells: Plotly's heat map sets styles that the
Content-Security-Policy refuses, and a screen reader reads a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Any, Literal

#: Maximum number of points of one curve for the browser.
MOST_POINTS = 2000
#: Rows of the table beneath a chart.
MOST_ROWS = 200
#: Fields of a figure that hold our own formats, and no text from a registry.
_FORMATS = {"hovertemplate", "texttemplate"}

MarkKind = Literal["best", "gate", "release", "fork"]
#: Steps of a scale of colours; the stylesheet has a class for each.
STEPS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a curve."""

    step: int
    time_ms: int | None  # its time, in milliseconds since the epoch; `None` if it has none
    value: float  # the value; NaN and infinities are gaps


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric of one run or phase."""

    name: str  # its name in the legend
    points: tuple[Point, ...]  # its points, in the order of training
    is_faint: bool = False  # whether it is in the background, such as superseded values
    #: Curves of one family, such as a run, share a colour and a place in the legend.
    group: str = ""
    #: The ends of a band around each point, such as a deviation; none in most curves.
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a chart with a name, such as the best checkpoint."""

    kind: MarkKind  # decides its symbol
    label: str
    point: Point  # where it is


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the columns of numbers are aligned right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]  # the rows, at most `MOST_ROWS`
    total: int  # number of all rows


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, and the table beneath it."""

    title: str
    about: str  # a sentence for screen readers, in place of the chart
    payload: Mapping[str, Any]  # the drawing, as JSON for the script of the page
    table: Table  # the same as a table
    height_px: int = 260
    is_empty: bool = False  # whether no value can be drawn
    #: Its symbols, each with its colour and its meaning, if the script draws no legend.
    key: tuple[tuple[str, str, str], ...] = ()
    nonfinite: int = 0  # number of its values that are NaN or infinite, so not drawn
    #: Values to know of it, each with its name, its step and its checkpoint: best, lowest, highest.
    extremes: tuple[tuple[str, float, int, str], ...] = ()


def curves(
    title: str,
    found: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    counter: str = "step",
    began_ms: Mapping[str, int] = MappingProxyType({}),
) -> Chart:
    """Return the chart of some curves. The browser offers step or time, log scale, smoothing.

    `began_ms` says when the run of each group of curves began.
    """
    rows = [
        (
            curve.name,
            point.step,
            None if point.time_ms is None else Moment(point.time_ms),
            point.value,
        )
        for curve in found
        for point in curve.points
    ]
    names = ", ".join(curve.name for curve in found[:8])
    lengths = (
        point.time_ms - began_ms[curve.group]
        for curve in found
        for point in curve.points
        if curve.group in began_ms and point.time_ms is not None
    )
    payload = {
        "kind": "curves",
        "span": max(lengths, default=0),
        "counter": escape(counter),
        "curves": [
            {
                "name": escape(curve.name),
                "group": escape(curve.group or curve.name),
                "faint": curve.is_faint,
                "began": began_ms.get(curve.group),
                **_columns(thinned(curve.points)),
                **({"band": curve.band} if curve.band else {}),
            }
            for curve in found
        ],
        "marks": [
            {"kind": one.kind, "label": escape(one.label), **_columns([one.point])} for one in marks
        ],
    }
    return Chart(
        title=title,
        about=f"{title} by {counter}: {names}; {len(rows)} values",
        payload=payload,
        table=table(("curve", counter, "time", "value"), rows),
        is_empty=not any(math.isfinite(row[-1]) for row in rows),
        nonfinite=sum(not math.isfinite(row[-1]) for row in rows),
    )


def figure(
    title: str,
    about: str,
    data: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    shown: Table,
    *,
    height_px: int = 320,
    key: Iterable[tuple[str, str, str]] = (),
) -> Chart:
    """Return a chart that Plotly draws from its own description.

    Fonts, colours of text and background, and margins come from the page. A colour may be the name
    of one of its variables, such as `var(--accent)`.
    """
    payload = {"kind": "figure", "data": _plain(list(data)), "layout": _plain(dict(layout))}
    return Chart(title, about, payload, shown, height_px, key=tuple(key))


def fields_chart(kind: Literal["scatter", "parallel"], title: str, shown: Table) -> Chart:
    """Return a chart of the fields of runs, which are in the page once, in its `data-space`."""
    about = f"{title}: {shown.total} runs"
    return Chart(title, about, {"kind": kind}, shown, height_px=340)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a table of the first rows."""
    return Table(tuple(columns), tuple(tuple(row) for row in rows[:MOST_ROWS]), len(rows))


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in a table."""

    ms: int  # milliseconds since the epoch


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return about `most` points or fewer: the lowest and the highest value of each stretch."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [i for i in stretch if math.isfinite(points[i].value)] or [start]
        ends = {
            min(finite, key=lambda i: points[i].value),
            max(finite, key=lambda i: points[i].value),
        }
        kept.extend(points[i] for i in sorted(ends))
    return kept


def _columns(points: Sequence[Point]) -> dict[str, list[Any]]:
    return {
        "steps": [point.step for point in points],
        "times": [point.time_ms for point in points],
        "values": [point.value if math.isfinite(point.value) else None for point in points],
    }


def _plain(value: Any) -> Any:
    """Return a value of a figure as JSON; texts that could be markup are escaped."""
    match value:
        case Mapping():
            return {key: item if key in _FORMATS else _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
        case str():
            return escape(value, quote=False)
    return value


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a grid."""

    text: str  # its number, short
    about: str  # a sentence for hovering and for screen readers
    tone: str = ""  # class of its colour: `hi-1` to `hi-8`, `lo-1` to `lo-8`, or none


@dataclass(frozen=True, slots=True)
class Grid:
    """A table with coloured cells."""

    title: str
    about: str  # a sentence about its content
    columns: tuple[str, ...]  # names of the columns
    #: The name of each row, with its cells; `None` for an empty one.
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    scale: tuple[str, str]  # the ends of the scale of colours, in words: lowest and highest
    is_diverging: bool = False  # whether the scale has a middle without colour


def tone(share: float) -> str:
    """Return the colour of a value on a scale from 0 to 1."""
    step = round(min(max(share, 0.0), 1.0) * STEPS)
    return f"hi-{step}" if step else ""


def diverging_tone(share: float) -> str:
    """Return the colour of a value on a scale from 0 to 1 with a colourless middle."""
    away = 2 * min(max(share, 0.0), 1.0) - 1
    step = round(abs(away) * STEPS)
    return f"{'hi' if away > 0 else 'lo'}-{step}" if step else ""
