"""Weighted averages of stored elements: accumulated in float32 or float64, rounded once.

An element that is equal in all sources keeps its bits. So the result depends only on the elements,
and not on how tensors are cut into chunks or which chunks are equal. Needs neither torch nor
ml_dtypes. Imports numpy, so others import this module where they first need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from holdfast.registry.comparing import PARTS, blocks, float8_values
from holdfast.registry.values import item_size

_Array = np.ndarray[Any, Any]


def average(
    sources: Sequence[memoryview], weights: Sequence[float], dtype: str, into: memoryview
) -> bool:
    """Write the weighted sum of elements, in the order of the sources.

    Each product and each sum is one operation in float32 (in float64 for float64 and complex128)
    with the weight rounded to that type first; the last sum is rounded to the stored type, ties to
    even. A source of weight 0 adds nothing, not even a NaN.
    """
    overflows = False
    kind = PARTS.get(dtype, dtype)
    wide = np.dtype("f8") if kind == "float64" else np.dtype("f4")
    with np.errstate(all="ignore"):
        for *data, out in blocks(kind, *sources, into):
            words = [np.frombuffer(one, f"<u{item_size(kind)}") for one in data]
            equal = words[0] == words[1] if len(words) > 1 else np.ones(words[0].shape, "?")
            for one in words[2:]:
                equal &= words[0] == one
            found = np.frombuffer(out, words[0].dtype)
            found[...] = _rounded(_sum(data, weights, kind, wide), kind)
            np.copyto(found, words[0], where=equal)
            overflows = overflows or _overflows(out, data, weights, kind)
    return overflows


def _overflows(
    made: memoryview, data: Sequence[memoryview], weights: Sequence[float], kind: str
) -> bool:
    wrong = ~np.isfinite(_widened(made, kind))
    if not wrong.any():
        return False
    for one, weight in zip(data, weights, strict=True):
        if weight:
            wrong &= np.isfinite(_widened(one, kind))
    return bool(wrong.any())


def _sum(data: Sequence[memoryview], weights: Sequence[float], kind: str, wide: Any) -> _Array:
    total: _Array | None = None
    for one, weight in zip(data, weights, strict=True):
        if weight:
            product = _widened(one, kind) * wide.type(weight)
            total = product if total is None else np.add(total, product, out=total)
    if total is None:
        total = np.zeros(len(data[0]) // item_size(kind), wide)
    return total


def _widened(data: memoryview, kind: str) -> _Array:
    """Return elements as float32, and float64 elements as they are; always exact."""
    found: _Array
    if kind == "bfloat16":
        # The upper half of a float32.
        found = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        found = found.view("<f4")
    elif kind.startswith("float8"):
        found = float8_values(kind).astype("f4")[np.frombuffer(data, "u1")]
    else:
        found = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
        found = found.astype("f4") if kind == "float16" else found
    return found


def _rounded(total: _Array, kind: str) -> _Array:
    """Return the bits of the nearest element of each number."""
    if kind == "bfloat16":
        bits = total.view("u4")
        # To nearest, ties to even: up by a half less one, and by one more above an odd result.
        up = (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)
        rounded = ((bits + up) >> np.uint32(16)).astype("u2")
        return np.where(np.isnan(total), np.uint16(0x7FC0), rounded)
    if kind.startswith("float8"):
        return _rounded_float8(total, kind)
    # The bits of a NaN in a sum depend on its position in numpy's loops: make all of them equal.
    np.copyto(total, np.nan, where=np.isnan(total))
    return total.astype(kind).view(f"u{item_size(kind)}")


def _rounded_float8(total: _Array, kind: str) -> _Array:
    middles = _middles(kind)
    magnitude = np.abs(total.astype("f8"))
    code = np.searchsorted(middles, magnitude)  # below each middle, and at it, what is smaller
    tied = middles[np.minimum(code, len(middles) - 1)] == magnitude
    code += tied & (code % 2 == 1)
    if kind.endswith("uz"):  # 0x80, the code after the greatest number, is NaN; there is no -0
        code[np.signbit(total) & (code > 0) & (code < 0x80)] += 0x80
        code[np.isnan(total)] = 0x80
    else:
        code[np.isnan(total)] = 0x7F
        code[np.signbit(total)] += 0x80
    rounded: _Array = code.astype("u1")
    return rounded


@lru_cache
def _middles(kind: str) -> _Array:
    """Return the numbers half way between one code's number and the next code's.

    The last one is between the greatest number and the one that would follow it: larger numbers
    round to the next code, which is infinity or NaN, depending on the type.
    """
    values = float8_values(kind)[:0x80]
    values = values[np.isfinite(values)]
    values = np.append(values, 2 * values[-1] - values[-2])
    middles: _Array = (values[:-1] + values[1:]) / 2
    return middles
