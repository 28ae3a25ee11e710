"""`stream append`, `read`, `archive` and `ls`: append-only histories, as lines of JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from registry.actions import Lifetime
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.errors import InvalidInput
from registry.plain import json_ready
from registry.registry import open  # noqa: A004
from registry.state import StreamRecord

_LS = (
    Column("stream"),
    Column("lifetime"),
    Column("entries", is_number=True),
    Column("segments", is_number=True),
    Column("archives", folds=True),
)
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The stream.")]


def append(
    run: Run,
    name: Name,
    registry: options.Registry,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Lines of JSON; stdin without, or for -.")
    ] = None,
    *,
    lifetime: Annotated[
        str | None,
        typer.Option(
            "--lifetime", metavar="LIFETIME", help="forever or resettable, of a stream begun here."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Append entries, one JSON object with a step on each line; all of them or none."""
    entries = _read(file)
    with open(registry) as opened:
        stream = opened.run(run).stream(name)
        count = stream.append(entries, lifetime=cast("Lifetime | None", lifetime))
    if json:
        output.document({"run": run, "stream": name, "appended": len(entries), "entries": count})
        return
    appended = output.counted(len(entries), "line")
    output.line(f"{run}: stream {name}: {appended} appended, {count:,} in all")


def read(
    run: Run,
    name: Name,
    registry: options.Registry,
    *,
    first: Annotated[
        int | None, typer.Option("--from", min=0, metavar="STEP", help="From this step on.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", min=0, metavar="STEP", help="Up to this step.")
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="LABEL", help="What was put aside under this label."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Print entries as lines of JSON, or with --json as one list."""
    with open(registry, read_only=True) as opened:
        found = opened.run(run).stream(name).read(first, last, archive=archive)
    if json:
        output.document(found)
        return
    for entry in found:
        print(json_module.dumps(json_ready(entry), allow_nan=False))


def archive(
    run: Run,
    name: Name,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Given once.")],
    registry: options.Registry,
    *,
    json: options.Json = False,
) -> None:
    """Put aside what a resettable stream holds, and begin it anew."""
    with open(registry) as opened:
        count = opened.run(run).stream(name).archive(label)
    if json:
        output.document({"run": run, "stream": name, "archive": label, "entries": count})
    else:
        kept = "entry" if count == 1 else "entries"
        output.line(f"{run}: stream {name}: {count:,} {kept} put aside as {label}")


def ls(run: options.Run, registry: options.Registry, *, json: options.Json = False) -> None:
    """List the streams of a run; those that its preset declares are there as well."""
    with open(registry, read_only=True) as opened:
        of = opened.run(run)
    begun = list(of.manifest.streams)
    names = {stream.name for stream in begun}
    declared = [stream for stream in of.spec.streams if stream.name not in names]
    begun += [StreamRecord(name=stream.name, lifetime=stream.lifetime) for stream in declared]
    shapes = [describe.stream_json(stream) for stream in begun]
    if json:
        output.document(shapes)
    elif shapes:
        output.table(_LS, [_row(shape) for shape in shapes])
    else:
        output.note("no streams yet")


def _row(shape: dict[str, Any]) -> tuple[object, ...]:
    archives = (f"{label} ({count:,})" for label, count in shape["archives"].items())
    return (
        shape["name"],
        shape["lifetime"],
        f"{shape['entries']:,}",
        shape["segments"],
        " ".join(archives),
    )


# Lines of JSON


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or str(path) == "-":
        return _parse(sys.stdin.buffer, "stdin")
    try:
        with path.open("rb") as file:
            return _parse(file, str(path))
    except OSError as error:
        raise InvalidInput(
            "the entries cannot be read", where=path, found=error.strerror
        ) from error


def _parse(lines: Iterable[bytes], where: str) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            entries.append(_entry(line, f"{where}, line {number}"))
    return entries


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json_module.loads(line.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("a line is not JSON", where=where, found=error) from error
    if not isinstance(entry, dict) or "step" not in entry:
        raise InvalidInput(
            "a line is not an entry", where=where, expected='{"step": 0, ...}', found=line[:60]
        )
    return entry


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
