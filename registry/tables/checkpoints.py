"""The checkpoints of a run as a table: a row for each, a column for each metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.registry.history import moment, step_ref
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.tables.columns import Column, table

COLUMNS = (
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
    return table((*COLUMNS, *metrics), _rows(run_id, kept))


def metric_column(name: str) -> str:
    """Return the name of a metric's column; no two columns have the same.

    It is the metric's own name, after `metrics.` if another column has that name, or if it begins
    with `metrics.` itself.
    """
    is_taken = name in {one.name for one in COLUMNS} or name.startswith(_PREFIX)
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
