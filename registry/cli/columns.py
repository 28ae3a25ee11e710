"""Tables: rows as `--json` prints them, and columns that each show one field of a row.

A column knows the value of a row, for sorting and CSV, and its text, for people. `tables` chooses,
sorts and lays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.registry.values.amounts import number

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        field: The field of a row that it shows, as in `--json`; dots lead into fields. By default
            the heading.
        text: Returns the cell of a value; by default the cell is the value.
        is_number: Whether it is aligned to the right.
        folds: Whether its words may take several lines on a terminal.
        none: The cell where the value is None.
        drop: On a terminal that is too narrow the columns with the highest number are left out
            first, those with 0 never.
        is_picture: Whether it is shown on a terminal only, unless the user names it.
        spreads: Whether the field holds numbers by name, and each name gets a column.
    """

    name: str
    field: str = ""
    text: Callable[[Any], object] = lambda value: value
    is_number: bool = False
    folds: bool = False
    none: str = ""
    drop: int = 0
    is_picture: bool = False
    spreads: bool = False

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
    """Rows below columns.

    Args:
        columns: The columns.
        rows: The rows; fields without a column are shown if the user names them.
        none: A note that is printed in place of an empty table.
        first: Names whose columns come first where a column spreads; they are left out last.
        is_main: Whether `--columns`, `--sort` and `--csv` are about this table.
    """

    def __init__(
        self,
        columns: Iterable[Column],
        rows: Iterable[Row],
        *,
        none: str = "",
        first: Sequence[str] = (),
        is_main: bool = True,
    ) -> None:
        self.rows = list(rows)
        self.columns = [one for column in columns for one in _spread(column, self.rows, first)]
        self.none = none
        self.is_main = is_main


def field_of(row: Any, path: str) -> Any:
    """Return a field of a row; a name in it may itself have dots.

    Raises:
        KeyError: The row does not have it.
    """
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
