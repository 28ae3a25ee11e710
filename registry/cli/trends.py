"""Sparklines: how a number changed, as a word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
_CROSS = "×"
#: The most characters of a sparkline.
_WIDTH = 16


def sparkline(values: Sequence[float | None]) -> str:
    """Return a bar for each value, or for the mean of several.

    Where none is finite it has a cross, and where there is none at all a space.
    """
    count = min(len(values), _WIDTH)
    bounds = [len(values) * i // count for i in range(count + 1)] if count else []
    parts = [values[a:b] for a, b in pairwise(bounds)]
    means = [_mean(part) for part in parts]
    known = [one for one in means if one is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join(
        (_CROSS if there(part) else " ") if one is None else _bar(one, low, high)
        for one, part in zip(means, parts, strict=True)
    ).rstrip()


def there(values: Iterable[float | None]) -> list[float]:
    """Return the values that there are."""
    return [one for one in values if one is not None]


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that there are, without NaN and infinity."""
    return [one for one in there(values) if math.isfinite(one)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = finite(values)
    return math.fsum(one / len(known) for one in known) if known else None


def _bar(value: float, low: float, high: float) -> str:
    # Halves, since the difference of two finite numbers may be infinite.
    extent = high / 2 - low / 2
    share = (value / 2 - low / 2) / extent if extent else 0.5
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
