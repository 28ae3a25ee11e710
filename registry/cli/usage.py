"""`du`: what runs and checkpoints take on the store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from registry.cli import options, output
from registry.cli.columns import Column
from registry.cli.listing import end, mark
from registry.errors import NotFound
from registry.maintenance.usage import RunUsage, StateUsage, Usage, measure
from registry.registry import open  # noqa: A004
from registry.suggest import near

_SIZES = tuple(Column(name, is_number=True) for name in ("own", "shared", "freed"))
_RUNS = (Column("run", folds=True), Column("states", is_number=True), *_SIZES)
_STATES = (Column("state", folds=True), *_SIZES)


def du(
    registry: options.Registry,
    run: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Each state of these runs.")
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Tell what runs and checkpoints take, and what letting them go would free.

    Counts bytes as they are stored, without reading data: `own` is what nothing else needs,
    `freed` what gc and repack can free once the run is dropped or the checkpoint let go.
    """
    with open(registry, read_only=True) as opened:
        usage = measure(opened.store)
    chosen = _chosen(usage, run or [one.run for one in usage.runs])
    damaged = {name: error for name, error in usage.damaged.items() if not run or name in run}
    if json:
        output.document(_usage_json(usage, chosen))
        end(damaged)
        return
    if run:
        output.table(_STATES, [_state_row(state) for one in chosen for state in one.states])
    elif chosen or damaged:
        rows = {one.run: _run_row(one) for one in chosen}
        rows |= {name: (name, mark(error), "-", "-", "-") for name, error in damaged.items()}
        output.table(_RUNS, [rows[name] for name in sorted(rows)])
    if chosen or damaged:
        output.line()
    _print_sums(usage)
    end(damaged)


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


def _run_row(run: RunUsage) -> tuple[object, ...]:
    sizes = (run.own_bytes, run.shared_bytes, run.freed_bytes)
    return run.run, len(run.states), *map(output.size, sizes)


def _state_row(state: StateUsage) -> tuple[object, ...]:
    freed = "-" if state.freed_bytes is None else output.size(state.freed_bytes)
    return state.ref, output.size(state.own_bytes), output.size(state.shared_bytes), freed


def _print_sums(usage: Usage) -> None:
    needed = usage.own_bytes + usage.shared_bytes
    dead = {
        "repack": output.size(usage.dead_bytes) if usage.dead_bytes else "",
        "gc": output.size(usage.unneeded_bytes) if usage.unneeded_bytes else "",
    }
    output.fields(
        {
            "needed": f"{output.size(needed)}, of which several states share "
            f"{output.size(usage.shared_bytes)}",
            "dead": ", ".join(f"{size} for {name}" for name, size in dead.items() if size) or "0 B",
            "tables": f"{output.size(usage.table_bytes)} of packs",
            "logs": output.size(usage.log_bytes),
            "other": output.size(usage.other_bytes),
            "total": output.size(usage.total_bytes),
        }
    )


def _usage_json(usage: Usage, runs: list[RunUsage]) -> dict[str, Any]:
    return {
        "total_bytes": usage.total_bytes,
        "own_bytes": usage.own_bytes,
        "shared_bytes": usage.shared_bytes,
        "dead_bytes": usage.dead_bytes,
        "unneeded_bytes": usage.unneeded_bytes,
        "table_bytes": usage.table_bytes,
        "log_bytes": usage.log_bytes,
        "other_bytes": usage.other_bytes,
        "runs": [_run_json(run) for run in runs],
        "damaged": {name: error.summary for name, error in usage.damaged.items()},
    }


def _run_json(run: RunUsage) -> dict[str, Any]:
    return {
        "run": run.run,
        "own_bytes": run.own_bytes,
        "shared_bytes": run.shared_bytes,
        "freed_bytes": run.freed_bytes,
        "log_bytes": run.log_bytes,
        "states": [
            {
                "ref": state.ref,
                "id": state.id,
                "own_bytes": state.own_bytes,
                "shared_bytes": state.shared_bytes,
                "freed_bytes": state.freed_bytes,
            }
            for state in run.states
        ],
    }
