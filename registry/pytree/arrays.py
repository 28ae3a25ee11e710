"""The memory that loading fills: of a new array, or of one that exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.pytree import libraries, refusals, tensor_bytes
from holdfast.registry.values import item_size

Destination = tuple[object, memoryview]


def allocate(dtype: str, shape: tuple[int, ...], kind: str) -> Destination:
    """Return a new array and its flat, writable bytes, which are not cleared."""
    allocator = _ALLOCATORS.get(kind)
    if allocator is None:
        allocator = _allocator(kind)
    return allocator(dtype, shape)


def unread(dtype: str, shape: tuple[int, ...], kind: str) -> object:
    """Return an array or `TensorBytes` of this type and shape that takes no memory for its bytes.

    Only its description may be used: an array repeats one element, `TensorBytes` have no bytes.
    """
    if kind == "numpy":
        return libraries.numpy_wrapper().repeated(dtype, shape)
    return tensor_bytes.TensorBytes(dtype, shape, memoryview(b""))


def view_of(target: object) -> memoryview | None:
    """Return the writable bytes of a tensor or array, or None if they cannot be viewed."""
    if refusals.is_tensor_like(target):
        return libraries.torch_wrapper().view_of(target)  # type: ignore[no-any-return]
    if refusals.is_numpy_array(target):
        return libraries.numpy_wrapper().view_of(target)  # type: ignore[no-any-return]
    return None


def describe(target: object) -> tuple[str, tuple[int, ...]]:
    """Return element type and shape of a tensor or array."""
    if refusals.is_tensor_like(target):
        return libraries.torch_wrapper().describe(target)  # type: ignore[no-any-return]
    if refusals.is_numpy_array(target):
        return libraries.numpy_wrapper().describe(target)  # type: ignore[no-any-return]
    raise UnsupportedValue("not a tensor or array", found=type(target).__name__)


def _allocator(kind: str) -> Callable[[str, tuple[int, ...]], Destination]:
    if kind == "torch":
        found: Any = libraries.torch_wrapper().allocate
    elif kind == "numpy":
        found = libraries.numpy_wrapper().allocate
    elif kind == "tensor":
        found = tensor_bytes.allocate_bytes
    elif kind in ("bytes", "str"):
        found = _allocate_bytes
    else:
        raise InvalidInput("unknown kind of array", found=kind)
    _ALLOCATORS[kind] = found
    return found  # type: ignore[no-any-return]


def _allocate_bytes(dtype: str, shape: tuple[int, ...]) -> Destination:
    if dtype != "uint8":
        raise InvalidInput("a byte string is of uint8", found=dtype)
    data = bytearray(math.prod(shape) * item_size(dtype))
    return data, memoryview(data)


_ALLOCATORS: dict[str, Callable[[str, tuple[int, ...]], Destination]] = {}
