"""Curves of a run: metrics by checkpoint and numbers of streams, and the marks on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, get_args

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.history import moment, phase_segment, step_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.spec import Monitor
from holdfast.registry.values import near

#: The axis of the points: the step within its phase, the time of the save in UTC, or the
#: number of the commit.
Axis = Literal["step", "time", "commit"]
Position = int | datetime
#: The most metrics that are drawn if none is named.
_MOST = 8


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


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a run."""

    gates: Mapping[str, Position]  # the position of each gate's checkpoint, by name
    phases: Sequence[Span]  # its phases, if it has several and their positions do not overlap


class Curves:
    """The curves of a run."""

    def __init__(self, run: RunManifest, records: Iterable[CheckpointRecord], axis: Axis) -> None:
        if axis not in get_args(Axis):
            expected = ", ".join(get_args(Axis))
            raise InvalidInput("not an axis", expected=expected, found=quoted(axis))
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
                raise NotFound(
                    "no checkpoint has this metric",
                    where=f"{self._run.run_id}: {name}",
                    expected=", ".join([*monitors, *known]) or "a metric of `save` or `report`",
                    hint=near(name, [*monitors, *known]),
                )
            yield from self._of_metric(name, monitors.get(name))

    @property
    def unit(self) -> str:
        """The unit of the positions; of steps the counter of the phases, if they have one."""
        if self._axis != "step":
            return "time (UTC)" if self._axis == "time" else self._axis
        counters = {self._run.spec.phase(phase).counter for phase in self._by_phase}
        return counters.pop() if len(counters) == 1 else "step"

    def marks(self) -> Marks:
        """Return the gates and phases."""
        pins = self._run.pins_of("gate")
        drawn = {one.n: one for some in self._by_phase.values() for one in some}
        gates = {
            pin.name: self._position(drawn[pin.checkpoint])
            for pin in pins
            if pin.checkpoint in drawn
        }
        return Marks(gates, self._spans())

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
                    found = self._run.best(monitored, phase)
                    best = points.get(found.n) if found is not None else None
            several = len(self._by_phase) > 1
            yield Curve(name, phase_segment(phase) if several else "", [*points.values()], best)

    def _spans(self) -> list[Span]:
        if len(self._by_phase) < 2:
            return []
        found = []
        for phase, records in self._by_phase.items():
            known = [self._position(one) for one in records]
            found.append(Span(phase_segment(phase), min(known), max(known)))
        overlap = any(b.first < a.last for a, b in pairwise(found))  # type: ignore[operator]
        return [] if overlap else found

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
            raise NotFound(
                "the stream has no numbers of this name",
                where=f"stream {name}: {key}",
                expected=", ".join(found) or None,
                hint=near(key, found),
            )
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


def is_gap(value: float) -> bool:
    """Return whether a value cannot be drawn."""
    return not math.isfinite(value)
