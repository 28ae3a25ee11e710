"""One tensor of a file: dense, or the coordinates and values of its elements that are not zero."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats.thalia.framing import Body
from holdfast.registry.pytree import TensorBytes
from holdfast.registry.pytree import allocate_bytes as allocate
from holdfast.registry.values import item_size

#: Codes of element types.
DTYPES: Final = ("float32", "float64", "int32", "int64", "bool", "float16")
_DENSE, _SPARSE = 0, 1
_MAX_AXES = 64
#: A tensor with more elements than this, of which more than this share is zero, is stored sparse.
_SPARSE_ELEMENTS, _SPARSE_SHARE = 100, 0.9


@dataclass(frozen=True, slots=True)
class TensorHead:
    """The header of a tensor."""

    dtype: str  # element type
    shape: tuple[int, ...]  # lengths of the axes
    is_sparse: bool  # whether it is stored sparse
    nnz: int  # number of stored elements, if it is
    data: int  # position of the elements, or of the coordinates
    end: int  # position behind it

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory."""
        return math.prod(self.shape) * item_size(self.dtype)


def read_head(body: Body, offset: int, where: object) -> TensorHead:
    """Read the header of a tensor; all of the tensor is within the file."""
    encoding, code, axes = struct.unpack("<III", body.read(offset, 12, where))
    if encoding not in (_DENSE, _SPARSE) or code >= len(DTYPES) or axes > _MAX_AXES:
        raise InvalidInput(
            "not the header of a tensor",
            where=f"{body.where}: {where}",
            expected=f"encoding 0 or 1, dtype 0 to {len(DTYPES) - 1}, at most {_MAX_AXES} axes",
            found=f"{encoding}, {code}, {axes}",
        )
    shape = struct.unpack(f"<{axes}I", body.read(offset + 12, 4 * axes, where))
    dtype, data = DTYPES[code], offset + 12 + 4 * axes
    if encoding == _DENSE:
        nbytes = math.prod(shape) * item_size(dtype)
        body.check_range(data, nbytes, where)
        return TensorHead(dtype, shape, is_sparse=False, nnz=0, data=data, end=data + nbytes)
    (nnz,) = struct.unpack("<Q", body.read(data, 8, where))
    if nnz > math.prod(shape):
        raise InvalidInput(
            "a sparse tensor has more elements than its shape",
            where=f"{body.where}: {where}",
            expected=f"at most {math.prod(shape)}",
            found=nnz,
        )
    nbytes = nnz * (8 * axes + item_size(dtype))
    body.check_range(data + 8, nbytes, where)
    return TensorHead(dtype, shape, is_sparse=True, nnz=nnz, data=data + 8, end=data + 8 + nbytes)


def read_tensor(body: Body, head: TensorHead, where: object) -> TensorBytes:
    """Read a tensor; a sparse one becomes dense."""
    tensor, data = allocate(head.dtype, head.shape)
    if not head.is_sparse:
        body.read_into(head.data, data)
    else:
        _scatter(body, head, data, where)
    if head.dtype == "bool" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise InvalidInput("a truth value is neither 0 nor 1", where=f"{body.where}: {where}")
    return tensor


def _scatter(body: Body, head: TensorHead, data: memoryview, where: object) -> None:
    def place() -> str:
        return f"{body.where}: {where}"

    data[:] = bytes(len(data))
    if not head.nnz:
        return
    axes, count = len(head.shape), 8 * len(head.shape) * head.nnz
    raw = bytearray(count)
    body.read_into(head.data, memoryview(raw))
    indices = np.frombuffer(raw, "<i8").reshape(axes, head.nnz)
    bounds = np.array(head.shape, np.int64).reshape(axes, 1)
    if axes and (np.any(indices < 0) or np.any(indices >= bounds)):
        raise InvalidInput(
            "a coordinate is outside of the tensor",
            where=place(),
            found=head.shape,
        )
    flat = np.zeros(head.nnz, np.int64)
    for axis, length in enumerate(head.shape):
        flat = flat * length + indices[axis]
    if has_repeated(flat):
        raise InvalidInput("a coordinate of a sparse tensor is repeated", where=place())
    size = item_size(head.dtype)
    values = bytearray(size * head.nnz)
    body.read_into(head.data + count, memoryview(values))
    elements = np.frombuffer(data, np.dtype(f"V{size}"))
    elements[flat] = np.frombuffer(values, np.dtype(f"V{size}"))


def has_repeated(flat: NDArray[np.int64]) -> bool:
    """Return whether a position of an element is there twice; ascending ones are not sorted."""
    return bool(np.any(flat[1:] <= flat[:-1])) and len(np.unique(flat)) != len(flat)


def encode(
    dtype: str,
    shape: tuple[int, ...],
    data: memoryview,
    put: Callable[[Any], Any],
    *,
    sparse: bool = True,
) -> int:
    """Write a tensor, sparse where the programs of Thalia would; return its length in bytes.

    A tensor with a negative zero is written dense, since the sparse form has no sign for it; one
    of float16 too, since the programs cannot read that sparse.
    """
    values = np.frombuffer(data, _NUMPY[dtype])
    where = _nonzero(values) if sparse and dtype != "float16" else None
    encoding = _DENSE if where is None else _SPARSE
    head = struct.pack(f"<III{len(shape)}I", encoding, DTYPES.index(dtype), len(shape), *shape)
    put(head)
    if where is None:
        put(data)
        return len(head) + data.nbytes
    indices = np.empty((len(shape), len(where)), "<i8")
    for axis, one in enumerate(np.unravel_index(where, shape)):
        indices[axis] = one
    chosen = values[where]
    put(struct.pack("<Q", len(where)))
    for part in (indices, chosen):
        put(memoryview(part.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
    return len(head) + 8 + indices.nbytes + chosen.nbytes


_NUMPY: Final = {
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
    "bool": "?",
    "float16": "<f2",
    "int8": "|i1",  # only in the layout of the document
}


def as_bytes(array: NDArray[Any]) -> TensorBytes:
    """Return an array as a tensor; both share their memory if it is contiguous."""
    whole = np.ascontiguousarray(array)
    data = memoryview(whole.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    return TensorBytes(whole.dtype.name, array.shape, data)


def as_array(tensor: TensorBytes) -> NDArray[Any]:
    """Return a tensor as an array on the same memory."""
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype]).reshape(tensor.shape)


def _nonzero(values: NDArray[Any]) -> NDArray[np.intp] | None:
    """Return the positions of the elements that are not zero, if the tensor is to be sparse."""
    if len(values) <= _SPARSE_ELEMENTS:
        return None
    bits = values.view(f"u{values.itemsize}")  # a negative zero is none by its bits
    zeros = len(values) - np.count_nonzero(bits)
    if np.float32(zeros) / np.float32(len(values)) <= _SPARSE_SHARE:
        return None
    where = np.flatnonzero(bits)
    return None if np.any(values[where] == 0) else where
