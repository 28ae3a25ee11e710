"""`artifact add` and `artifact ls`: what a run keeps beside its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from registry import formats
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.cli.files import OPAQUE
from registry.cli.opening import watched
from registry.registry import open  # noqa: A004

_LS = (Column("artifact"), Column("id"), Column("age", is_number=True))


def add(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, given once.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to keep.")],
    registry: options.Registry,
    *,
    json: options.Json = False,
) -> None:
    """Keep a file beside the checkpoints of a run, for good; it is read as push reads it.

    RUN/artifacts/NAME then finds it.
    """
    found = formats.read(file)
    with watched(registry, "adding") as opened:
        into = opened.run(run)
        stored = into.add_artifact(name, found.state)
        pin = into.manifest.pin("artifact", name)
        assert pin is not None  # it was just added
        shape = {**describe.pin_json(into, pin), "format": found.format}
        size = output.size(stored.size_bytes)
    if json:
        output.document(shape)
        return
    output.line(f"added: {stored.ref}  {stored.digest.short}  {size}")
    if found.format == "opaque":
        output.line(OPAQUE)


def ls(run: options.Run, registry: options.Registry, *, json: options.Json = False) -> None:
    """List the artifacts of a run, oldest first."""
    with open(registry, read_only=True) as opened:
        of = opened.run(run)
        pins = of.manifest.pins_of("artifact")
        shapes = [describe.pin_json(of, pin) for pin in pins]
    if json:
        output.document(shapes)
    elif pins:
        rows = [(pin.name, pin.manifest.short, output.age(pin.time_ms)) for pin in pins]
        output.table(_LS, rows)
    else:
        output.note("no artifacts yet")
