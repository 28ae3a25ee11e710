"""What a table of the command line is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        is_number: Whether it is aligned to the right.
        folds: Whether it may take several lines on a narrow terminal.
    """

    name: str
    is_number: bool = False
    folds: bool = False
