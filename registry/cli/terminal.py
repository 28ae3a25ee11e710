"""Tables and live views on a terminal. The one module that imports all of rich."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
