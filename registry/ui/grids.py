"""Grids of coloured cells: tables that show numbers as text and compare them by colour.

Plotly's heat map sets styles that the Content-Security-Policy refuses; a table needs no script, and
a screen reader reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Steps of a scale of colours; the stylesheet has a class for each.
STEPS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a grid."""

    text: str  # its number, short
    about: str  # a sentence for hovering and for screen readers
    tone: str = ""  # class of its colour: `hi-1` to `hi-8`, `lo-1` to `lo-8`, or none


@dataclass(frozen=True, slots=True)
class Grid:
    """A table with coloured cells."""

    title: str
    about: str  # a sentence about its content
    columns: tuple[str, ...]  # names of the columns
    #: The name of each row, with its cells; `None` for an empty one.
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    scale: tuple[str, str]  # the ends of the scale of colours, in words: lowest and highest
    is_diverging: bool = False  # whether the scale has a middle without colour


def tone(share: float) -> str:
    """Return the colour of a value on a scale from 0 to 1."""
    step = round(min(max(share, 0.0), 1.0) * STEPS)
    return f"hi-{step}" if step else ""


def diverging_tone(share: float) -> str:
    """Return the colour of a value on a scale from 0 to 1 with a colourless middle."""
    away = 2 * min(max(share, 0.0), 1.0) - 1
    step = round(abs(away) * STEPS)
    return f"{'hi' if away > 0 else 'lo'}-{step}" if step else ""
