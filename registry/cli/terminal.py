"""Tables and bars on a terminal. The one module that imports rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    FileSizeColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from holdfast.registry.cli.columns import Column

_GAP = 2
_LEAST_FOLDED = 12


def print_table(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    """Print a table that fits the terminal; only columns that fold are ever broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    whole = _fits(columns, cells, console.width)
    for index, column in enumerate(columns):
        keep = whole and not column.folds
        table.add_column(
            Text(column.name),
            justify="right" if column.is_number else "left",
            no_wrap=keep,
            overflow="fold",
            min_width=_width(column, cells, index) if keep else None,
        )
    for row in cells:
        table.add_row(*[Text(cell) for cell in row])
    console.print(table)


def _fits(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> bool:
    """Return whether the columns that do not fold leave enough room for those that do."""
    needed = sum(
        _GAP + (min(_LEAST_FOLDED, size) if column.folds else size)
        for index, column in enumerate(columns)
        for size in [_width(column, cells, index)]
    )
    return needed <= width + _GAP


def _width(column: Column, cells: Sequence[Sequence[str]], index: int) -> int:
    return max([len(column.name), *(len(row[index]) for row in cells)])


@contextmanager
def progress_bar(label: str, total: int | None) -> Iterator[Progress]:
    """Show a bar on stderr until the block ends."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        FileSizeColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    ) as progress:
        progress.add_task(label, total=total)
        yield progress
