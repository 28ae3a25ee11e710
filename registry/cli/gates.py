"""`gate set` and `gate ls`: the checkpoints that phases end with."""

from __future__ import annotations

from typing import Annotated

import typer

from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.registry import open  # noqa: A004

_LS = (
    Column("gate"),
    Column("phase"),
    Column("checkpoint", folds=True),
    Column("id"),
    Column("metrics when set", folds=True),
    Column("age", is_number=True),
)


def set_gate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The gate, set once.")],
    registry: options.Registry,
    ref: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="The checkpoint; the best of the gate's phase without."),
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Make a checkpoint a gate: never evicted, never another one while it is sound.

    RUN/gates/NAME then finds it.
    """
    with open(registry) as opened:
        into = opened.run(run)
        into.set_gate(name, None if ref is None else opened.checkpoint(ref))
        pin = into.manifest.pin("gate", name)
        assert pin is not None  # it was just set
        shape = describe.pin_json(into, pin)
    if json:
        output.document(shape)
    else:
        output.line(f"{shape['ref']} -> {shape['source']}")


def ls(run: options.Run, registry: options.Registry, *, json: options.Json = False) -> None:
    """List the gates of a run, set ones first; those that its preset declares are there as well."""
    with open(registry, read_only=True) as opened:
        of = opened.run(run)
        standing = [describe.pin_json(of, pin) for pin in of.manifest.pins_of("gate")]
    declared = {gate.name: gate.phase for gate in of.spec.gates}
    names = [shape["name"] for shape in standing]
    waiting = {name: phase for name, phase in declared.items() if name not in names}
    if json:
        due = [describe.due_gate_json(of, name) for name in waiting]
        output.document([*standing, *due])
        return
    rows: list[tuple[object, ...]] = [
        (
            shape["name"],
            declared.get(shape["name"], ""),
            shape["source"],
            shape["id"].short,
            output.metrics(shape["metrics"]),
            output.age(describe.time_ms_of(shape["set"])),
        )
        for shape in standing
    ]
    rows += [(name, phase, "-", "", "", "") for name, phase in waiting.items()]
    if rows:
        output.table(_LS, rows)
    else:
        output.note("no gates yet")
