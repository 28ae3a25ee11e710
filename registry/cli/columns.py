"""Tables: rows as `--json` prints them, and columns that each show one field of a row.

A column knows the value of a row, for sorting and CSV, and its text, for people. `tables` chooses,
sorts and lays out.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rich.cells import cell_len

from holdfast.backends.escape import printable
from holdfast.registry.errors import NotFound
from holdfast.registry.history import json_ready
from holdfast.registry.values import near, number, size

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str  # its heading
    #: The field of a row that it shows, as in `--json`; dots lead into fields. By default the
    #: heading.
    field: str = ""
    #: Returns the cell of a value; by default the cell is the value.
    text: Callable[[Any], object] = lambda value: value
    is_number: bool = False  # whether it is aligned to the right
    folds: bool = False  # whether its words may take several lines on a terminal
    none: str = ""  # the cell where the value is None
    #: On a terminal that is too narrow the columns with the highest number are dropped first,
    #: those with 0 never.
    drop: int = 0
    is_picture: bool = False  # whether it is shown on a terminal only, unless the user names it
    spreads: bool = False  # whether the field holds numbers by name, and each name gets a column

    @property
    def key(self) -> str:
        """The name of its field."""
        return self.field or self.name

    def value(self, row: Row) -> Any:
        """Return the value of a row; None if the row does not have it."""
        try:
            return field_of(row, self.key)
        except KeyError:
            return None

    def cell(self, row: Row) -> object:
        """Return the cell of a row."""
        value = self.value(row)
        return self.none if value is None else self.text(value)


class Table:
    """Rows below columns."""

    def __init__(
        self,
        columns: Iterable[Column],
        rows: Iterable[Row],
        *,
        none: str = "",
        first: Sequence[str] = (),
        is_main: bool = True,
        sorts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.rows = list(rows)
        found = [one for column in columns for one in _spread(column, self.rows, first)]
        names = Counter(one.name for one in found)
        # Such as a key of the configuration and a metric of one name.
        self.columns = [replace(one, name=one.key) if names[one.name] > 1 else one for one in found]
        self.none = none
        self.is_main = is_main
        self.sorts = sorts  # the field by which the rows are sorted, for names where it is another


def field_of(row: Any, path: str) -> Any:
    """Return a field of a row; a name in it may itself have dots."""
    if not isinstance(row, Mapping):
        raise KeyError(path)
    if path in row:
        return row[path]
    name, _, rest = path.partition(".")
    return field_of(row[name], rest)


def numbers(
    *names: str, text: Callable[[Any], object] = lambda value: value, drop: int = 0, none: str = ""
) -> tuple[Column, ...]:
    """Return columns of numbers; `name=field` is one whose heading is not its field."""
    pairs = (name.rpartition("=") for name in names)
    return tuple(
        Column(heading or field, field, text, is_number=True, drop=drop, none=none)
        for heading, _, field in pairs
    )


def metrics(*, drop: int) -> Column:
    """Return the column that becomes one for each metric."""
    return Column("metrics", text=number, is_number=True, drop=drop, spreads=True)


def _spread(column: Column, rows: Iterable[Row], first: Sequence[str]) -> Iterable[Column]:
    if not column.spreads:
        return [column]
    found = dict.fromkeys(name for row in rows for name in column.value(row) or ())
    names = [*(name for name in first if name in found), *(n for n in found if n not in first)]
    return [
        replace(
            column,
            name=name,
            field=f"{column.key}.{name}",
            drop=min(column.drop, 1) if name in first else column.drop,
            spreads=False,
        )
        for name in names
    ]


# Choose the columns of a table, sort its rows, fit it to a terminal, and write it as CSV.


GAP = 2


@dataclass(frozen=True, slots=True)
class View:
    """The choices of `--columns`, `--sort` and `--csv`."""

    #: Headings or fields, in the order of the columns; empty for the usual ones.
    columns: Sequence[str] = ()
    sort: str = ""  # a heading or field; after `-` the greatest value comes first
    is_csv: bool = False  # whether values are printed for programs

    def of(self, table: Table) -> Table:
        """Return a table with the wanted columns and the wanted order."""
        chosen = [column for name in self.columns for column in _named(name, table, "--columns")]
        rows = table.rows
        if self.sort:
            name = self.sort.removeprefix("-")
            (by, *_) = _named(table.sorts.get(name, name), table, "--sort")
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
    values = []
    for row in table.rows:
        with suppress(KeyError):
            values.append(field_of(row, name))
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
        case int() | float() | tuple():
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
    """Return the numbers of the columns that fit a width."""
    kept, left = [], width + GAP
    for i in sorted(range(len(columns)), key=lambda i: columns[i].drop):
        if not columns[i].drop or least[i] + GAP <= left:
            kept.append(i)
            left -= least[i] + GAP
    return sorted(kept)
