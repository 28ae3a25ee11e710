"""`push` and `pull`: one checkpoint from a file, and back into one any stored state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from registry import formats
from registry.cli import describe, options, output
from registry.cli.opening import watched
from registry.errors import InvalidInput

#: Said where a file was kept unread.
OPAQUE = "stored as an opaque file; nothing in it was read"


def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to store.")],
    run: options.Run,
    registry: options.Registry,
    *,
    step: Annotated[
        int, typer.Option("--step", metavar="N", help="Training step, update or epoch.")
    ],
    phase: Annotated[
        str | None,
        typer.Option("--phase", metavar="NAME", help="Phase; the one that the run is in without."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME=NUMBER", help="A metric; any number of times."),
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", metavar="NAME=TEXT", help="A text to keep beside; any number."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            metavar="[PATTERN=]POLICY",
            help="bf16, fp16, auto or keep, for tensors on these paths, or all; any number of "
            "times, the first that matches.",
        ),
    ] = None,
    allow_lossy_optimizer: Annotated[
        bool,
        typer.Option("--allow-lossy-optimizer", help="Let optimizer state lose precision too."),
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Begin the run where it does not exist.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Store a file as a checkpoint.

    .pt, .pth, .ckpt, .safetensors and Zarr folders are taken apart; any other file is kept unread.
    """
    metrics, texts = options.numbers(metric or ()), options.pairs(meta or ())
    policies = options.pairs(one if "=" in one else f"*={one}" for one in precision or ())
    found = formats.read(file)
    with watched(registry, "pushing") as opened:
        into = opened.run(run, create=create)
        known = into.manifest.count
        saved = into.push(
            found.state,
            step=step,
            phase=phase,
            metrics=metrics,
            meta=texts or None,
            precision=policies,
            allow_lossy_optimizer=allow_lossy_optimizer,
        )
        is_new = into.manifest.count > known
        pointed = describe.marks(into.manifest).get(saved.n, [])
        shape = describe.checkpoint_json(saved, pointed)
    if json:
        output.document({**shape, "format": found.format, "new": is_new})
        return
    how = "pushed" if is_new else "there already"
    output.line(f"{how}: {saved.ref}  {saved.digest.short}  {output.size(saved.size_bytes)}")
    if shape["lossy"]:
        output.line(f"with less precision: {describe.lossy_text(shape['lossy'])}")
    if found.format == "opaque":
        output.line(OPAQUE)
    if not is_new and (metrics or texts):
        output.note(f"metrics and meta were left as they are; see holdfast metric add {saved.ref}")


def pull(
    ref: options.Ref,
    registry: options.Registry,
    *,
    to: Annotated[
        Path, typer.Option("--to", metavar="PATH", help="What to write: .pt, .safetensors, .zarr.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="COMPONENT", help="Only this component; repeatable."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that stands there.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint, a release, an artifact or an entry of a pool to a file.

    The extension decides the format; an opaque file comes back under any name. Every byte is
    verified, and the file is there whole or not at all.
    """
    if str(to) == "-":
        raise InvalidInput(
            "a checkpoint is written to a file, not to a pipe",
            where="--to -",
            expected="the path of a file",
        )
    with watched(registry, "pulling") as opened:
        stored = opened.stored(ref)
        # Formats ask nothing of a checkpoint that a stored state does not have.
        written = formats.write(to, stored, only=only or None, force=force)  # type: ignore[arg-type]
    if lossy := describe.lossy_text(describe.lossy_json(stored)):
        output.note(f"saved with less precision: {lossy}")
    if json:
        shape = {"ref": stored.ref, "id": stored.digest, "path": str(written.path)}
        output.document({**shape, "format": written.format, "size_bytes": written.size_bytes})
        return
    source = f"{stored.ref}  {stored.digest.short}"
    output.line(f"pulled: {source}  {output.size(written.size_bytes)} to {written.path}")
