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
from holdfast.registry.history.log_values import moment
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.history.step_names import phase_segment, step_ref
from holdfast.registry.spec.monitors import Monitor
from holdfast.registry.values.suggest import near

#: What the points are drawn over: the step within its phase, the time of the save in UTC, or the
#: number of the commit.
Axis = Literal["step", "time", "commit"]
Position = int | datetime
#: The most metrics that are drawn if none is named.
_MOST = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve.

    Attributes:
        x: Its position.
        y: Its value; NaN and infinities are gaps.
        ref: The checkpoint, or empty for an entry of a stream.
    """

    x: Position
    y: float
    ref: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of points.

    Attributes:
        name: The metric, or the stream and its key.
        phase: Its phase; empty if the run has only one, and for a stream.
        points: Its points, in the order of the log.
        best: The best point of a monitored metric.
    """

    name: str
    phase: str
    points: Sequence[Point]
    best: Point | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A phase.

    Attributes:
        phase: As in refs.
        first: Its first position.
        last: Its last one.
    """

    phase: str
    first: Position
    last: Position


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a run.

    Attributes:
        gates: The position of each gate's checkpoint, by name.
        phases: Its phases, if it has several and their positions do not overlap.
    """

    gates: Mapping[str, Position]
    phases: Sequence[Span]


class Curves:
    """The curves of a run.

    Args:
        run: The run.
        records: The checkpoints to draw.
        axis: What they are drawn over.

    Raises:
        InvalidInput: There is no such axis.
    """

    def __init__(self, run: RunManifest, records: Iterable[CheckpointRecord], axis: Axis) -> None:
        if axis not in get_args(Axis):
            expected = ", ".join(get_args(Axis))
            raise InvalidInput("not an axis", expected=expected, found=quoted(axis))
        self._run, self._axis = run, axis
        self._by_phase: dict[str, list[CheckpointRecord]] = {}
        for one in records:
            self._by_phase.setdefault(one.phase, []).append(one)

    def of_metrics(self, names: Iterable[str] | None) -> Iterator[Curve]:
        """Yield a curve for each metric and phase that has values.

        Args:
            names: Metrics, or monitors by their label. Default: the run's monitors; without any,
                the first metrics.

        Raises:
            NotFound: No checkpoint has such a metric.
        """
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
    """Yield a curve over the steps for each key of a stream that has numbers.

    Args:
        name: Of the stream.
        entries: Its entries.
        keys: The wanted keys. Default: all that have numbers.

    Raises:
        NotFound: No entry has a number at a wanted key.
    """
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
