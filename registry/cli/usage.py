"""`du`: the bytes that runs and checkpoints use on the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.registry.cli import output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.opening import DASK, reads, workers_at
from holdfast.registry.cli.options import argument
from holdfast.registry.cli.output import Part
from holdfast.registry.errors import NotFound, RegistryError
from holdfast.registry.face import Registry
from holdfast.registry.upkeep import RunUsage, Usage, measure
from holdfast.registry.values import near

_SIZES = (
    *numbers("own=own_bytes", text=output.size, none="-", drop=1),
    *numbers("shared=shared_bytes", text=output.size, none="-", drop=2),
    *numbers("freed=freed_bytes", text=output.size, none="-"),
)
_RUNS = (Column("run"), *numbers("states", drop=3), *_SIZES)
_STATES = (Column("state", "ref"), *_SIZES)


@command(reads, table=True)
def du(
    opened: Registry,
    *,
    run: list[str] | None = argument("RUN", "Show each state of these runs.", default=None),
    dask: str | None = DASK,
) -> Answer:
    """Show how many bytes runs and checkpoints use and would free.

    Counts bytes as they are stored, without reading data. `own` is needed by nothing else. `freed`
    is what gc and repack can free once the run is dropped or the checkpoint is evicted.
    """
    with workers_at(dask) as executor:
        usage = measure(opened.store, executor=executor)
    chosen = _chosen(usage, run or [one.run for one in usage.runs])
    damaged = {name: error for name, error in usage.damaged.items() if not run or name in run}
    return Answer(
        lambda: _json(usage, chosen),
        lambda: _text(usage, chosen, damaged, by_state=bool(run)),
        damaged=damaged,
    )


def _chosen(usage: Usage, names: list[str]) -> list[RunUsage]:
    known = {one.run: one for one in usage.runs}
    for name in names:
        if name not in known and name not in usage.damaged:
            raise NotFound(
                "no such run",
                where=name,
                hint=near(name, known) or "`du` takes names of runs; `holdfast run ls` lists them.",
            )
    return [known[name] for name in dict.fromkeys(names) if name in known]


def _text(
    usage: Usage, chosen: list[RunUsage], damaged: Mapping[str, RegistryError], *, by_state: bool
) -> Iterator[Part]:
    if by_state:
        yield Table(_STATES, [state for one in chosen for state in _run_json(one)["states"]])
    elif chosen or damaged:
        rows = {one.run: {**_run_json(one), "states": len(one.states)} for one in chosen}
        rows |= {name: {"run": name, "states": mark(error)} for name, error in damaged.items()}
        yield Table(_RUNS, [rows[name] for name in sorted(rows)])
    if chosen or damaged:
        yield ""
    yield _sums(usage)


def _sums(usage: Usage) -> dict[str, object]:
    needed, shared = usage.own_bytes + usage.shared_bytes, output.size(usage.shared_bytes)
    dead = {"repack": usage.dead_bytes, "gc": usage.unneeded_bytes}
    removed = [f"{output.size(nbytes)} for {name}" for name, nbytes in dead.items() if nbytes]
    return {
        "needed": f"{output.size(needed)}, of which several states share {shared}",
        "dead": ", ".join(removed) or "0 B",
        "tables": f"{output.size(usage.table_bytes)} of packs",
        "logs": output.size(usage.log_bytes),
        "other": output.size(usage.other_bytes),
        "total": output.size(usage.total_bytes),
    }


def _json(usage: Usage, runs: list[RunUsage]) -> dict[str, Any]:
    sums = "total_bytes own_bytes shared_bytes dead_bytes unneeded_bytes table_bytes log_bytes"
    return {
        **picked(usage, f"{sums} other_bytes"),
        "runs": [_run_json(run) for run in runs],
        "damaged": {name: error.summary for name, error in usage.damaged.items()},
    }


def _run_json(run: RunUsage) -> dict[str, Any]:
    states = [picked(one, "ref id own_bytes shared_bytes freed_bytes") for one in run.states]
    return {**picked(run, "run own_bytes shared_bytes freed_bytes log_bytes"), "states": states}
