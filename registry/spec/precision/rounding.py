"""Round floating-point elements to a narrower type, and widen them again exactly.

Owns the arithmetic on memory, in blocks that fit the processor's cache. The bits are those of
torch, except for NaN: the result of a NaN depends only on its own bits, since the id of a state
must not depend on the processor, and torch's NaNs depend on the kernel that ran. A float64 is first
rounded to float32, as in torch. This module imports numpy, so others import it at its first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.registry.values import ITEM_SIZES

#: Elements that are processed at once.
_BLOCK = 2**16
#: Numbers up to this stay finite for certain; a few larger ones do, too.
_SURELY_FINITE = {"float16": 65504.0, "bfloat16": 2.0**127}

#: float32 bits of the largest number that rounds to zero: half of the smallest one (a tie).
_VANISHES = {"float16": 0x3300_0000, "bfloat16": 0x8000}

_Array = np.ndarray[Any, Any]


def narrow(data: memoryview, original: str, dtype: str) -> memoryview:
    """Return elements rounded to a narrower type: to the nearest number, ties to even."""
    source = _elements(data, original)
    made = memoryview(bytearray(2 * len(source)))
    words = np.frombuffer(made, dtype="<u2")
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(source)):
            words[start:stop] = _rounded(source[start:stop], dtype)
    return made


def parts(data: memoryview, dtype: str) -> Iterator[tuple[memoryview, int, int]]:
    """Yield copies of parts of the elements, with their start and stop; each lasts until the next.

    The program may write to the elements meanwhile, but all checks of a copy see the same numbers.
    """
    item = ITEM_SIZES[dtype]
    copy = memoryview(bytearray(min(len(data), _BLOCK * item)))
    for start, stop in _blocks(len(data) // item):
        part = copy[: (stop - start) * item]
        part[:] = data[start * item : stop * item]
        yield part, start, stop


def overflow(data: memoryview, original: str, dtype: str) -> float | None:
    """Return the element of the largest magnitude if it would become infinity in a narrower type.

    NaN and infinities are skipped. The arguments are those of `narrow`.
    """
    source = _elements(data, original)
    low = high = 0.0
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(source)):
            found = _extremes(source[start:stop])
            low, high = min(low, found[0]), max(high, found[1])
        # Rounding keeps the order, so if this number stays finite, all others do.
        largest = low if -low > high else high
        if abs(largest) <= _SURELY_FINITE[dtype]:
            return None
        made = _rounded(np.array([largest], source.dtype), dtype).astype("<u2")
        widened = _widened(made, dtype, "float32")
    return largest if math.isinf(float(widened[0])) else None


def vanishing(data: memoryview, original: str, dtype: str) -> tuple[int, int]:
    """Return how many nonzero elements become zero in a narrower type, and how many there are.

    The arguments are those of `narrow`. From float32 to bfloat16 nothing is counted: only numbers
    below 1e-40 become zero, and float32 itself has only a few bits for those.
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
    """Widen elements in place; exact."""
    made = _elements(memory, original)
    source = np.frombuffer(tail(memory, dtype, original), dtype="<u2")
    with np.errstate(all="ignore"):
        # A block is widened in other memory, then written; it ends before the first unread element:
        # for n elements of w bytes, W when widened, k W <= n (W - w) + k w for every k <= n.
        for start, stop in _blocks(len(made)):
            made[start:stop] = _widened(source[start:stop], dtype, original)


def tail(memory: memoryview, dtype: str, original: str) -> memoryview:
    """Return the end of the memory of elements in `original`: the part for them in `dtype`."""
    count = len(memory) // ITEM_SIZES[original]
    return memory[len(memory) - count * ITEM_SIZES[dtype] :]


def _elements(memory: memoryview, dtype: str) -> _Array:
    return np.frombuffer(memory, dtype=np.dtype(dtype).newbyteorder("<"))


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)


def _extremes(block: _Array) -> tuple[float, float]:
    """Return the smallest and the largest finite element; zeros if there is none."""
    low, high = float(block.min()), float(block.max())
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    block = block[np.isfinite(block)]
    return (float(block.min()), float(block.max())) if block.size else (0.0, 0.0)


def _rounded(block: _Array, dtype: str) -> _Array:
    """Return the 16 bits of each rounded element, in an integer of 16 or 32 bits."""
    single = block.astype("<f4", copy=False)
    bits = single.view("<u4")
    # The upper half, plus one if the lower half is above the middle, or there and the upper is odd.
    if dtype == "bfloat16":
        made = (bits >> np.uint32(16)) & np.uint32(1)
        made += np.uint32(0x7FFF)
        made += bits
        made >>= np.uint32(16)
    else:
        made = single.astype("<f2").view("<u2")
    if math.isnan(float(single.max())):  # faster than testing each element
        nan = np.isnan(single)
        made[nan] = _nan(bits[nan], dtype)
    return made


def _nan(bits: _Array, dtype: str) -> _Array:
    """Return NaNs of 16 bits: the same sign, quiet, and the upper bits of the payload."""
    shift, quiet = (16, 0x0040) if dtype == "bfloat16" else (13, 0x0200)
    exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
    payload = (bits >> np.uint32(shift)) & np.uint32(quiet - 1)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    made: _Array = sign | np.uint32(exponent | quiet) | payload
    return made


def _widened(bits: _Array, dtype: str, original: str) -> _Array:
    """Return the values of elements of 16 bits, in new memory."""
    if dtype == "bfloat16":
        single = (bits.astype("<u4") << np.uint32(16)).view("<f4")
        return single.astype("<f8") if original == "float64" else single
    return bits.view("<f2").astype("<f8" if original == "float64" else "<f4")
