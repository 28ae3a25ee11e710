"""Bytes for people, and axes of charts in the same units."""

from __future__ import annotations

import math
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
#: About as many steps has an axis.
_STEPS = 5


def size(nbytes: int) -> str:
    """Return a number of bytes in its largest binary unit."""
    amount = float(nbytes)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def byte_axis(most: int) -> dict[str, Any]:
    """Return an axis of a chart from 0 to `most` bytes, with steps in binary units."""
    unit = 1024 ** max(0, int(math.log(max(most, 1), 1024)))
    rough = most / unit / _STEPS
    power = 10 ** math.floor(math.log10(rough)) if rough else 1
    step = unit * next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    ticks = [int(step * n) for n in range(int(most / step) + 1)] if most else [0]
    return {
        "rangemode": "tozero",
        "tickvals": ticks,
        "ticktext": [size(tick) for tick in ticks],
    }
