"""Several runs side by side."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import config_by_path, json_ready, parent_ref
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.ui.charts import Chart, curves
from holdfast.registry.ui.pages.runs import RunRow, marked_row, row_of
from holdfast.registry.ui.pages.values import MOST_CHARTS, Saved, curves_of, metric_names, saved_of
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, trouble_of
from holdfast.registry.ui.source import Chronicle, Source
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import number

#: Maximum number of runs to compare.
MOST_RUNS = 20
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
    #: A chart for each metric of which a run has several values, with a curve for each run; at most
    #: `MOST_CHARTS`.
    charts: tuple[Chart, ...]
    metrics: int  # number of such metrics
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
    source: Source, names: Sequence[str], *, metric: str = "", within_s: float | None = None
) -> SideBySide:
    """Return some runs side by side: the requests of opening them.

    And one for each slot of the log of a run that evicted checkpoints, once: it has their metrics.
    """
    if len(names) > MOST_RUNS:
        raise InvalidInput(
            "too many runs for one page", expected=f"at most {MOST_RUNS}", found=len(names)
        )
    opened = source.runs(names)
    runs = [opened.runs[name].manifest for name in names if name in opened.runs]
    damage = Damage.of(source.registry.handle.store)
    troubles = [trouble_of(error) for error in opened.failed.values()]
    chronicles = _chronicles(source, [run.run_id for run in runs if run.evicted_count], within_s)
    saved: dict[str, tuple[Saved, ...]] = {}
    for run in runs:
        chronicle = chronicles.get(run.run_id, Chronicle())
        saved[run.run_id] = saved_of(run, chronicle.commits)
        troubles.extend(trouble_of(error) for error in chronicle.errors)
    config = list(_value_rows([_config(run) for run in runs]))
    environment = list(_value_rows([_environment(run) for run in runs]))
    curved = {
        name
        for ones in saved.values()
        for name, count in Counter(name for one in ones for name in one.metrics).items()
        if count > 1
    }
    return SideBySide(
        rows=tuple(marked_row(row_of(run), damage) for run in runs),
        charts=tuple(_charts(runs, saved, metric, curved)),
        metrics=len(curved),
        single=tuple(
            row
            for row in _value_rows([_values(saved.get(run.run_id, ())) for run in runs])
            if row.name not in curved
        ),
        settings=tuple(_value_rows([_settings(run) for run in runs])),
        config=tuple(row for row in config if any(row.differs)),
        same_config=sum(not any(row.differs) for row in config),
        environment=tuple(row for row in environment if any(row.differs)),
        same_environment=sum(not any(row.differs) for row in environment),
        pending=sum(one.pending > 0 for one in chronicles.values()),
        troubles=tuple(dict.fromkeys(troubles)),
    )


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
    saved: Mapping[str, tuple[Saved, ...]],
    wanted: str,
    curved: Container[str],
) -> Iterator[Chart]:
    first = [need for run in runs for monitor in run.monitors for need in monitor.needs]
    every = [one for found in saved.values() for one in found]
    names = [one for one in metric_names(every, first, matching=wanted) if one in curved]
    for metric in names[:MOST_CHARTS]:
        found = [
            curve for name, ones in saved.items() for curve in curves_of(ones, metric, prefix=name)
        ]
        yield curves(metric, found, overlays=True)


def _values(saved: Iterable[Saved]) -> dict[str, str]:
    return {name: number(value) for one in saved for name, value in one.metrics.items()}


def _value_rows(columns: Sequence[Mapping[str, Any]]) -> Iterator[ValueRow]:
    """Yield the values of each name, in the order in which the runs have the names."""
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, ABSENT) for column in columns]
        texts = tuple(None if value is ABSENT else _text(value) for value in values)
        yield ValueRow(name, texts, tuple(text != texts[0] for text in texts))


def _text(value: object) -> str:
    ready = json_ready(value)
    return ready if isinstance(ready, str) else json.dumps(ready, ensure_ascii=False)


def _config(run: RunManifest) -> Mapping[str, Any]:
    return {} if run.created is None else config_by_path(run.created.config)


def _environment(run: RunManifest) -> Mapping[str, Any]:
    return {} if run.created is None else run.created.environment


def _settings(run: RunManifest) -> Mapping[str, Any]:
    created = run.created
    parent = None if created is None else created.parent
    origin = parent and parent_ref(parent)
    found = {
        "preset": run.spec.name,
        "monitors": ", ".join(f"{one.label} ({one.mode})" for one in run.monitors),
        "seed": f"0x{created.seed}" if created else "",
        "forked from": origin,
        "input hash": created.input_hash if created else None,
    }
    return {name: value for name, value in found.items() if value}


def _ask(source: Source, asked: Asked) -> Shown:
    found = compare_runs(
        source, asked.texts("run"), metric=asked.text("metric"), within_s=asked.within_s
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
