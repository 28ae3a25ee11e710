"""`stream append`, `read` and `archive`: append-only histories, as lines of JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from holdfast.registry.cli import options, output
from holdfast.registry.cli.columns import Column, numbers
from holdfast.registry.cli.command import Answer, answer_of, command, listed
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import reads, writes
from holdfast.registry.cli.options import argument, option
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import json_ready
from holdfast.registry.history.actions import Lifetime
from holdfast.registry.history.replay import StreamRecord

_LS = (
    Column("stream", "name"),
    Column("lifetime", drop=2),
    *numbers("entries", text="{:,}".format),
    *numbers("segments", drop=3),
    Column(
        "archives",
        text=lambda counts: " ".join(f"{label} ({count:,})" for label, count in counts.items()),
        folds=True,
        drop=1,
    ),
)
_NAME = argument("NAME", "The stream.")


@command(writes)
def append(
    opened: Registry,
    *,
    run: options.NamedRun,
    name: str = _NAME,
    file: Path | None = argument(
        "FILE", "Lines of JSON; stdin by default, or for -.", default=None
    ),
    lifetime: str | None = option(
        "--lifetime", "LIFETIME", "forever or resettable, if this creates the stream."
    ),
) -> Answer:
    """Append entries to a stream: all of them or none.

    Each line is a JSON object with a step.
    """
    entries = read_entries(file)
    stream = opened.run(run).streams[name]
    count = stream.append(entries, lifetime=cast("Lifetime | None", lifetime))
    appended = output.counted(len(entries), "line")
    return answer_of(
        {"run": run, "stream": name, "appended": len(entries), "entries": count},
        f"{run}: stream {name}: {appended} appended, {count:,} in all",
    )


@command(reads)
def read(
    opened: Registry,
    *,
    run: options.NamedRun,
    name: str = _NAME,
    first: int | None = option("--from", "STEP", "From this step.", min=0),
    last: int | None = option("--to", "STEP", "Up to this step.", min=0),
    archive: str | None = option("--archive", "LABEL", "The archive of this label."),
) -> Answer:
    """Print entries as lines of JSON, or with --json as one list."""
    found = opened.run(run).streams[name].read(first, last, archive=archive)
    return Answer(
        lambda: found,
        lambda: (json_module.dumps(json_ready(entry), allow_nan=False) for entry in found),
    )


@command(writes)
def archive(
    opened: Registry,
    *,
    run: options.NamedRun,
    name: str = _NAME,
    label: str = argument("LABEL", "Name of the archive. It is given once."),
) -> Answer:
    """Archive the entries of a resettable stream and empty it."""
    count = opened.run(run).streams[name].archive(label)
    entries = output.counted(count, "entry", "entries")
    return answer_of(
        {"run": run, "stream": name, "archive": label, "entries": count},
        f"{run}: stream {name}: {entries} archived as {label}",
    )


def listing(of: Run) -> Answer:
    """Return the streams of a run as an answer, those that its preset declares among them."""
    streams = list(of.manifest.streams)
    names = {stream.name for stream in streams}
    declared = [stream for stream in of.manifest.spec.streams if stream.name not in names]
    streams += [StreamRecord(name=stream.name, lifetime=stream.lifetime) for stream in declared]
    return listed(_LS, streams, _json, none="no streams yet")


def _json(stream: StreamRecord) -> dict[str, Any]:
    return {
        **picked(stream, "name lifetime entries=count"),
        "segments": len(stream.segments),
        "archives": {archive.label: archive.count for archive in stream.archives},
    }


# Lines of JSON


def read_entries(path: Path | None) -> list[dict[str, Any]]:
    """Read the entries of a file, or of stdin."""
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
    return [
        _entry(line, f"{where}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json_module.loads(line.decode(), object_pairs_hook=options.distinct)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("a line is not JSON", where=where, found=error) from error
    if not isinstance(entry, dict) or "step" not in entry:
        raise InvalidInput(
            "a line is not an entry",
            where=where,
            expected='{"step": 0, ...}',
            found=line.decode()[:60],
        )
    return entry
