"""Floating-point elements made narrower, to the nearest number, and wider again, exactly.

Owns the arithmetic on memory, in blocks that fit the processor's cache. A float32 gives the bits
that torch gives, a NaN one that depends on nothing but its own bits: on whose processor a state is
saved must not show in its id, and the NaNs of torch depend on which of its kernels ran. A float64
is rounded to float32 on its way, as torch does. Imports numpy, so others import it where they first
need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.registry.values.dtypes import ITEM_SIZES

#: Elements looked at in one go.
_BLOCK = 2**16
#: Numbers that stay finite; a few more do, too.
_SURELY_FINITE = {"float16": 65504.0, "bfloat16": 2.0**127}

#: float32 bits of the greatest number that rounds to zero, half of the least one there is (a tie).
_VANISHES = {"float16": 0x3300_0000, "bfloat16": 0x8000}

_Array = np.ndarray[Any, Any]


def narrow(data: memoryview, original: str, dtype: str) -> memoryview:
    """Return elements in a narrower type: to the nearest, of two as near to the even one.

    Args:
        data: The elements, float32 or float64.
        original: Their type.
        dtype: float16 or bfloat16.
    """
    source = _elements(data, original)
    made = memoryview(bytearray(2 * len(source)))
    words = np.frombuffer(made, dtype="<u2")
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(source)):
            words[start:stop] = _rounded(source[start:stop], dtype)
    return made


def parts(data: memoryview, dtype: str) -> Iterator[tuple[memoryview, int, int]]:
    """Yield elements in copies, each good until the next, with the numbers of the first and last.

    A program that writes to the elements meanwhile does not change the copy: all checks of a copy
    see the same numbers.

    Args:
        data: The elements.
        dtype: Their type.
    """
    item = ITEM_SIZES[dtype]
    copy = memoryview(bytearray(min(len(data), _BLOCK * item)))
    for start, stop in _blocks(len(data) // item):
        part = copy[: (stop - start) * item]
        part[:] = data[start * item : stop * item]
        yield part, start, stop


def overflow(data: memoryview, original: str, dtype: str) -> float | None:
    """Return the number of the greatest modulus if a narrower type makes infinity of it.

    NaN and infinities are passed over. Args are those of `narrow`.
    """
    source = _elements(data, original)
    low = high = 0.0
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(source)):
            found = _extremes(source[start:stop])
            low, high = min(low, found[0]), max(high, found[1])
        # Rounding keeps order, so that the rest is finite if this one is.
        largest = low if -low > high else high
        if abs(largest) <= _SURELY_FINITE[dtype]:
            return None
        made = _rounded(np.array([largest], source.dtype), dtype).astype("<u2")
        widened = _widened(made, dtype, "float32")
    return largest if math.isinf(float(widened[0])) else None


def vanishing(data: memoryview, original: str, dtype: str) -> tuple[int, int]:
    """Return how many elements that are not zero a narrower type makes zeros of, of how many.

    Args are those of `narrow`. What goes from float32 to bfloat16 is not looked at: it loses
    nothing but numbers below 1e-40, which float32 itself holds with a few bits only.
    """
    if dtype == "bfloat16" and original == "float32":
        return 0, 0
    source = _elements(data, original)
    lost = nonzero = 0
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(source)):
            block = source[start:stop]
            some = int(np.count_nonzero(block))
            bits = block.astype("<f4", copy=False).view("<u4") & np.uint32(0x7FFF_FFFF)
            small = int(np.count_nonzero(bits <= np.uint32(_VANISHES[dtype])))
            lost += small - (len(block) - some)
            nonzero += some
    return lost, nonzero


def widen(memory: memoryview, dtype: str, original: str) -> None:
    """Make elements wider where they lie; exact.

    Args:
        memory: Room for the elements in `original`; the elements themselves, in `dtype`, fill its
            end (`tail`).
        dtype: float16 or bfloat16.
        original: float32 or float64.
    """
    made = _elements(memory, original)
    source = np.frombuffer(tail(memory, dtype, original), dtype="<u2")
    with np.errstate(all="ignore"):
        # A block is widened aside, and written before what has not been read yet begins: of n
        # elements of W bytes, and w before, k W <= n (W - w) + k w for every k <= n.
        for start, stop in _blocks(len(made)):
            made[start:stop] = _widened(source[start:stop], dtype, original)


def tail(memory: memoryview, dtype: str, original: str) -> memoryview:
    """Return the end of the memory of elements in `original` that they take in `dtype`."""
    count = len(memory) // ITEM_SIZES[original]
    return memory[len(memory) - count * ITEM_SIZES[dtype] :]


def _elements(memory: memoryview, dtype: str) -> _Array:
    return np.frombuffer(memory, dtype=np.dtype(dtype).newbyteorder("<"))


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)


def _extremes(block: _Array) -> tuple[float, float]:
    """Return the least and the greatest finite element; zeros where there is none."""
    low, high = float(block.min()), float(block.max())
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    block = block[np.isfinite(block)]
    return (float(block.min()), float(block.max())) if block.size else (0.0, 0.0)


def _rounded(block: _Array, dtype: str) -> _Array:
    """Return the bits of elements, rounded, in the low halves of 32 or in 16 bits."""
    single = block.astype("<f4", copy=False)
    bits = single.view("<u4")
    # The upper half, and one more where the lower is over half, or half and the upper odd.
    if dtype == "bfloat16":
        made = (bits >> np.uint32(16)) & np.uint32(1)
        made += np.uint32(0x7FFF)
        made += bits
        made >>= np.uint32(16)
    else:
        made = single.astype("<f2").view("<u2")
    if math.isnan(float(single.max())):  # cheaper than to look at each
        nan = np.isnan(single)
        made[nan] = _nan(bits[nan], dtype)
    return made


def _nan(bits: _Array, dtype: str) -> _Array:
    """Return NaNs of 16 bits: the same sign, quiet, and what there is room for of the payload."""
    shift, quiet = (16, 0x0040) if dtype == "bfloat16" else (13, 0x0200)
    exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
    payload = (bits >> np.uint32(shift)) & np.uint32(quiet - 1)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    made: _Array = sign | np.uint32(exponent | quiet) | payload
    return made


def _widened(bits: _Array, dtype: str, original: str) -> _Array:
    """Return elements of 16 bits as what they mean, in memory of their own."""
    if dtype == "bfloat16":
        single = (bits.astype("<u4") << np.uint32(16)).view("<f4")
        return single.astype("<f8") if original == "float64" else single
    return bits.view("<f2").astype("<f8" if original == "float64" else "<f4")
