"""Tables: each row shows a thing, and each column has a value of it and the text of that value.

The value is for programs and the text for people, so whatever sorts, chooses or exports a list has
its place here, for all commands at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        value: The value of a thing: attributes and keys such as `record.step`, by default the
            heading; or a function of the thing.
        text: Returns the cell of a value; by default the cell is the value.
        is_number: Whether it is aligned to the right.
        folds: Whether it may take several lines on a narrow terminal.
        none: The cell where the value is None.
    """

    name: str
    value: str | Callable[[Any], object] = ""
    text: Callable[[Any], object] = lambda value: value
    is_number: bool = False
    folds: bool = False
    none: str = ""

    def of(self, thing: object) -> object:
        """Return the value of a thing."""
        if callable(self.value):
            return self.value(thing)
        for step in (self.value or self.name).split("."):
            thing = thing[step] if isinstance(thing, Mapping) else getattr(thing, step)
        return thing

    def show(self, thing: object) -> object:
        """Return the cell of a thing."""
        value = self.of(thing)
        return self.none if value is None else self.text(value)


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


def numbers(*names: str, text: Callable[[Any], object] = lambda value: value) -> tuple[Column, ...]:
    """Return columns of numbers; `name=value` is one whose heading is not its value."""
    pairs = (name.rpartition("=") for name in names)
    return tuple(
        Column(heading or value, value, text, is_number=True) for heading, _, value in pairs
    )
