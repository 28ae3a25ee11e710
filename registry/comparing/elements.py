"""Statistics and differences of stored elements of every element type.

Works in blocks that fit the processor's cache. Integers are exact; everything else is computed in
float64. Needs neither torch nor ml_dtypes: types that NumPy does not have are read by their bits.
Imports numpy, so others import this module where they first need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from holdfast.registry.values import FLOATING, item_size

#: Elements in a block.
_BLOCK = 2**16
#: Squares of numbers in this range neither overflow nor vanish.
_SAFE = (1e-140, 1e140)
#: Keeps the sum of a block of the largest numbers in range.
_SHRINK = 17
#: Dtype -> (bits of the mantissa, bias of the exponent).
_FLOAT8 = {
    "float8_e4m3fn": (3, 7),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2": (2, 15),
    "float8_e5m2fnuz": (2, 16),
}
#: Complex type -> type of its parts.
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of some elements of one type."""

    count: int = 0
    nans: int = 0  # number of NaN elements; complex ones count if either part is NaN
    infs: int = 0  # number of infinite elements that are not NaN
    zeros: int = 0  # number of zeros of either sign
    #: The least finite element; `None` without one, and for complex types.
    low: int | float | None = None
    high: int | float | None = None  # the greatest finite element, likewise
    #: Exact sum of the sums of blocks of finite elements; of the real parts if complex.
    total: Fraction = Fraction(0)
    imaginary: Fraction = Fraction(0)  # the same sum of the imaginary parts
    norm: float = 0.0  # root of the sum of the squared moduli of finite elements

    @property
    def finite(self) -> int:
        """Number of elements that are neither NaN nor infinite."""
        return self.count - self.nans - self.infs


@dataclass(frozen=True, slots=True)
class Change:
    """The differences between elements before and after."""

    changed: int = 0  # number of elements whose bits differ
    #: Changed elements that are NaN or infinite before or after; the other figures skip them.
    nonfinite: int = 0
    largest: int | float = 0  # the greatest modulus of a difference
    norm: float = 0.0  # root of the sum of the squared moduli of the differences
    norm_before: float = 0.0  # the same of the elements before


def summarise(data: memoryview, dtype: str) -> Summary:
    """Return the statistics of elements."""
    number = _summarise_integers if _is_integer(dtype) else _summarise_floats
    number = _summarise_complex if dtype in PARTS else number
    with np.errstate(all="ignore"):
        return join([number(_numbers(block, dtype)) for (block,) in blocks(dtype, data)])


def join(parts: Iterable[Summary]) -> Summary:
    """Return one summary of several."""
    parts = list(parts)
    return Summary(
        sum(part.count for part in parts),
        sum(part.nans for part in parts),
        sum(part.infs for part in parts),
        sum(part.zeros for part in parts),
        min((part.low for part in parts if part.low is not None), default=None),
        max((part.high for part in parts if part.high is not None), default=None),
        sum((part.total for part in parts), Fraction(0)),
        sum((part.imaginary for part in parts), Fraction(0)),
        math.hypot(*(part.norm for part in parts)),
    )


def histogram(
    parts: Sequence[memoryview], dtype: str, bins: int
) -> tuple[Summary, tuple[float, ...], tuple[int, ...]]:
    """Count the finite elements in bins of equal width; of complex ones both parts."""
    found = join(summarise(part, dtype) for part in parts)
    real = PARTS.get(dtype, dtype)
    within = found if real == dtype else join(summarise(part, real) for part in parts)
    if within.low is None or within.high is None:
        return found, (), ()
    low, high, shift = _bounds(float(within.low), float(within.high), bins)
    edges = np.linspace(low, high, bins + 1)
    counts = np.zeros(bins, np.int64)
    with np.errstate(all="ignore"):
        for part in parts:
            for (block,) in blocks(real, part):
                numbers = np.ldexp(_numbers(block, real).astype("f8"), -shift)
                counts += np.histogram(numbers[np.isfinite(numbers)], bins, (low, high))[0]
    return found, tuple(np.ldexp(edges, shift).tolist()), tuple(counts.tolist())


def _bounds(low: float, high: float, bins: int) -> tuple[float, float, int]:
    """Return the ends of a histogram, divided by a power of two, and that power.

    The width of a bin must be finite, and greater than the distance of neighbouring numbers.
    """
    shift = 0 if math.isfinite(high - low) else 2
    low, high = math.ldexp(low, -shift), math.ldexp(high, -shift)
    middle, least = low / 2 + high / 2, 4 * bins * math.ulp(max(-low, high))
    if low == high:
        least = max(least, abs(middle) or 1.0)
    if high - low < least:
        low, high = middle - least / 2, middle + least / 2
    return low, high, shift


def compare(before: memoryview, after: memoryview, dtype: str) -> Change:
    """Compare two buffers with the same number of elements, one by one."""
    with np.errstate(all="ignore"):
        return join_changes(
            [_compare(old, new, dtype) for old, new in blocks(dtype, before, after)]
        )


def join_changes(parts: Iterable[Change]) -> Change:
    """Return one change of several."""
    parts = list(parts)
    return Change(
        sum(part.changed for part in parts),
        sum(part.nonfinite for part in parts),
        max((part.largest for part in parts), default=0),
        math.hypot(*(part.norm for part in parts)),
        math.hypot(*(part.norm_before for part in parts)),
    )


# Bytes to numbers


def _is_integer(dtype: str) -> bool:
    return dtype not in FLOATING and dtype not in PARTS


def blocks(dtype: str, *data: memoryview) -> Iterator[tuple[memoryview, ...]]:
    """Yield the same block of elements of each; blocks fit the processor's cache."""
    size = _BLOCK * item_size(dtype)
    for start in range(0, len(data[0]), size):
        yield tuple(one[start : start + size] for one in data)


def _numbers(data: memoryview, dtype: str) -> _Array:
    """Return elements: integers as they are, bools as 0 and 1, complex ones as rows of two."""
    if dtype in PARTS:
        return _numbers(data, PARTS[dtype]).reshape(-1, 2)
    if dtype == "bool":
        bits: _Array = (np.frombuffer(data, "u1") != 0).astype("u1")
        return bits
    found = decoded(data, dtype)
    return found.astype("f8") if dtype in FLOATING else found


def decoded(data: memoryview, dtype: str) -> _Array:
    """Return the elements of a type that is not complex in a type of NumPy; always exact."""
    found: _Array
    if dtype == "bfloat16":
        # The upper half of a float32.
        found = (np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    elif dtype.startswith("float8"):
        found = float8_values(dtype)[np.frombuffer(data, "u1")]
    else:
        found = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    return found


@lru_cache
def float8_values(dtype: str) -> _Array:
    """Return the number that each of the 256 bytes of a type stands for."""
    if dtype == "float8_e8m0fnu":
        return np.array([*(2.0 ** (code - 127) for code in range(255)), math.nan])
    bits, bias = _FLOAT8[dtype]
    below = [_small_float(code, bits, bias) for code in range(128)]
    if dtype.endswith("uz"):  # no negative zero: its code is the one NaN
        return np.array([*below, math.nan, *(-value for value in below[1:])])
    if dtype == "float8_e4m3fn":
        below[-1] = math.nan
    else:
        below[0x7C:] = [math.inf, math.nan, math.nan, math.nan]
    return np.array([*below, *(-value for value in below)])


def _small_float(code: int, bits: int, bias: int) -> float:
    exponent, mantissa = code >> bits, code & (1 << bits) - 1
    if not exponent:
        return math.ldexp(mantissa, 1 - bias - bits)
    return math.ldexp((1 << bits) + mantissa, exponent - bias - bits)


# Summaries


def _summarise_integers(found: _Array) -> Summary:
    return Summary(
        count=found.size,
        zeros=found.size - int(np.count_nonzero(found)),
        low=int(found.min()),
        high=int(found.max()),
        total=Fraction(_exact_sum(found)),
        norm=_norm(found.astype("f8")),
    )


def _exact_sum(found: _Array) -> int:
    if found.itemsize < 8:
        return int(found.sum(dtype="i8"))
    # By halves, since the sum need not fit in 64 bits.
    upper, lower = found >> 32, found & 0xFFFF_FFFF
    return (int(upper.sum()) << 32) + int(lower.sum())


def _summarise_floats(found: _Array) -> Summary:
    count, nans = found.size, 0
    low, high = float(found.min()), float(found.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        nans = int(np.isnan(found).sum())
        found = found[np.isfinite(found)]
        if not found.size:
            return Summary(count, nans, count - nans)
        low, high = float(found.min()), float(found.max())
    zeros = found.size - int(np.count_nonzero(found))
    return Summary(
        count, nans, count - nans - found.size, zeros, low, high, _sum(found), norm=_norm(found)
    )


def _summarise_complex(found: _Array) -> Summary:
    count = len(found)
    nans = int(np.isnan(found).any(axis=1).sum())
    found = found[np.isfinite(found).all(axis=1)]
    zeros = int((found == 0).all(axis=1).sum())
    return Summary(
        count=count,
        nans=nans,
        infs=count - nans - len(found),
        zeros=zeros,
        total=_sum(found[:, 0]),
        imaginary=_sum(found[:, 1]),
        norm=_norm(found),
    )


def _sum(found: _Array) -> Fraction:
    total = float(found.sum())
    if math.isfinite(total):
        return Fraction(total)
    return Fraction(float(np.ldexp(found, -_SHRINK).sum())) * Fraction(2) ** _SHRINK


def _norm(found: _Array) -> float:
    """Return the root of the sum of squares of finite numbers; infinity where it is too large."""
    if not found.size:
        return 0.0
    largest = max(abs(float(found.min())), abs(float(found.max())))
    if largest == 0 or not math.isfinite(largest):
        return largest
    shift = 0
    if not _SAFE[0] < largest < _SAFE[1]:
        shift = math.frexp(largest)[1]
        found = np.ldexp(found, -shift)
    norm = math.sqrt(float(np.square(found).sum()))
    try:
        return math.ldexp(norm, shift)
    except OverflowError:
        return math.inf


# Changes


def _compare(before: memoryview, after: memoryview, dtype: str) -> Change:
    differs = _differing(before, after, dtype)
    changed = int(np.count_nonzero(differs))
    old = _numbers(before, dtype)
    if _is_integer(dtype):
        apart = _apart(old, _numbers(after, dtype))
        norms = _norm(apart.astype("f8")), _norm(old.astype("f8"))
        return Change(changed, 0, int(apart.max()), *norms)
    new = _numbers(after, dtype)
    sound: _Array = np.isfinite(old) & np.isfinite(new)
    if sound.ndim == 2:
        sound = np.all(sound, axis=1)
    old, new = (old, new) if sound.all() else (old[sound], new[sound])
    apart = new - old
    moduli = np.hypot(apart[:, 0], apart[:, 1]) if apart.ndim == 2 else np.abs(apart)
    return Change(
        changed,
        int(np.count_nonzero(differs & ~sound)),
        float(moduli.max()) if moduli.size else 0.0,
        _norm(apart),
        _norm(old),
    )


def _differing(before: memoryview, after: memoryview, dtype: str) -> _Array:
    """Return for each element whether its bits differ."""
    words = f"u{item_size(PARTS.get(dtype, dtype))}"
    differs: _Array = np.not_equal(np.frombuffer(before, words), np.frombuffer(after, words))
    return np.any(differs.reshape(-1, 2), axis=1) if dtype in PARTS else differs


def _apart(old: _Array, new: _Array) -> _Array:
    """Return the exact distances of integers: unsigned they always fit in 64 bits."""
    apart: _Array = np.maximum(old, new).astype("u8") - np.minimum(old, new).astype("u8")
    return apart
