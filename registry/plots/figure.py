"""The curves of a run as a figure of Plotly.

Plotly reads a part of HTML in texts, and `%{...}` in templates: names from a store are escaped, and
never part of a template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

from holdfast.registry.curation.streams import Stream
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import RunLog
from holdfast.registry.plots.curves import Axis, Curve, Curves, Marks, Point, is_gap, of_stream
from holdfast.registry.values import text
from holdfast.registry.writing import Committer

#: Streams by name, each with the wanted keys; or names alone.
StreamKeys = str | Iterable[str] | Mapping[str, str | Iterable[str]]

_HOVER = "%{customdata}<br>%{x}: %{y}<extra></extra>"
_SHADE = "rgba(128, 128, 128, 0.12)"
_LINE = "rgba(128, 128, 128, 0.8)"


def plot_run(
    committer: Committer,
    metrics: str | Iterable[str] | None,
    *,
    streams: StreamKeys | None,
    phase: str | None,
    x: Axis,
    history: bool,
) -> Any:
    """Return a figure of a run; see `Run.plot`."""
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
    _mark(figure, curves.marks())
    figure.update_layout(
        title_text=text(committer.log.run_id),
        xaxis_title_text=text(curves.unit),
        yaxis_title_text=text(drawn[0].name) if len({one.name for one in drawn}) == 1 else "",
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
        yield from of_stream(name, Stream(committer, name).read(), wanted)


def _line(graph: Any, curve: Curve, colour: str | None) -> Any:
    label = _label(curve)
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
    return None if is_gap(point.y) else point.y


def _label(curve: Curve) -> str:
    return text(f"{curve.name} ({curve.phase})" if curve.phase else curve.name)


def _mark(figure: Any, marks: Marks) -> None:
    """Draw phases as bands, and gates as dotted lines, each with its name."""
    for number, span in enumerate(marks.phases):
        if number % 2 == 0:
            band = {"type": "rect", "line_width": 0, "fillcolor": _SHADE, "layer": "below"}
            figure.add_shape(x0=span.first, x1=span.last, y0=0, y1=1, yref="paper", **band)
        _write(figure, span.first, span.phase, y=0, yanchor="bottom")
    for name, x in marks.gates.items():
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
            hint="Install it with: pip install 'holdfast[ui]'",
        ) from error
    return graph_objects
