"""Axes of charts in units of bytes."""

from __future__ import annotations

import math
from typing import Any

from holdfast.registry.values.amounts import size

#: About as many steps has an axis.
_STEPS = 5


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
