"""Runs, checkpoints and stream entries as Arrow tables, for pandas, Polars, DuckDB and others.

A column has a name, a type and a description; times are UTC in microseconds. pyarrow (the extra
`pyarrow`) is imported when a table is made.

It only reads. docs/notebooks.md documents the columns, and a test compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from holdfast.backends.errors import install_extra
from holdfast.registry.errors import InvalidInput, RegistryError, StoreUnavailable
from holdfast.registry.history import (
    Made,
    RunLog,
    Summaries,
    decode_plain,
    json_ready,
    moment,
    parent_ref,
    step_ref,
)
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.store import Store
from holdfast.registry.values import Filter

#: Form of the kept fields of a run; raise it with `RUN_COLUMNS` and `run_fields`.
_FORM = 6
#: `time` is `timestamp[us, tz=UTC]`.
Type = Literal["bool", "int64", "float64", "string", "time"]
_INT64 = range(-(2**63), 2**63)
#: Integers that float64 holds exactly.
_EXACT = range(-(2**53), 2**53 + 1)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    type: Type  # its type. Every column may have nulls.
    about: str  # what it holds, with its unit. The field's metadata have it as `description`.


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, object]]) -> Any:
    """Return rows as a `pyarrow.Table`; what a row lacks is null."""
    pa = arrow()
    types = {
        "bool": pa.bool_(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "string": pa.string(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    fields = [
        pa.field(one.name, types[one.type], metadata={"description": one.about}) for one in columns
    ]
    kept = list(rows)
    arrays = [pa.array([_cell(row, one) for row in kept], types[one.type]) for one in columns]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _cell(row: Mapping[str, object], column: Column) -> object:
    found = row.get(column.name)
    return ", ".join(found) if isinstance(found, tuple | list) else found


def arrow() -> Any:
    """Return the package pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise InvalidInput(
            "this needs the package pyarrow",
            found=error,
            hint=install_extra("pyarrow"),
        ) from error
    return pa


CHECKPOINT_COLUMNS = (
    Column("commit", "int64", "number of the commit that added it: the order of the log"),
    Column("phase", "string", "name of the phase, or its number as digits"),
    Column("step", "int64", "training step, update or epoch, counted within the phase"),
    Column("time", "time", "when it was saved, by the trainer's clock"),
    Column("ref", "string", "a ref that finds it; null if it is evicted"),
    Column("id", "string", "its id: sha256: and 64 hexadecimal digits"),
    Column("tier", "string", "retention class within the phase"),
    Column("size_bytes", "int64", "bytes of all its tensors"),
    Column("superseded", "bool", "whether training went back to an earlier checkpoint"),
    Column("evicted", "string", "the reason of its eviction; null while it is kept"),
)
#: Before the name of a metric that would be another column.
_PREFIX = "metrics."


def checkpoint_table(run_id: str, records: Iterable[CheckpointRecord]) -> Any:
    """Return checkpoints as a `pyarrow.Table`."""
    kept = list(records)
    names = dict.fromkeys(name for one in kept for name in one.metrics)
    metrics = [Column(metric_column(name), "float64", f"metric {name}") for name in names]
    return table((*CHECKPOINT_COLUMNS, *metrics), _rows(run_id, kept))


def metric_column(name: str) -> str:
    """Return the name of a metric's column; no two columns have the same.

    It is the metric's own name, after `metrics.` if another column has that name, or if it begins
    with `metrics.` itself.
    """
    is_taken = name in {one.name for one in CHECKPOINT_COLUMNS} or name.startswith(_PREFIX)
    return _PREFIX + name if is_taken else name


def _rows(run_id: str, records: Iterable[CheckpointRecord]) -> Iterator[dict[str, object]]:
    for one in records:
        name = step_ref(one)
        if one.superseded:
            name = one.manifest.short
        yield {
            **{metric_column(metric): value for metric, value in one.metrics.items()},
            "commit": one.n,
            "phase": one.phase,
            "step": one.step,
            "time": moment(one.time_ms),
            "ref": f"{run_id}/{name}" if one.evicted is None else None,
            "id": str(one.manifest),
            "tier": one.tier,
            "size_bytes": one.size_bytes,
            "superseded": one.superseded,
            "evicted": one.evicted,
        }


RUN_COLUMNS = (
    Column("run", "string", "its name"),
    Column(
        "status",
        "string",
        "running, interrupted, completed, failed, forked, merged, dropped or damaged",
    ),
    Column("error", "string", "why it cannot be read, or why it was dropped"),
    Column("phase", "string", "the phase that training is in"),
    Column("preset", "string", "the name of its preset"),
    Column("parent", "string", "the checkpoint that it was forked from"),
    Column("created", "time", "when it was created, by its author's clock"),
    Column("checkpoints", "int64", "kept checkpoints of the current line of training"),
    Column("evicted", "int64", "checkpoints that were evicted"),
    Column("superseded", "int64", "checkpoints that are superseded"),
    Column("size_bytes", "int64", "tensor bytes of its checkpoints; shared ones count each time"),
    Column("latest_step", "int64", "step of the latest checkpoint"),
    Column("latest_time", "time", "when that was saved, by the trainer's clock"),
    Column("monitor", "string", "the metric, or sum of metrics, that decides the best"),
    Column("best", "float64", "the best value of the monitor; of a fork among its own checkpoints"),
    Column("best_step", "int64", "step of the checkpoint that has it"),
    Column("owner", "string", "its owner, by default the user who created it"),
    Column("project", "string", "what it belongs to"),
    Column("labels", "string", "its labels, with commas between them"),
    Column("tags", "string", "its tags, with commas between them"),
    Column("releases", "string", "the versions of its releases, with commas between them"),
    Column("seed", "string", "the master seed: 0x and 16 hexadecimal digits"),
    Column("config", "string", "the configuration as JSON"),
)


@dataclass(frozen=True, slots=True)
class RunChoice:
    """Which runs of a registry a table, a list or a page shows."""

    where: str = ""  # a filter of their fields
    since_s: float | None = None  # only those with a save in the last `since_s` seconds
    limit: int | None = None  # only the `limit` runs with the newest saves

    def __post_init__(self) -> None:
        """Refuse a filter that is none."""
        Filter.parse(self.where)

    @property
    def fields(self) -> Sequence[str]:
        """The fields that the filter names."""
        return tuple(Filter.parse(self.where).fields)

    def fits(self, row: Mapping[str, object]) -> bool:
        """Return whether a row fits the filter."""
        return Filter.parse(self.where).test(row)

    def of(self, rows: Iterable[dict[str, object]]) -> list[dict[str, object]]:
        """Return the rows that it has, of `run_fields` and `damaged_fields`, in their order."""
        kept = Filter.parse(self.where).of(rows)
        if self.since_s is not None:
            first = datetime.now(UTC) - timedelta(seconds=self.since_s)
            kept = [row for row in kept if _saved(row) >= first]
        if self.limit is not None and len(kept) > self.limit:
            newest = sorted(kept, key=_saved, reverse=True)[: self.limit]
            chosen = {str(row["run"]) for row in newest}
            kept = [row for row in kept if row["run"] in chosen]
        return kept  # type: ignore[return-value]


def run_table(
    store: Store,
    names: Iterable[str],
    read: Callable[[str], RunLog],
    choice: RunChoice = RunChoice(),
    *,
    max_age_s: float = 0,
) -> Any:
    """Return the runs of a choice as a `pyarrow.Table`; several are read at once."""

    def make(name: str, noted: RunLog | None) -> Made:
        try:
            log = noted or read(name)
            return Made(kept_fields(log), log) if log.run.commits else Made(None)
        except StoreUnavailable:
            raise  # the other runs would fail in the same way
        except RegistryError as error:
            return Made(damaged_fields(name, error))

    kept = Summaries(store, store.heads, "fields", _FORM).read([*names], make, max_age_s=max_age_s)
    rows = choice.of(fields_of(one) for one in kept.values() if one is not None)
    columns, made = _config_columns(rows)
    return table((*RUN_COLUMNS, *columns), made)


def _config_columns(
    rows: Sequence[Mapping[str, object]],
) -> tuple[list[Column], list[dict[str, object]]]:
    """Return a column for each number and text of the configurations, and the rows with them."""
    # Out of the JSON: a metric may be named like a value of the configuration.
    read = (_leaves(json.loads(str(row.get("config") or "null"))) for row in rows)
    configs = [{path: one for path, one in some if not isinstance(one, list)} for some in read]
    columns, made = [], [dict(row) for row in rows]
    for path in dict.fromkeys(path for one in configs for path in one):
        name, values = f"config.{path}", [one.get(path) for one in configs]
        columns.append(_fill(made, name, values, f"{path} of the configuration"))
    return columns, made


def _saved(row: Mapping[str, object]) -> datetime:
    """Return when a run was saved to last, or created. A damaged run is always shown: now."""
    found = row.get("latest_time") or row.get("created")
    return found if isinstance(found, datetime) else datetime.now(UTC)


def run_fields(
    log: RunLog, *, with_owner: bool = True, with_extremes: bool = True
) -> dict[str, object]:
    """Return the fields of an open run, for filters; its owner may take a request.

    Its columns, `name`, each number and text of its configuration (`lr`, `optimizer.lr`) and each
    metric of its best checkpoint, or without a monitor of its latest. Where two have one name the
    column comes before the configuration, and that before the metric; `config.NAME` and
    `metrics.NAME` name the others. `last.NAME` is the metric of the latest checkpoint that has it,
    `min.NAME` and `max.NAME` are its extremes over the checkpoints, without NaN.
    """
    run = log.run
    try:
        columns = _row(run) | ({"owner": log.owner()} if with_owner else {})
    except RegistryError as error:
        return damaged_fields(run.run_id, error)
    shown = run.own_best() if run.monitors else run.latest()
    metrics = {} if shown is None else dict(shown.metrics)
    config = {key: one for key, one in config_of(run).items() if not isinstance(one, list)}
    return {
        **metrics,
        **config,
        **{f"metrics.{name}": value for name, value in metrics.items()},
        **{f"config.{name}": value for name, value in config.items()},
        **_summaries(run.live(), with_extremes=with_extremes),
        "name": run.run_id,
        **columns,
    }


def config_of(run: RunManifest) -> dict[str, Any]:
    """Return the values of a run's configuration by dotted path; lists are one value each."""
    return dict(_leaves(json_ready(decode_plain(run.config)))) if run.created else {}


def _summaries(live: Sequence[CheckpointRecord], *, with_extremes: bool) -> dict[str, float]:
    """Return the last value of each metric, and its extremes."""
    found: dict[str, float] = {}
    for one in live if with_extremes else live[-1:]:
        for name, value in one.metrics.items():
            found[f"last.{name}"] = value
            if with_extremes and not math.isnan(value):
                found[f"min.{name}"] = min(value, found.get(f"min.{name}", value))
                found[f"max.{name}"] = max(value, found.get(f"max.{name}", value))
    return found


def kept_fields(log: RunLog) -> dict[str, object]:
    """Return the fields of an open run as JSON, which may have NaN."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in run_fields(log).items()
    }


def fields_of(kept: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of a run from their JSON."""
    times = [one.name for one in RUN_COLUMNS if one.type == "time" and kept.get(one.name)]
    return {**kept, **{name: datetime.fromisoformat(kept[name]) for name in times}}


def damaged_fields(name: str, error: RegistryError) -> dict[str, object]:
    """Return the fields of a run that cannot be read, for filters."""
    return {"run": name, "name": name, "status": "damaged", "error": str(error)}


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the numbers, texts and lists of a configuration, each with its dotted path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value


def _row(run: RunManifest) -> dict[str, object]:
    created, live, latest = run.created, run.live(), run.latest()
    monitor, best = next(iter(run.monitors), None), run.own_best()
    return {
        "run": run.run_id,
        "status": run.shown_status if run.dropped is None else "dropped",
        "error": run.dropped or run.reason,
        "phase": run.phase,
        "preset": run.spec.name or None,
        "parent": created and created.parent and parent_ref(created.parent),
        "created": moment(run.created_ms),
        "checkpoints": len(live),
        "evicted": run.evicted_count,
        "superseded": run.superseded_count,
        "size_bytes": sum(one.size_bytes for one in live),
        "latest_step": latest and latest.step,
        "latest_time": latest and moment(latest.time_ms),
        "monitor": monitor and monitor.label,
        "best": monitor and best and monitor.value(best.metrics),
        "best_step": best and best.step,
        "project": created and created.project,
        "labels": run.labels_now or None,
        "tags": [*run.tags] or None,
        "releases": [pin.name for pin in run.pins_of("release")] or None,
        "seed": created and f"0x{created.seed}",
        "config": created and json.dumps(json_ready(decode_plain(run.config))),
    }


def entry_table(entries: Sequence[Mapping[str, Any]]) -> Any:
    """Return entries as a `pyarrow.Table`: `step` first, the other keys as they first appear.

    The type of a column is that of its values: `bool`, `string`, `int64`, or `float64` for floats,
    and for ints beside floats. If they are of other types, nest, or do not fit, each is its JSON.
    """
    keys = dict.fromkeys(["step", *(key for entry in entries for key in entry)])
    columns: list[Column] = []
    made: list[dict[str, object]] = [{} for _ in entries]
    for key in keys:
        values = [entry.get(key) for entry in entries]
        columns.append(_fill(made, key, values, f"{key} of the entry", key == "step"))
    return table(columns, made)


def _fill(
    rows: Sequence[dict[str, object]],
    name: str,
    values: Sequence[object],
    about: str,
    is_step: bool = False,
) -> Column:
    """Set a value in each row, or its JSON where they have no common type; return the column."""
    type_ = "int64" if is_step else _type_of(values)
    for row, value in zip(rows, values, strict=True):
        row[name] = _text(value) if type_ is None else value
    return Column(name, type_ or "string", about)


def _type_of(values: Sequence[object]) -> Type | None:
    """Return the type of a column; `None` if its values are shown as JSON."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {bool}:
        return "bool"
    if kinds == {str}:
        return "string"
    ints = [value for value in values if type(value) is int]
    if kinds == {int}:
        return "int64" if all(value in _INT64 for value in ints) else None
    if kinds and kinds <= {int, float}:
        return "float64" if all(value in _EXACT for value in ints) else None
    return None


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(json_ready(value))
