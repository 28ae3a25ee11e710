"""Check a stored skeleton against the tensors that are stored with it.

Both may be hostile, and each can be valid alone: a skeleton may name an array that does not exist,
or a string made of floats. This module makes no array and imports no library, so a machine that
cannot load the states of a store can still verify them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Protocol

from holdfast.registry.errors import Malformed
from holdfast.registry.pytree.paths import Trail
from holdfast.registry.pytree.survey import walk
from holdfast.registry.values import ITEM_SIZES, Json

_LIMIT = 2**63


class _Stored(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_arrays(name: str, skeleton: Json, tensors: Sequence[_Stored]) -> None:
    """Check that a skeleton fits the tensors that are stored with it."""
    count = 0
    for index, tag, path in walk(name, skeleton):
        count += 1
        if index < len(tensors) and (tag != "t" or 0 in tensors[index].shape):
            _check(path, tag, tensors[index].dtype, tensors[index].shape)
    if count != len(tensors):
        raise Malformed(
            "the skeleton does not fit the tensors of its component",
            where=name,
            expected=f"{len(tensors)} tensors",
            found=count,
        )


def _check(path: Trail, tag: str, dtype: str, shape: tuple[int, ...]) -> None:
    fits = {"t": True, "n": True, "nt": dtype == "int64"}.get(tag)
    if fits is None:
        fits = dtype == "uint8" and len(shape) == 1
    if not fits or (0 in shape and not _is_possible(tag, dtype, shape)):
        raise Malformed(
            "a tensor does not fit its type in the skeleton",
            where=path,
            expected=_EXPECTED[tag],
            found=f"{dtype}{list(shape)}",
        )


def _is_possible(tag: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a library can make an empty array of a shape: some lengths overflow.

    The manifest bounds the bytes of arrays that are not empty.
    """
    if tag != "t":
        return prod(filter(None, shape)) * ITEM_SIZES[dtype] < _LIMIT
    strides = accumulate((max(length, 1) for length in reversed(shape[1:])), mul, initial=1)
    # torch counts elements in unsigned integers, and strides in signed ones.
    return max(accumulate(shape, mul)) < 2 * _LIMIT and max(strides) < _LIMIT


_LENGTHS = "and of lengths that do not overflow"
_EXPECTED = {
    "t": f"a tensor {_LENGTHS}",
    "n": f"an array {_LENGTHS}",
    "nt": f"an array of int64 {_LENGTHS}",
    **dict.fromkeys(("B", "BA", "S"), "uint8 with one axis"),
}
