"""Tables: each row shows a thing, and each column makes one cell of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        cell: Returns the cell of a thing; by default the attribute that the heading names.
        is_number: Whether it is aligned to the right.
        folds: Whether it may take several lines on a narrow terminal.
    """

    name: str
    cell: Callable[[Any], object] | None = None
    is_number: bool = False
    folds: bool = False

    def show(self, thing: object) -> object:
        """Return the cell of a thing."""
        return self.cell(thing) if self.cell else getattr(thing, self.name)


class Table:
    """Rows below columns.

    Args:
        columns: The columns.
        things: One for each row; a tuple is a row as it is.
    """

    def __init__(self, columns: Sequence[Column], things: Iterable[object]) -> None:
        self.columns = columns
        self.rows = [row(columns, thing) for thing in things]


def row(columns: Iterable[Column], thing: object) -> tuple[object, ...]:
    """Return the cells of a thing; a tuple is a row already."""
    return thing if isinstance(thing, tuple) else tuple(one.show(thing) for one in columns)


def numbers(*names: str) -> tuple[Column, ...]:
    """Return columns of numbers, each named like the attribute that it shows."""
    return tuple(Column(name, is_number=True) for name in names)
