"""Tables and live views on a terminal. The one module that imports all of rich."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from holdfast.backends.escape import printable
from holdfast.registry.cli.columns import GAP, Column, Table, cells, fitting

#: Words of a status and marks that are red.
_RED = {"damaged", "unreadable", "failed"}


def console(*, stderr: bool = False) -> Console:
    """Return the terminal; with NO_COLOR it gets neither colours nor bold."""
    return Console(
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_table(table: Table) -> None:
    """Print a table that fits the terminal, and on stderr the columns that do not fit.

    Columns that fold are broken between words, and no other ones. A word that is wider than the
    terminal is left to the terminal, so that it can be copied as one.
    """
    screen, columns = console(), table.columns
    texts = cells(columns, table.rows)
    least = [_least(column, [row[i] for row in texts]) for i, column in enumerate(columns)]
    kept = fitting(columns, least, screen.width)
    shown = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for i in kept:
        column = columns[i]
        shown.add_column(
            Text(printable(column.name)),
            justify="right" if column.is_number else "left",
            min_width=least[i],
        )
    for row, values in zip(texts, table.rows, strict=True):
        shown.add_row(*[Text(row[i], _style(columns[i].value(values))) for i in kept])
    screen.width = max(screen.width, sum(least[i] + GAP for i in kept) - GAP)
    screen.print(shown)
    hidden = [printable(column.name) for i, column in enumerate(columns) if i not in kept]
    if hidden:
        named = f"not shown: {', '.join(hidden)}; --columns chooses, --csv has all"
        console(stderr=True).print(Text(named))


def _style(value: object) -> str:
    """Return the style of a cell: red for NaN, infinity and damage."""
    match value:
        case float():
            return "" if math.isfinite(value) else "red"
        case str():
            value = value.split(", ")
    return "red" if isinstance(value, list) and not _RED.isdisjoint(map(str, value)) else ""


def _least(column: Column, texts: Sequence[str]) -> int:
    """Return the least width of a column: its widest cell, or its widest word if it folds."""
    words = [word for text in texts for word in text.split()] if column.folds else texts
    return max(map(cell_len, [printable(column.name), *words]))


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, broken between words only."""
    widest = max(map(cell_len, text.split()), default=0)
    return [line.plain.rstrip() for line in Text(text).wrap(console(), max(width, widest))]


@contextmanager
def live() -> Iterator[Callable[[Sequence[str]], None]]:
    """Show lines that change until the block ends; yield the function that sets them."""
    with Live(console=console(), auto_refresh=False) as view:
        yield lambda lines: view.update(
            Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True
        )


# Signals that end the command, handled before slow imports begin.


INTERRUPTED = 128 + signal.SIGINT


class Terminated(BaseException):
    """A signal asked the process to end. Not an `Exception`, so that no handler catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def end_on_signals() -> None:
    """Let SIGTERM unwind the stack, so that unfinished work is cleaned up."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise Terminated(number)


# The standard streams of the command: opened, able to print any text, given up if they are full.


_NOT_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def prepare() -> None:
    """Open the streams that the caller has closed, and print escapes where an encoding is poor.

    A file that the command opens would otherwise get the number of a closed stream, and Python has
    no object for one.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding gets escapes, not a fault.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def is_unwritten(error: BaseException) -> bool:
    """Return whether an error says that the output could not be written.

    The library reports its own files as `StorageError`; a bare error of a write is of a stream.
    """
    return isinstance(error, OSError) and error.errno in _NOT_WRITTEN and error.filename is None


def give_up_output() -> None:
    """Discard the rest of the output, which the interpreter would write once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
