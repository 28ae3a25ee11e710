"""Sizes and numbers as people read them, with few digits."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int) -> str:
    """Return a size for people: three digits and a binary unit."""
    amount = float(nbytes)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def number(value: float) -> str:
    """Return a number with at most six digits."""
    return f"{value:.6g}" if math.isfinite(value) else str(value)
