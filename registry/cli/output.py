"""The output of commands: tables and fields for people, JSON for programs.

On a terminal rich lays tables out; in a pipe they are plain aligned text, without colour. Every
string passes through `printable`, since names and metrics come from whoever wrote to the store.
"""

from __future__ import annotations

import json
import shutil
import sys
import time as clock
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import typer
from rich.cells import cell_len

from holdfast.backends.escape import printable
from holdfast.registry.cli import columns
from holdfast.registry.cli.columns import Table
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import format_time, json_ready
from holdfast.registry.values import age as age
from holdfast.registry.values import counted as counted
from holdfast.registry.values import duration as duration
from holdfast.registry.values import metrics as metrics
from holdfast.registry.values import number as number
from holdfast.registry.values import share as share
from holdfast.registry.values import size as size


class Note(str):
    """A line for stderr, which `note` prints."""

    __slots__ = ()


class Sentence(str):
    """A line whose words a terminal may wrap; other lines are left whole, to be copied."""

    __slots__ = ()


#: What `show` prints: a line, a sentence, a note, a table, or names with their values.
Part = str | Sentence | Note | Table | Mapping[str, object]


def is_terminal() -> bool:
    """Return whether a person reads this, and not a program."""
    return sys.stdout.isatty()


def show(part: Part, *, as_csv: bool = False) -> None:
    """Print a part of an answer; a table as CSV if that is wanted."""
    match part:
        case Note():
            note(part)
        case Sentence():
            hanging("", part)
        case str():
            line(part)
        case Table():
            table(part, as_csv=as_csv)
        case _:
            fields(part)


def lines(part: Part) -> list[str]:
    """Return the lines of a part as they would be printed in a pipe."""
    printed = StringIO()
    with redirect_stdout(printed):
        show(part)
    return printed.getvalue().splitlines()


def line(text: str = "") -> None:
    """Print a line of text."""
    print("\n".join(printable(part) for part in text.split("\n")))


def note(text: str) -> None:
    """Print a line on stderr, so that a pipe gets only the result."""
    print(printable(text), file=sys.stderr)


def confirm_name(name: str, verb: str, what: str) -> None:
    """Let a person type the name of a run that an act cannot bring back."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"there is no terminal to ask on: give --yes to {verb} the run")
    note(what)
    typed = typer.prompt(f"Type the name of the run to {verb} it", err=True)
    if typed != name:
        raise InvalidInput("nothing was done: another name was typed", expected=name, found=typed)


def confirm(what: str) -> None:
    """Let a person confirm an act that cannot be undone."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on: give --yes")
    note(what)
    if not typer.confirm("Go on?", err=True):
        raise InvalidInput("nothing was done")


def document(value: object) -> None:
    """Print a value as JSON; NaN and infinities become strings, characters beyond ASCII escapes."""
    print(json.dumps(json_ready(value), indent=2, allow_nan=False))


def json_line(value: object) -> None:
    """Print a value as one line of JSON, at once."""
    print(json.dumps(json_ready(value), allow_nan=False), flush=True)


def table(shown: Table, *, as_csv: bool = False) -> None:
    """Print a table; if it has no rows, the note that it has for this."""
    if shown.none and not shown.rows:
        note(shown.none)
    if as_csv:
        columns.print_csv(shown)
    elif shown.none and not shown.rows:
        return
    elif is_terminal():
        from holdfast.registry.cli import terminal

        terminal.print_table(shown)
    else:
        for text in columns.plain(shown):
            print(text)


def fields(values: Mapping[str, object]) -> None:
    """Print names and values, one a line; absent and empty values are skipped."""
    shown = {
        printable(name): printable(value)
        for name, value in values.items()
        if value not in (None, "")
    }
    width = max(map(cell_len, shown), default=0)
    for name, value in shown.items():
        hanging(f"{columns.pad(name, width)}  ", value)


def hanging(head: str, text: str) -> None:
    """Print a text after its head; on a terminal further lines are indented below the text."""
    text, indent = printable(text), cell_len(head)
    room = shutil.get_terminal_size().columns - indent
    if is_terminal() and cell_len(text) > room:
        from holdfast.registry.cli import terminal

        text = f"\n{' ' * indent}".join(terminal.wrapped(text, max(room, 20)))
    print(f"{head}{text}")


# Values


def more(count: int, shown: int) -> list[str]:
    """Return a line with the number of things that only `--json` lists."""
    return [f"... and {count - shown:,} more; --json lists all"] if count > shown else []


time = format_time  # of the log: UTC, to the second


def date(time_ms: int) -> str:
    """Return a time of the log, and how long ago that was."""
    return f"{time(time_ms)} ({age(time_ms)})"


# Progress of a command: a bar on stderr if that is a terminal, otherwise a line each minute.


class Bar:
    """A bar, called with the number of bytes so far."""

    def __init__(
        self,
        show: Callable[[int, int | None, str], object] | None = None,
        *,
        has_total: bool = True,
    ) -> None:
        self._show = show
        self._has_total = has_total  # worth what `expect` costs
        self._done = self._total = self._names = self._read = 0

    @property
    def is_shown(self) -> bool:
        """Whether anybody sees it."""
        return self._show is not None

    def __call__(self, done: int) -> None:
        """Show the bytes so far."""
        self._done = done
        self._tell()

    def lists(self, names: int) -> None:
        """Show how many names were listed so far, until the first byte is done."""
        self._names = names
        self._tell()

    def reads(self, size_bytes: int) -> None:
        """Show how many bytes were read so far, until the first byte is done."""
        self._read = size_bytes
        self._tell()

    def _tell(self) -> None:
        if self._show is None:
            return
        if self._done or not self._names:
            # Manifests and gaps between chunks are read too, so there may be more than expected.
            total = max(self._done, self._total) if self._total else None
            self._show(self._done, total, "")
        else:
            self._show(0, None, f"reading: {self._names:,} names, {size(self._read)}")

    def expect(self, more: Callable[[], int]) -> None:
        """Show a total: the bytes so far, plus the bytes that `more` returns."""
        if self._show is not None and self._has_total:
            expected = more()  # moves the bar
            self._total = self._done + expected


#: Without a terminal, a command that takes long says so this often.
_EVERY_S = 60


def _lines(label: str) -> Callable[[int, int | None, str], None]:
    """Return a function that writes a line on stderr each minute: how far, since when."""
    began = told = clock.monotonic()

    def show(done: int, _: int | None, reading: str) -> None:
        nonlocal told
        now = clock.monotonic()
        if now - told >= _EVERY_S:
            told = now
            note(f"{reading or f'{label}: {size(done)}'} so far, {duration(now - began)}")

    return show


@contextmanager
def bar(label: str) -> Iterator[Bar]:
    """Show a bar while the block runs; a line each minute if there is no terminal."""
    if not label:
        yield Bar()
        return
    if not sys.stderr.isatty():
        yield Bar(_lines(label), has_total=False)
        return
    from holdfast.registry.store import terminal_bar

    with terminal_bar(label) as show:
        yield Bar(show)
