"""Check the arguments of a merge: sources, weights, `average` and `pick`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.loading.stored import Stored

#: A chunk is computed from those of all sources at once, so their number bounds memory.
MAX_SOURCES = 32
#: The sum of weights may differ from 1 by this, because decimals are rounded.
_NEAR_ONE = 1e-9


def check_sources(sources: object) -> list[Any]:
    """Return the sources as a list; its items are checked later.

    Raises:
        InvalidInput: It is no iterable.
    """
    return [sources] if isinstance(sources, Stored) else _listed(sources, "sources", "checkpoints")


def check_average(average: object) -> list[str] | None:
    """Return the names of components and patterns to average.

    Raises:
        InvalidInput: They are not strings.
    """
    if average is None:
        return None
    expected = "names of components, or patterns of paths"
    names = [average] if isinstance(average, str) else _listed(average, "average", expected)
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidInput("not a name", where="average", expected=expected, found=shown(name))
    return names


def check_pick(pick: object) -> dict[str, Any]:
    """Return the picks by name; their states are checked later.

    Raises:
        InvalidInput: It is no dict of names.
    """
    if pick is None:
        return {}
    if not isinstance(pick, Mapping) or not all(isinstance(name, str) and name for name in pick):
        raise InvalidInput(
            "`pick` is not a dict of names",
            where="pick",
            expected="a dict of names of components, or patterns of paths, to checkpoints",
            found=shown(pick),
        )
    return dict(pick)


def check_weights(weights: object, count: int) -> tuple[float, ...]:
    """Return the weight of each source: equal ones where none are given.

    Raises:
        InvalidInput: They are not as many finite numbers, or do not sum to 1.
    """
    if not 1 <= count <= MAX_SOURCES:
        raise InvalidInput(
            "not a number of sources that a merge takes",
            expected=f"1 to {MAX_SOURCES}",
            found=count,
            hint="Merge some of them first, with weights to match." if count else "",
        )
    if weights is None:
        return (1 / count,) * count
    given = _listed(weights, "weights", f"{count} finite numbers")
    numbers = [_number(one) for one in given]
    if len(given) != count or not all(map(math.isfinite, numbers)):
        raise InvalidInput(
            "a merge needs one weight for each source",
            where="weights",
            expected=f"{count} finite numbers",
            found=shown(given),
        )
    total = math.fsum(numbers)
    if abs(total - 1) > _NEAR_ONE:
        shares = ", ".join(repr(one / total) for one in numbers) if total else ""
        raise InvalidInput(
            "the weights do not sum to 1",
            where="weights",
            expected="numbers whose sum is 1; negative ones are allowed",
            found=f"{', '.join(map(repr, numbers))}: {total!r}",
            hint=f"Divided by their sum they are {shares}." if shares else "",
        )
    return tuple(numbers)


def shown(value: object) -> str:
    """Return a short text of anything, for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} too long to show"


def _listed(given: object, where: str, expected: str) -> list[Any]:
    if not isinstance(given, Iterable):
        raise InvalidInput(
            f"{where} of a merge is not a list",
            where=where,
            expected=expected,
            found=shown(given),
            hint="Give a list.",
        )
    return list(given)


def _number(one: object) -> float:
    """Return a finite number as it is, and anything else as NaN."""
    if not isinstance(one, int | float) or isinstance(one, bool):
        return math.nan
    try:
        return float(one)
    except OverflowError:  # an integer beyond all floats
        return math.nan
