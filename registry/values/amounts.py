"""Sizes, numbers, shares, times and lists as people read them: few digits, few parts.

Also known names that are near to a mistyped one, and checks of what a caller gives: whole numbers,
seconds, one of several words.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import get_args

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, NotFound


def near(name: str, known: Iterable[str]) -> str | None:
    """Return "Did you mean ...?" with the known names nearest to `name`, or `None`."""
    from difflib import get_close_matches  # only errors need it

    names = list(known)
    found = [one for one in names if one.casefold() == name.casefold()]
    found = found or get_close_matches(name, names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(repr(match) for match in found)}?" if found else None


def unknown(what: str, where: object, name: str, known: Iterable[str], none: str = "") -> NotFound:
    """Return the error for a name that is not among those that there are."""
    names = list(known)
    expected = ", ".join(names) or none or "none"
    return NotFound(what, where=f"{where}: {name}", expected=expected, hint=near(name, names))


def whole(
    value: object, where: str, *, bits: int = 64, least: int = 0, what: str = "out of range"
) -> int:
    """Return a whole number as an int; a truth value is none."""
    try:
        number = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not least <= number < 2**bits:
        expected = f"a whole number from {least}, below 2^{bits}"
        raise InvalidInput(what, where=where, expected=expected, found=quoted(value))
    return number


def seconds(value: object, where: str, *, what: str = "not a time") -> float:
    """Return a time of a caller in seconds; a truth value is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Longer times, in milliseconds, would not fit the integers of a log.
    if not is_number or not 0 < value <= 1e12:  # type: ignore[operator]  # checked just before
        expected = "a number of seconds above 0, at most 10^12"
        raise InvalidInput(what, where=where, expected=expected, found=quoted(value))
    return float(value)  # type: ignore[arg-type]


def one_of(value: object, kind: object, *, what: str, where: str | None = None) -> None:
    """Refuse a value of a caller that is none of the words of a `Literal`."""
    if value not in (words := get_args(kind)):
        raise InvalidInput(what, where=where, expected=" or ".join(words), found=quoted(value))


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


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


def metrics(values: Mapping[str, float]) -> str:
    """Return metrics on one line."""
    return " ".join(f"{name}={number(value)}" for name, value in values.items())


def share(part: float) -> str:
    """Return a share in per cent, three digits; `100%` is all of it and `0%` nothing."""
    return "100%" if part == 1 else f"{min(100 * part, 99.9):.3g}%"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in the plural unless there is one."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def abridged(parts: Sequence[str], between: str = "; ", *, most: int = 8) -> str:
    """Join the first of many parts, and say how many more there are."""
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return between.join([*parts[:most], *more])


def age(time_ms: int) -> str:
    """Return how long ago a time of the log was, in its largest unit."""
    seconds = int(time.time() - time_ms / 1000)
    for length, unit in _AGES:
        if abs(seconds) >= length:
            return f"{seconds // length} {unit}" if seconds > 0 else "in the future"
    return "now"


def duration(seconds: float) -> str:
    """Return a time span in its largest unit."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.2g} s"
