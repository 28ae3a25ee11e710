"""Several runs side by side."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.registry.comparing import Ranking, rank_config
from holdfast.registry.curation.streams import SAMPLES
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import config_by_path, json_ready, parent_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.ui.charts import (
    MOST_POINTS,
    Chart,
    Curve,
    Point,
    curves,
    fields_chart,
    table,
)
from holdfast.registry.ui.pages.fields import (
    Choices,
    band_of,
    choices_of,
    differing,
    space_of,
    text_of,
)
from holdfast.registry.ui.pages.runs import (
    RunRow,
    check_columns,
    columns_of,
    list_runs,
    marked_row,
    read_fields,
    row_of,
)
from holdfast.registry.ui.pages.streams import logged_curves
from holdfast.registry.ui.pages.view import (
    MOST_CHARTS,
    Asked,
    Shown,
    Trouble,
    View,
    curves_of,
    metric_names,
    saved_of,
    trouble_of,
)
from holdfast.registry.ui.source import Chronicle, Source
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import number

#: Maximum number of runs to compare.
MOST_RUNS = 100
#: Up to so many runs each is a column of a table of values.
_MOST_VALUES = 10
#: Stands for a value that a run does not have.
ABSENT = object()


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A value of several runs."""

    name: str  # its name or path
    values: tuple[str | None, ...]  # its value in each run; `None` where a run has no such value
    differs: tuple[bool, ...]  # for each run, whether its value differs from the first run's


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Runs side by side."""

    rows: tuple[RunRow, ...]  # the runs, in the order in which they were chosen
    columns: tuple[str, ...]  # fields that have a column
    choices: Choices  # fields that the runs can be grouped by
    space: Mapping[str, Any]  # the runs by their fields, for charts
    #: Keys of the configurations by how strongly they go with the metric of most runs, or why they
    #: are not ranked; `None` if the configurations do not differ.
    ranking: Ranking | InvalidInput | None
    fields: tuple[Chart, ...]  # charts of fields; none if the configurations do not differ
    #: A chart for each metric of which a run has several values, with a curve for each run; at most
    #: `MOST_CHARTS`.
    charts: tuple[Chart, ...]
    metrics: int  # number of such metrics
    logged: tuple[Chart, ...]  # the same of the fields of those streams that were asked for
    streams: tuple[str, ...]  # the streams that can be asked for
    single: tuple[ValueRow, ...]  # metrics with at most one value in each run
    settings: tuple[ValueRow, ...]  # seed, preset, origin and the like
    config: tuple[ValueRow, ...]  # values of the configurations that differ
    same_config: int  # how many values of the configurations are equal
    environment: tuple[ValueRow, ...]  # values of the environments that differ
    same_environment: int  # how many are equal
    pending: int  # runs whose logs are still being read
    troubles: tuple[Trouble, ...]  # parts that could not be read

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the runs."""
        return tuple(row.name for row in self.rows)


def compare_runs(
    source: Source,
    names: Sequence[str],
    *,
    metric: str = "",
    columns: Sequence[str] | None = None,
    group: str = "",
    streams: Sequence[str] = (),
    within_s: float | None = None,
) -> SideBySide:
    """Return some runs side by side: the requests of opening them.

    And one for each slot of the log of a run that evicted checkpoints, once: it has their metrics.
    With `group` the charts have the mean of the runs with each value of this field. `streams` adds
    charts of streams, for two or three requests a segment.
    """
    check_columns(columns or ())
    if len(names) > MOST_RUNS:
        raise InvalidInput(
            "too many runs for one page", expected=f"at most {MOST_RUNS}", found=len(names)
        )
    opened = source.runs(names)
    runs = [opened.runs[name].manifest for name in names if name in opened.runs]
    damage = Damage.of(source.registry.handle.store)
    troubles = [trouble_of(error) for error in opened.failed.values()]
    chronicles = _chronicles(source, [run.run_id for run in runs if run.evicted_count], within_s)
    saved: dict[str, tuple[CheckpointRecord, ...]] = {}
    for run in runs:
        chronicle = chronicles.get(run.run_id, Chronicle())
        saved[run.run_id] = saved_of(run, chronicle.commits)
        troubles.extend(trouble_of(error) for error in chronicle.errors)
    config = list(_value_rows([config_by_path(run.config) if run.created else {} for run in runs]))
    made = [run.created.environment if run.created else {} for run in runs]
    environment = list(_value_rows(made))
    values = [
        {name: number(value) for one in saved[run.run_id] for name, value in one.metrics.items()}
        for run in runs
    ]
    curved = {
        name
        for ones in saved.values()
        for name, count in Counter(name for one in ones for name in one.metrics).items()
        if count > 1
    }
    fields = read_fields(source.registry.handle.store, opened, ("min.",))
    rows = tuple(
        replace(marked_row(row_of(run), damage), fields=fields[run.run_id]) for run in runs
    )
    metrics = {row.metric for row in rows if row.metric}
    axes, space = space_of(
        [(row.name, {**row.fields, "best": row.best}) for row in rows],
        metrics.pop() if len(metrics) == 1 else "",
    )
    logged = logged_curves(source, list(opened.runs.values()), streams, troubles)
    shown = rows if len(rows) <= _MOST_VALUES else ()
    groups = {name: text_of(one.get(group)) for name, one in fields.items()} if group else {}
    return SideBySide(
        rows=rows,
        columns=differing([one.fields for one in rows]) if columns is None else tuple(columns),
        choices=choices_of(row.fields for row in rows),
        space=space,
        ranking=_ranking(runs) if any(any(row.differs) for row in config) else None,
        fields=tuple(_fields_charts(axes, space)) if len(rows) > 1 and axes else (),
        charts=tuple(_charts(runs, saved, metric, curved, groups)),
        metrics=len(curved),
        logged=tuple(
            curves(title, list(_means(some, groups)) if groups else some)
            for title, some in logged.items()
            if metric.lower() in title.lower()
        )[:MOST_CHARTS],
        streams=tuple(
            dict.fromkeys(one.name for run in runs for one in run.streams if one.name != SAMPLES)
        ),
        single=tuple(row for row in _value_rows(values) if row.name not in curved and shown),
        settings=tuple(_value_rows([_settings(run) for run in runs])) if shown else (),
        config=tuple(row for row in config if any(row.differs)) if shown else (),
        same_config=sum(not any(row.differs) for row in config),
        environment=tuple(row for row in environment if any(row.differs)) if shown else (),
        same_environment=sum(not any(row.differs) for row in environment),
        pending=sum(one.pending > 0 for one in chronicles.values()),
        troubles=tuple(dict.fromkeys(troubles)),
    )


def _ranking(runs: Sequence[RunManifest]) -> Ranking | InvalidInput:
    try:
        return rank_config(runs)
    except InvalidInput as error:
        return error


def _chronicles(
    source: Source, names: Sequence[str], within_s: float | None
) -> dict[str, Chronicle]:
    """Return the chronicles of runs, read at once."""
    until = None if within_s is None else time.monotonic() + within_s
    for name in names:
        source.begin_chronicle(name)
    found = {}
    for name in names:
        left = None if until is None else max(0.0, until - time.monotonic())
        found[name] = source.chronicle(name, within_s=left)
    return found


def _charts(
    runs: Sequence[RunManifest],
    saved: Mapping[str, tuple[CheckpointRecord, ...]],
    wanted: str,
    curved: Container[str],
    groups: Mapping[str, str],
) -> Iterator[Chart]:
    first = [need for run in runs for monitor in run.monitors for need in monitor.needs]
    every = [one for found in saved.values() for one in found]
    names = [one for one in metric_names(every, first, matching=wanted) if one in curved]
    for metric in names[:MOST_CHARTS]:
        found = [
            curve for name, ones in saved.items() for curve in curves_of(ones, metric, prefix=name)
        ]
        shown = list(_means(found, groups)) if groups else found
        yield curves(metric, shown, began_ms={run.run_id: run.created_ms for run in runs})


def _means(found: Iterable[Curve], groups: Mapping[str, str]) -> Iterator[Curve]:
    """Yield the mean of the curves of each group, with a band of one standard deviation."""
    own = (
        (groups[one.group], {point.step: point.value for point in one.points})
        for one in found
        if not one.is_faint
    )
    for group, count, every in band_of(own):
        points = every[:: math.ceil(len(every) / MOST_POINTS) or 1]
        name = f"{group or 'absent'} ({count})"
        band = tuple((mean - spread, mean + spread) for _, mean, spread in points)
        yield Curve(name, tuple(Point(step, None, mean) for step, mean, _ in points), band=band)


def _fields_charts(axes: Sequence[str], space: Mapping[str, Any]) -> Iterator[Chart]:
    rows = [(one["name"], *(one["values"][name] for name in axes)) for one in space["runs"]]
    shown = table(("run", *(one["label"] for one in space["fields"])), rows)
    yield fields_chart("parallel", "Each run as a line through its values", shown)
    yield fields_chart("scatter", "Each run as a point", shown)


def _value_rows(columns: Sequence[Mapping[str, Any]]) -> Iterator[ValueRow]:
    """Yield the values of each name, in the order in which the runs have the names."""
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, ABSENT) for column in columns]
        texts = tuple(None if value is ABSENT else _text(value) for value in values)
        yield ValueRow(name, texts, tuple(text != texts[0] for text in texts))


def _text(value: object) -> str:
    ready = json_ready(value)
    return ready if isinstance(ready, str) else json.dumps(ready, ensure_ascii=False)


def _settings(run: RunManifest) -> Mapping[str, Any]:
    created = run.created
    parent = None if created is None else created.parent
    origin = parent and parent_ref(parent)
    found = {
        "preset": run.spec.name,
        "monitors": ", ".join(f"{one.label} ({one.mode})" for one in run.monitors),
        "master seed": f"0x{created.seed}" if created else "",
        "forked from": origin,
        "input hash": created.input_hash if created else None,
    }
    return {name: value for name, value in found.items() if value}


def _ask(source: Source, asked: Asked) -> Shown:
    names = asked.texts("run")
    if asked.text("all"):
        every = list_runs(
            source, count=MOST_RUNS + 1, matching=asked.text("q"), where=asked.text("where")
        )
        names = tuple(row.name for row in every.rows)
    found = compare_runs(
        source,
        names,
        metric=asked.text("metric"),
        columns=columns_of(asked),
        group=asked.text("group"),
        streams=asked.texts("stream"),
        within_s=asked.within_s,
    )
    return Shown(
        title="Runs side by side",
        body=found,
        troubles=found.troubles,
        live={row.name: row.commits for row in found.rows if row.is_live},
        is_partial=found.pending > 0,
    )


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return [Asked(query={"run": runs})] if len(runs) > 1 else ()


VIEW = View(
    "side_by_side", "Side by side", "/compare-runs", "side_by_side.html", _ask, parts=_parts
)
