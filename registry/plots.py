"""The metrics and streams of a run as a figure of Plotly, with gates, bests and phases marked.

It only reads. Plotly (the extra `ui`) is imported when a figure is made. It reads a part of HTML in
texts, and `%{...}` in templates: names from a store are escaped, and never part of a template. The
curves, their points and marks are plain values; pages that show the numbers of streams use them
too. docs/notebooks.md describes what users see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, pairwise
from typing import Any, Literal

from holdfast.backends.errors import install_extra
from holdfast.registry.curation.streams import LOG, Stream, each_step_once
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.history import RunLog, moment, phase_segment, step_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.spec import Monitor
from holdfast.registry.values import one_of, text, unknown
from holdfast.registry.writing import Committer

#: Streams by name, each with the wanted keys; or names alone.
StreamKeys = str | Iterable[str] | Mapping[str, str | Iterable[str]]

_HOVER = "%{customdata}<br>%{x}: %{y}<extra></extra>"
_SHADE = "rgba(128, 128, 128, 0.12)"
_LINE = "rgba(128, 128, 128, 0.8)"
#: The axis of the points: the step within its phase, the time of the save in UTC, or the
#: number of the commit.
Axis = Literal["step", "time", "commit"]
Position = int | datetime
#: The most metrics that are drawn if none is named.
_MOST = 8


def plot_run(
    committer: Committer,
    metrics: str | Iterable[str] | None,
    *,
    streams: StreamKeys | None,
    phase: str | None,
    x: Axis,
    history: bool,
) -> Any:
    """Return a figure of a run; see `RunHistory.plot`."""
    graph = _graph_objects()
    if streams is not None and x != "step":
        raise InvalidInput(
            "entries of streams have a step, and no time or commit",
            where=f"x={x}",
            expected="x='step'",
        )
    curves = Curves(committer.log.refresh(), _records(committer.log, phase, history=history), x)
    drawn = list(curves.of_metrics([metrics] if isinstance(metrics, str) else metrics))
    drawn += _of_streams(committer, streams)
    figure = graph.Figure()
    # A star has the colour of its line.
    coloured = list(zip(drawn, cycle(figure.layout.template.layout.colorway or (None,))))
    for curve, colour in coloured:
        figure.add_trace(_line(graph, curve, colour))
    for curve, colour in coloured:
        if curve.best is not None:
            figure.add_trace(_star(graph, curve, curve.best, colour))
    _mark(figure, curves)
    figure.update_layout(
        title_text=text(committer.log.run_id),
        xaxis_title_text=text(curves.unit),
        yaxis_title_text=text(drawn[0].name) if len({one.name for one in drawn}) == 1 else "",
        showlegend=True,
    )
    return figure


def plot_runs(
    logs: Sequence[RunLog], metrics: str | Iterable[str] | None, *, phase: str | None, x: Axis
) -> Any:
    """Return a figure of several runs, one colour for each; see `Registry.plot`."""
    graph = _graph_objects()
    wanted = [metrics] if isinstance(metrics, str) else metrics
    wanted = None if wanted is None else list(wanted)
    figure = graph.Figure()
    missing: NotFound | None = None
    colours = cycle(figure.layout.template.layout.colorway or (None,))
    names: set[str] = set()
    for log, colour in zip(logs, colours, strict=False):
        curves = Curves(log.run, _records(log, phase, history=False), x)
        try:
            drawn = list(curves.of_metrics(wanted))
        except NotFound as error:  # another run may have it
            missing = error
            continue
        for curve, dash in zip(drawn, cycle(("solid", "dash", "dot", "dashdot"))):
            label = text(f"{log.run_id} {_label(curve)}")
            line = _line(graph, curve, colour, label)
            figure.add_trace(line.update(line={"dash": dash}, legendgroup=log.run_id))
        names.update(curve.name for curve in drawn)
    if missing is not None and not figure.data:
        raise missing
    figure.update_layout(
        xaxis_title_text="time (UTC)" if x == "time" else x,
        yaxis_title_text=text(names.pop()) if len(names) == 1 else "",
        showlegend=True,
    )
    return figure


def _records(log: RunLog, phase: str | None, *, history: bool) -> Iterator[Any]:
    run = log.history() if history else log.run
    for one in run.checkpoints if run.dropped is None else ():
        kept = one.evicted is None or history
        if kept and not one.superseded and phase in (None, one.phase):
            yield one


def _of_streams(committer: Committer, streams: StreamKeys | None) -> Iterator[Curve]:
    if streams is None:
        return
    named = [streams] if isinstance(streams, str) else streams
    for name in named:
        keys = named[name] if isinstance(named, Mapping) else None
        wanted = [keys] if isinstance(keys, str) else keys
        entries = Stream(committer, name).read()
        yield from of_stream(name, each_step_once(entries) if name == LOG else entries, wanted)


def _line(graph: Any, curve: Curve, colour: str | None, label: str = "") -> Any:
    label = label or _label(curve)
    return graph.Scatter(
        x=[point.x for point in curve.points],
        y=[_height(point) for point in curve.points],
        customdata=[text(point.ref) or label for point in curve.points],
        name=label,
        mode="lines+markers" if curve.points[0].ref else "lines",
        line={"color": colour},
        hovertemplate=_HOVER,
    )


def _star(graph: Any, curve: Curve, best: Point, colour: str | None) -> Any:
    return graph.Scatter(
        x=[best.x],
        y=[_height(best)],
        customdata=[text(best.ref)],
        name=f"best {_label(curve)}",
        mode="markers",
        marker={"symbol": "star", "size": 14, "color": colour},
        hovertemplate=_HOVER,
    )


def _height(point: Point) -> float | None:
    return point.y if math.isfinite(point.y) else None


def _label(curve: Curve) -> str:
    return text(f"{curve.name} ({curve.phase})" if curve.phase else curve.name)


def _mark(figure: Any, curves: Curves) -> None:
    """Draw phases as bands, and gates as dotted lines, each with its name."""
    for number, span in enumerate(curves.phases()):
        if number % 2 == 0:
            band = {"type": "rect", "line_width": 0, "fillcolor": _SHADE, "layer": "below"}
            figure.add_shape(x0=span.first, x1=span.last, y0=0, y1=1, yref="paper", **band)
        _write(figure, span.first, span.phase, y=0, yanchor="bottom")
    for name, x in curves.gates().items():
        line = {"color": _LINE, "dash": "dot", "width": 1}
        figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, yref="paper", line=line)
        _write(figure, x, f"gate {name}", y=1, yanchor="bottom")


def _write(figure: Any, x: object, words: str, *, y: float, yanchor: str) -> None:
    figure.add_annotation(
        x=x, y=y, yref="paper", text=text(words), showarrow=False, yanchor=yanchor, xanchor="left"
    )


def _graph_objects() -> Any:
    """Return `plotly.graph_objects`."""
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise InvalidInput(
            "this needs the package plotly",
            found=error,
            hint=install_extra("ui"),
        ) from error
    return graph_objects


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve."""

    x: Position
    y: float  # its value; NaN and infinities are gaps
    ref: str = ""  # the checkpoint, or empty for an entry of a stream


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of points."""

    name: str  # the metric, or the stream and its key
    phase: str  # its phase; empty if the run has only one, and for a stream
    points: Sequence[Point]  # its points, in the order of the log
    best: Point | None = None  # the best point of a monitored metric


@dataclass(frozen=True, slots=True)
class Span:
    """A phase."""

    phase: str  # as in refs
    first: Position
    last: Position


class Curves:
    """The curves of a run."""

    def __init__(self, run: RunManifest, records: Iterable[CheckpointRecord], axis: Axis) -> None:
        one_of(axis, Axis, what="not an axis")
        self._run, self._axis = run, axis
        self._by_phase: dict[str, list[CheckpointRecord]] = {}
        for one in records:
            self._by_phase.setdefault(one.phase, []).append(one)

    def of_metrics(self, names: Iterable[str] | None) -> Iterator[Curve]:
        """Yield a curve for each metric and phase that has values."""
        monitors = {one.label: one for phase in self._by_phase for one in self._monitors(phase)}
        known = list(
            dict.fromkeys(
                name for some in self._by_phase.values() for one in some for name in one.metrics
            )
        )
        for name in names if names is not None else list(monitors) or known[:_MOST]:
            if name not in known and name not in monitors:
                what, none = "no checkpoint has this metric", "a metric of `save` or `report`"
                raise unknown(what, self._run.run_id, name, [*monitors, *known], none)
            yield from self._of_metric(name, monitors.get(name))

    @property
    def unit(self) -> str:
        """The unit of the positions; of steps the counter of the phases, if they have one."""
        if self._axis != "step":
            return "time (UTC)" if self._axis == "time" else self._axis
        counters = {self._run.spec.phase(phase).counter for phase in self._by_phase}
        return counters.pop() if len(counters) == 1 else "step"

    def gates(self) -> dict[str, Position]:
        """Return the position of each gate's checkpoint, by name."""
        drawn = {one.n: one for some in self._by_phase.values() for one in some}
        return {
            pin.name: self._position(drawn[pin.checkpoint])
            for pin in self._run.pins_of("gate")
            if pin.checkpoint in drawn
        }

    def phases(self) -> list[Span]:
        """Return the phases, if there are several and their positions do not overlap."""
        if len(self._by_phase) < 2:
            return []
        found = []
        for phase, records in self._by_phase.items():
            known = [self._position(one) for one in records]
            found.append(Span(phase_segment(phase), min(known), max(known)))
        overlap = any(b.first < a.last for a, b in pairwise(found))  # type: ignore[operator]
        return [] if overlap else found

    def _monitors(self, phase: str) -> tuple[Monitor, ...]:
        return self._run.spec.phase(phase).monitors

    def _of_metric(self, name: str, monitor: Monitor | None) -> Iterator[Curve]:
        value: Callable[[CheckpointRecord], float | None]
        if monitor is None:
            value = lambda record: record.metrics.get(name)  # noqa: E731 - one of two
        else:
            value = lambda record: monitor.value(record.metrics)  # noqa: E731
        for phase, records in self._by_phase.items():
            points = {
                one.n: Point(self._position(one), y, self._ref(one))
                for one in records
                for y in [value(one)]
                if y is not None
            }
            if not points:
                continue
            best = None
            for monitored in self._monitors(phase):
                if name in (monitored.label, monitored.metric):
                    found = self._run.own_best(monitored, phase)
                    best = points.get(found.n) if found is not None else None
            several = len(self._by_phase) > 1
            yield Curve(name, phase_segment(phase) if several else "", [*points.values()], best)

    def _position(self, record: CheckpointRecord) -> Position:
        match self._axis:
            case "step":
                return record.step
            case "time":
                return moment(record.time_ms)
            case "commit":
                return record.n

    def _ref(self, record: CheckpointRecord) -> str:
        return f"{self._run.run_id}/{step_ref(record)}"


def of_stream(
    name: str, entries: Sequence[Mapping[str, Any]], keys: Iterable[str] | None
) -> Iterator[Curve]:
    """Yield a curve over the steps for each key of a stream that has numbers."""
    found = numbers_by_key(entries)
    for key in found if keys is None else keys:
        if key not in found:
            what = "the stream has no numbers of this name"
            raise unknown(what, f"stream {name}", key, found)
        yield Curve(f"{name}/{key}", "", [Point(step, value) for step, value in found[key]])


def numbers_by_key(entries: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers of a stream by their keys, each with its step; NaN and infinities too."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for key, value in entry.items():
            if key != "step" and _is_number(value):
                found.setdefault(key, []).append((entry["step"], float(value)))
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 10**300
