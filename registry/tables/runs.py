"""The runs of a registry as a table: a row for each, also for one that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.registry.errors import RegistryError, StoreUnavailable
from holdfast.registry.history import decode_plain, json_ready, moment, parent_ref
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.store import Store
from holdfast.registry.tables.columns import Column, table

COLUMNS = (
    Column("run", "string", "its name"),
    Column("status", "string", "running, interrupted, completed, failed, dropped or damaged"),
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
    Column("best", "float64", "the best value of the monitor"),
    Column("best_step", "int64", "step of the checkpoint that has it"),
    Column("seed", "string", "the master seed: 0x and 16 hexadecimal digits"),
    Column("config", "string", "the configuration as JSON"),
)


def run_table(store: Store, names: Iterable[str], read: Callable[[str], RunManifest]) -> Any:
    """Return runs as a `pyarrow.Table`; several are read at once."""

    def row(name: str) -> dict[str, object] | None:
        try:
            run = read(name)
            return _row(run) if run.commits else None
        except StoreUnavailable:
            raise  # the other runs would fail in the same way
        except RegistryError as error:
            return {"run": name, "status": "damaged", "error": str(error)}

    rows = store.pools.bulk.map(row, names)
    return table(COLUMNS, [one for one in rows if one is not None])


def _row(run: RunManifest) -> dict[str, object]:
    created, live, latest = run.created, run.live(), run.latest()
    monitor = next(iter(run.monitors), None)
    best = None if monitor is None else run.best(monitor)
    return {
        "run": run.run_id,
        "status": run.status if run.dropped is None else "dropped",
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
        "seed": created and f"0x{created.seed}",
        "config": created and json.dumps(json_ready(decode_plain(created.config))),
    }
