"""The output of commands: tables and fields for people, JSON for programs.

On a terminal rich lays tables out; in a pipe they are plain aligned text, without colour. Every
string passes through `printable`, since names and metrics come from whoever wrote to the store.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time as clock
from collections.abc import Iterable, Mapping, Sequence

from holdfast.backends.escape import printable
from holdfast.registry.cli.columns import Column, Table
from holdfast.registry.history.log_values import format_time, json_ready
from holdfast.registry.values.amounts import number as number
from holdfast.registry.values.amounts import size as size


class Note(str):
    """A line for stderr, which `note` prints."""

    __slots__ = ()


#: What `show` prints: a line, a note, a table, or names with their values.
Part = str | Note | Table | Mapping[str, object]

_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def is_terminal() -> bool:
    """Return whether a person reads this, and not a program."""
    return sys.stdout.isatty()


def show(part: Part) -> None:
    """Print a part of an answer."""
    match part:
        case Note():
            note(part)
        case str():
            line(part)
        case Table():
            table(part.columns, part.rows)
        case _:
            fields(part)


def line(text: str = "") -> None:
    """Print a line of text."""
    print("\n".join(printable(part) for part in text.split("\n")))


def note(text: str) -> None:
    """Print a line on stderr, so that a pipe gets only the result."""
    print(printable(text), file=sys.stderr)


def document(value: object) -> None:
    """Print a value as JSON; NaN and infinities become strings, characters beyond ASCII escapes."""
    print(json.dumps(json_ready(value), indent=2, allow_nan=False))


def record(value: object) -> None:
    """Print a value as one line of JSON, at once: for commands that follow something."""
    print(json.dumps(json_ready(value), allow_nan=False), flush=True)


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if is_terminal():
        from holdfast.registry.cli import terminal

        terminal.print_table(columns, cells)
        return
    for text in plain_table(columns, cells):
        print(text)


def plain_table(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, columns aligned and two spaces apart."""
    lines = [[column.name for column in columns], *cells]
    widths = [max(len(row[i]) for row in lines) for i in range(len(columns))]
    return ["  ".join(_pad(row, columns, widths)).rstrip() for row in lines]


def _pad(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    return [
        text.rjust(width) if column.is_number else text.ljust(width)
        for text, column, width in zip(row, columns, widths, strict=True)
    ]


def fields(values: Mapping[str, object]) -> None:
    """Print names and values, one a line; absent and empty values are left out."""
    shown = {
        printable(name): printable(value)
        for name, value in values.items()
        if value not in (None, "")
    }
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        hanging(f"{name.ljust(width)}  ", value)


def hanging(head: str, text: str) -> None:
    """Print a text after its head; on a terminal further lines are indented below the text."""
    text = printable(text)
    room = shutil.get_terminal_size().columns - len(head)
    if is_terminal() and len(text) > room:
        text = f"\n{' ' * len(head)}".join(textwrap.wrap(text, max(room, 20)))
    print(f"{head}{text}")


# Values


def age(time_ms: int) -> str:
    """Return how long ago a time of the log was, in its largest unit."""
    seconds = int(clock.time() - time_ms / 1000)
    for length, unit in _AGES:
        if abs(seconds) >= length:
            return f"{seconds // length} {unit}" if seconds > 0 else "in the future"
    return "now"


def duration(seconds: float) -> str:
    """Return a time span in its largest unit."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.2g} s"


def metrics(values: Mapping[str, float]) -> str:
    """Return metrics on one line."""
    return " ".join(f"{name}={number(value)}" for name, value in values.items())


def share(part: float) -> str:
    """Return a share in per cent, three digits; `100%` is all of it and `0%` nothing."""
    return "100%" if part == 1 else f"{min(100 * part, 99.9):.3g}%"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in the plural unless there is one."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def more(count: int, shown: int) -> list[str]:
    """Return a line that says how many things `--json` lists beyond those that are shown."""
    return [f"... and {count - shown:,} more; --json lists all"] if count > shown else []


def time(time_ms: int) -> str:
    """Return a time of the log: UTC, to the second."""
    return format_time(time_ms)


def date(time_ms: int) -> str:
    """Return a time of the log, and how long ago that was."""
    return f"{time(time_ms)} ({age(time_ms)})"
