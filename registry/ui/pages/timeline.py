"""The history of a run: its checkpoints as rows, and a chart of events over bands of phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.history import has_policies, plan_retention, step_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.ui.charts import Chart, Moment, figure, table
from holdfast.registry.ui.pages.events import Event, Lane
from holdfast.registry.ui.pages.runs import monitor_of
from holdfast.registry.ui.source import now_ms
from holdfast.registry.upkeep import Damage

#: Lanes from bottom to top, with their names.
_LANES: dict[Lane, str] = {
    "pool": "pool",
    "retention": "retention",
    "trainer": "trainer",
    "phases": "phases",
    "names": "gates, releases, forks",
    "checkpoints": "checkpoints",
}
#: Up to so many events of a kind have marks of full size.
_CROWD = 40
#: The look of checkpoints by their state.
_STATES = {
    "kept": {"symbol": "circle", "color": "var(--accent)", "size": 9},
    "best": {"symbol": "star", "color": "var(--accent)", "size": 13},
    "dropped": {"symbol": "circle-open", "color": "var(--bad)", "size": 9},
    "evicted": {"symbol": "circle-open", "color": "var(--muted)", "size": 9},
    "superseded": {"symbol": "x-thin-open", "color": "var(--muted)", "size": 9},
}
#: Symbol and colour of other events by their kind; of all others a circle.
_SYMBOLS = {
    "gate": ("diamond", "var(--good)"),
    "release": ("star-diamond", "var(--good)"),
    "latest release": ("star-diamond-open", "var(--good)"),
    "tag": ("triangle-down", "var(--good)"),
    "artifact": ("hexagon", "var(--good)"),
    "transition": ("triangle-right", "var(--second)"),
    "warm start": ("triangle-right-open", "var(--second)"),
    "pivot": ("triangle-left", "var(--second)"),
    "begin": ("circle-open-dot", "var(--second)"),
    "status": ("square", "var(--second)"),
    "restore": ("arrow-left", "var(--warn)"),
    "take over": ("cross", "var(--warn)"),
    "fork": ("triangle-up", "var(--second)"),
    "fork to": ("triangle-up-open", "var(--second)"),
    "evict": ("circle-open", "var(--muted)"),
    "bring back": ("circle", "var(--good)"),
    "promote": ("triangle-up", "var(--accent)"),
    "match": ("hourglass", "var(--second)"),
    "drop": ("x", "var(--bad)"),
}
#: Characters that look like the symbols.
_GLYPHS = {
    "arrow-left": "◂",
    "circle": "●",
    "circle-open": "○",
    "circle-open-dot": "◉",
    "cross": "✚",
    "diamond": "◆",
    "hexagon": "⬢",
    "hourglass": "⧗",
    "square": "■",
    "star": "★",
    "star-diamond": "✦",
    "star-diamond-open": "✧",
    "triangle-down": "▼",
    "triangle-left": "◀",
    "triangle-right": "▶",
    "triangle-right-open": "▷",
    "triangle-up": "▲",
    "triangle-up-open": "△",
    "x": "✖",
    "x-thin-open": "✕",
}
_HOVER = "%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>"


def timeline(events: Sequence[Event], rows: Sequence[CheckpointRow]) -> Chart:
    """Return the time line; hovering over a checkpoint shows why it stays or was evicted."""
    told = [one for one in events if one.lane in _LANES and one.lane != "checkpoints"]
    used = {one.lane for one in told} | ({"checkpoints"} if rows else set())
    lanes = [lane for lane in _LANES if lane in used]
    traces = [*_checkpoints(rows), *_others(told)]
    layout = {
        "xaxis": {"type": "date", **_range(told, rows)},
        "yaxis": {
            "type": "category",
            "categoryarray": [_LANES[lane] for lane in lanes],
            "categoryorder": "array",
            "range": [-0.6, len(lanes) - 0.4],
            "fixedrange": True,
        },
        "shapes": list(_bands(rows)),
        "annotations": list(_names(rows)),
        "showlegend": False,
    }
    listed = [
        (
            Moment(one.time_ms),
            _LANES.get(one.lane, one.lane),
            one.kind,
            one.subject,
            one.reason,
            one.author,
        )
        for one in events
        if one.lane in _LANES
    ]
    looks = [(one["marker"]["symbol"], one["marker"]["color"], one["name"]) for one in traces]
    key = [(_GLYPHS[symbol], colour[len("var(--") : -1], name) for symbol, colour, name in looks]
    return figure(
        "Time line",
        f"{len(rows)} checkpoints and {len(told)} other events by time",
        traces,
        layout,
        table(("time", "lane", "event", "of", "reason", "by"), listed[::-1]),
        height_px=90 + 36 * len(lanes),
        key=key,
    )


def _range(events: Iterable[Event], rows: Iterable[CheckpointRow]) -> dict[str, Any]:
    """Return the time of the run itself as the range, if much later forks would squeeze it."""
    forks = [one.time_ms for one in events if one.kind == "fork to"]
    times = [row.saved.time_ms for row in rows]
    times += [one.time_ms for one in events if one.kind != "fork to"]
    if not forks or not times:
        return {}
    first, last = min(times), max(times)
    if max(forks) - last < (last - first) / 2:
        return {}
    margin = max((last - first) // 30, 1000)
    return {"range": [first - margin, last + margin]}


def _checkpoints(rows: Sequence[CheckpointRow]) -> Iterator[dict[str, Any]]:
    """Yield the checkpoints of each state, the best ones apart."""
    for state, look in _STATES.items():
        found = [row for row in rows if _state(row) == state]
        if not found:
            continue
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": state,
            "x": [row.saved.time_ms for row in found],
            "y": [_LANES["checkpoints"]] * len(found),
            "marker": look,
            "customdata": [
                [row.ref, f"{row.state}: {row.reason}".rstrip(": "), ", ".join(row.marks)]
                for row in found
            ],
            "hovertemplate": _HOVER,
        }


def _state(row: CheckpointRow) -> str:
    return "best" if "best" in row.marks else row.state


def _others(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Yield the events of each kind."""
    counts = Counter(one.kind for one in events)
    for kind, count in sorted(counts.items(), key=lambda one: one[1] <= _CROWD):
        found = [one for one in events if one.kind == kind]
        symbol, colour = _SYMBOLS.get(kind, ("circle", "var(--second)"))
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "x": [one.time_ms for one in found],
            "y": [_LANES[one.lane] for one in found],
            # A crowd, such as the matches of a pool, lies small and pale below the others.
            "marker": {"symbol": symbol, "color": colour, "size": 10 if count <= _CROWD else 5},
            "opacity": 1 if count <= _CROWD else 0.4,
            "customdata": [
                [
                    f"{one.kind} {one.subject}",
                    one.reason,
                    f"commit {one.n}, {one.author}" if one.author else "",
                ]
                for one in found
            ],
            "hovertemplate": _HOVER,
        }


def _spans(rows: Sequence[CheckpointRow]) -> list[tuple[str, int, int]]:
    """Return the phases in the order of training, each with its first and last time."""
    found = []
    for phase, group in groupby(rows, key=lambda row: row.saved.phase):
        times = [row.saved.time_ms for row in group]
        found.append((phase, min(times), max(times)))
    return found


def _bands(rows: Sequence[CheckpointRow]) -> Iterator[dict[str, Any]]:
    spans = _spans(rows)
    for index, (_, start, end) in enumerate(spans):
        until = spans[index + 1][1] if index + 1 < len(spans) else end
        yield {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": start,
            "x1": until,
            "y0": 0,
            "y1": 1,
            "fillcolor": "var(--band)" if index % 2 == 0 else "var(--band-2)",
            "line": {"width": 0},
            "layer": "below",
        }


def _names(rows: Sequence[CheckpointRow]) -> Iterator[dict[str, Any]]:
    for phase, start, _ in _spans(rows):
        yield {
            "x": start,
            "y": 1,
            "xref": "x",
            "yref": "paper",
            "text": phase,
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "bottom",
        }


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint of the run."""

    ref: str  # its name within the run
    saved: CheckpointRecord  # its record from the log
    state: str  # `kept`, `dropped`, `evicted` or `superseded`
    reason: str  # why it stays or was evicted
    marks: tuple[str, ...]  # names that point at it
    value: float | None  # its value of the run's listed metric


def read_rows(
    saved: Sequence[CheckpointRecord],
    events: Iterable[Event],
    run: RunManifest | None,
    damage: Damage,
) -> Iterable[CheckpointRow]:
    """Yield the checkpoints in log order; `run` is `None` if it cannot be read."""
    went = {one.checkpoint: one for one in events if one.lane == "retention"}
    stays = {} if run is None else _reasons(run)
    marks = {} if run is None else _marks(run, damage)
    monitor = None if run is None else monitor_of(run)
    for one in saved:
        last = went.get(one.n)
        is_evicted = last is not None and last.kind == "evict"
        state = "evicted" if is_evicted else "superseded" if one.superseded else "kept"
        if run is not None and run.dropped is not None and state == "kept":
            state = "dropped"
        reason = last.reason if last is not None and is_evicted else stays.get(one.n, "")
        yield CheckpointRow(
            ref=step_ref(one),
            saved=one,
            state=state,
            reason=reason,
            marks=tuple(mark for mark in marks.get(one.n, ()) if mark not in (state, "evicted")),
            value=None if monitor is None else monitor.measured(one.metrics),
        )


def _marks(run: RunManifest, damage: Damage) -> dict[int, list[str]]:
    """Return the names that point at each checkpoint, its releases, and whether it is damaged."""
    found = checkpoint_marks(run)
    for record in run.checkpoints:
        if damage.marks(run.run_id, record):
            found.setdefault(record.n, []).insert(0, "damaged")
    for pin in run.pins_of("release"):
        if pin.checkpoint is not None:
            found.setdefault(pin.checkpoint, []).append(pin.ref)
    return found


def _reasons(run: RunManifest) -> dict[int, str]:
    """Return why the run keeps its checkpoints, by the numbers of their commits."""
    if run.dropped is not None:
        return {one.n: "the run was dropped" for one in run.checkpoints}
    if not has_policies(run.spec):
        return {one.n: "no retention policy: everything stays" for one in run.checkpoints}
    plan = plan_retention(run, now_ms())
    kept = {one.checkpoint.n: "; ".join(one.reasons) for one in plan.kept}
    going = {
        one.checkpoint.n: f"goes with the next save: {'; '.join(one.reasons)}"
        for one in plan.evicted
    }
    return kept | going
