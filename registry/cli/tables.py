"""Choose the columns of a table, sort its rows, fit it to a terminal, and write it as CSV."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len

from holdfast.backends.escape import printable
from holdfast.registry.cli.columns import Column, Row, Table, field_of
from holdfast.registry.errors import NotFound
from holdfast.registry.history.log_values import json_ready
from holdfast.registry.values.amounts import number, size
from holdfast.registry.values.suggest import near

GAP = 2


@dataclass(frozen=True, slots=True)
class View:
    """The choices of `--columns`, `--sort` and `--csv`.

    Attributes:
        columns: Headings or fields, in the order of the columns; empty for the usual ones.
        sort: A heading or field; after `-` the greatest value comes first.
        is_csv: Whether values are printed for programs.
    """

    columns: Sequence[str] = ()
    sort: str = ""
    is_csv: bool = False

    def of(self, table: Table) -> Table:
        """Return a table with the wanted columns and the wanted order.

        Raises:
            NotFound: There is no such column.
        """
        chosen = [column for name in self.columns for column in _named(name, table, "--columns")]
        rows = table.rows
        if self.sort:
            (by, *_) = _named(self.sort.removeprefix("-"), table, "--sort")
            some = [row for row in rows if not _is_nothing(by.value(row))]
            some.sort(key=lambda row: _order(by.value(row)), reverse=self.sort.startswith("-"))
            rows = some + [row for row in rows if _is_nothing(by.value(row))]
        return Table(chosen or table.columns, rows, none=table.none)


def _named(name: str, table: Table, option: str) -> list[Column]:
    """Return the columns of a name: a heading, a field, or a field that spreads."""
    shown = [replace(one, drop=0, is_picture=False) for one in table.columns]
    found = (
        [one for one in shown if one.name == name][:1]
        or [one for one in shown if one.key == name]
        or [one for one in shown if one.key.startswith(f"{name}.")]
    )
    if found:
        return found
    values = [field_of(row, name) for row in table.rows if _has(row, name)]
    if table.rows and not values:
        known = list(dict.fromkeys(one.name for one in table.columns))
        raise NotFound(
            "no such column",
            where=f"{option} {name}",
            expected=f"{', '.join(known)}, or a field of --json",
            hint=near(name, {*known, *table.rows[0]}),
        )
    is_number = all(isinstance(one, int | float | None) for one in values)
    return [Column(name, text=_sized if name.endswith("_bytes") else _plain, is_number=is_number)]


def _has(row: Row, name: str) -> bool:
    try:
        field_of(row, name)
    except KeyError:
        return False
    return True


def _sized(value: Any) -> object:
    return size(value) if isinstance(value, int) else value


def _plain(value: Any) -> object:
    match value:
        case float():
            return number(value)
        case [*_]:
            return ", ".join(map(printable, value))
        case {}:
            return json.dumps(json_ready(value), ensure_ascii=False)
    return value


def _order(value: Any) -> tuple[int, Any]:
    """Return the key by which values of several types are sorted; lists by their lengths."""
    match value:
        case int() | float():
            return 0, value
        case list() | dict():
            return 0, len(value)
    return 1, str(value)


def _is_nothing(value: Any) -> bool:
    """Return whether a value comes last in any order."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def print_csv(table: Table) -> None:
    """Print the values of a table, below the names of their fields."""
    columns = [one for one in table.columns if not one.is_picture]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([printable(column.key) for column in columns])
    for row in table.rows:
        writer.writerow([_value(column.value(row)) for column in columns])


def _value(value: object) -> str:
    value = json_ready(value)
    return (
        "" if value is None else printable(value if isinstance(value, str) else json.dumps(value))
    )


def cells(columns: Sequence[Column], rows: Iterable[Row]) -> list[list[str]]:
    """Return the texts of a table, safe to print."""
    return [[printable(column.cell(row)) for column in columns] for row in rows]


def plain(table: Table) -> list[str]:
    """Return the lines of a table for a pipe: columns aligned and two spaces apart."""
    columns = [one for one in table.columns if not one.is_picture]
    lines = [[printable(one.name) for one in columns], *cells(columns, table.rows)]
    widths = [max(map(cell_len, texts)) for texts in zip(*lines, strict=True)]
    return [
        (" " * GAP)
        .join(
            pad(text, width, right=column.is_number)
            for text, column, width in zip(line, columns, widths, strict=True)
        )
        .rstrip()
        for line in lines
    ]


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return a text with spaces up to a width."""
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def fitting(columns: Sequence[Column], least: Sequence[int], width: int) -> list[int]:
    """Return the numbers of the columns that fit a width.

    Args:
        columns: The columns.
        least: The least width of each.
        width: Width of the terminal.
    """
    kept, left = [], width + GAP
    for i in sorted(range(len(columns)), key=lambda i: columns[i].drop):
        if not columns[i].drop or least[i] + GAP <= left:
            kept.append(i)
            left -= least[i] + GAP
    return sorted(kept)
