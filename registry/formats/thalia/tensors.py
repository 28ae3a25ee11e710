"""The tensors of a file, and the JSON of a region or pathway that names them.

A tensor is dense, or the coordinates and values of its elements that are not zero. The JSON has
plain values, in which a tensor is a reference into the file. Lists and tuples are one, and keys
that are not strings become strings: the format is made so. A dataclass is the name of its class
with its fields, which is a `pytree.Adapted` under this name; other objects are kept as the dicts
that stand for them. Nothing is imported.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import check_dtype
from holdfast.registry.formats.source import json_object
from holdfast.registry.formats.thalia.framing import Body
from holdfast.registry.pytree import Adapted, TensorBytes, Trail
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
        body.broken(
            where,
            "not the header of a tensor",
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
        body.broken(
            where,
            "a sparse tensor has more elements than its shape",
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
        body.broken(where, "a truth value is neither 0 nor 1")
    return tensor


def _scatter(body: Body, head: TensorHead, data: memoryview, where: object) -> None:
    data[:] = bytes(len(data))
    if not head.nnz:
        return
    axes, count = len(head.shape), 8 * len(head.shape) * head.nnz
    raw = bytearray(count)
    body.read_into(head.data, memoryview(raw))
    indices = np.frombuffer(raw, "<i8").reshape(axes, head.nnz)
    bounds = np.array(head.shape, np.int64).reshape(axes, 1)
    if axes and (np.any(indices < 0) or np.any(indices >= bounds)):
        body.broken(where, "a coordinate is outside of the tensor", found=head.shape)
    flat = np.zeros(head.nnz, np.int64)
    for axis, length in enumerate(head.shape):
        flat = flat * length + indices[axis]
    if has_repeated(flat):
        body.broken(where, "a coordinate of a sparse tensor is repeated")
    size = item_size(head.dtype)
    values = bytearray(size * head.nnz)
    body.read_into(head.data + count, memoryview(values))
    elements = np.frombuffer(data, np.dtype(f"V{size}"))
    elements[flat] = np.frombuffer(values, np.dtype(f"V{size}"))


def has_repeated(flat: NDArray[np.int64]) -> bool:
    """Return whether a position of an element is there twice; ascending ones are not sorted."""
    return bool(np.any(flat[1:] <= flat[:-1])) and len(np.unique(flat)) != len(flat)


def encode(tensor: TensorBytes, put: Callable[[Any], Any], *, sparse: bool = True) -> int:
    """Write a tensor, sparse where the programs of Thalia would; return its length in bytes.

    A tensor with a negative zero is written dense, since the sparse form has no sign for it; one
    of float16 too, since the programs cannot read that sparse.
    """
    dtype, shape, data = tensor.dtype, tensor.shape, tensor.data
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
        put(part.reshape(-1).view(np.uint8).data)
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
    data = whole.reshape(-1).view(np.uint8).data
    return TensorBytes(whole.dtype.name, array.shape, data)


def as_array(tensor: TensorBytes) -> NDArray[Any]:
    """Return a tensor as an array on the same memory."""
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype]).reshape(tensor.shape)


def mapped(
    value: Any, path: Trail, change: Callable[[Any, Trail], Any], *, tuples: bool = True
) -> Any:
    """Return a value whose leaves are changed; without `tuples`, a tuple is one."""
    if isinstance(value, dict):
        return {key: mapped(one, path / key, change, tuples=tuples) for key, one in value.items()}
    if isinstance(value, list) or (tuples and isinstance(value, tuple)):
        found = (mapped(one, path / at, change, tuples=tuples) for at, one in enumerate(value))
        return list(found) if isinstance(value, list) else tuple(found)
    if isinstance(value, Adapted):
        return Adapted(value.name, mapped(value.plain, path, change, tuples=tuples))
    return change(value, path)


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


_TENSOR: Final = "tensor"
_CLASS, _FIELDS = "_dataclass", "_fields"
_MAX_DEPTH: Final = 200


def read_json(body: Body, offset: int, length: int, what: str) -> dict[str, Any]:
    """Read a JSON object."""
    return json_object(body.read(offset, length, what), f"{body.where}: {what}")


def references(value: Any, path: Trail, depth: int = 0) -> Iterator[tuple[Trail, dict[str, Any]]]:
    """Yield the path and the reference of each tensor in the JSON of a region."""
    if depth > _MAX_DEPTH:
        raise InvalidInput("nested too deeply", where=str(path)[:200])
    if _is_reference(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in fields_of(value).items():
            if isinstance(item, dict | list):
                yield from references(item, path / key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict | list):
                yield from references(item, path / index, depth + 1)


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and value.get("_type") == _TENSOR and "_offset" in value


def fields_of(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the form of a dataclass; any other dict as it is."""
    name, fields = value.get(_CLASS), value.get(_FIELDS)
    is_one = isinstance(name, str) and name and isinstance(fields, dict) and len(value) == 2
    return fields if is_one and not _is_reference(fields) else value  # type: ignore[return-value]


def head_of(body: Body, reference: dict[str, Any], where: Trail) -> TensorHead:
    """Return the header of a referenced tensor."""
    offset, length = reference["_offset"], reference.get("_bytes")
    if type(offset) is not int or offset < 0:
        body.broken(where, "not the offset of a tensor")
    head = read_head(body, offset, where)
    if length is not None and length != head.end - offset:
        body.broken(
            where,
            "a tensor has another length than its reference says",
            expected=length,
            found=head.end - offset,
        )
    return head


def filled(value: Any, path: Trail, tensor: Callable[[dict[str, Any], Trail], Any]) -> Any:
    """Return the JSON of a region with each reference replaced by its tensor."""
    if _is_reference(value):
        return tensor(value, path)
    if isinstance(value, dict):
        if (fields := fields_of(value)) is not value:
            return Adapted(value[_CLASS], filled(fields, path, tensor))
        return {key: filled(item, path / key, tensor) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, path / index, tensor) for index, item in enumerate(value)]
    return value


def dump(value: Any) -> bytes:
    """Return JSON as the programs of Thalia write it."""
    return json.dumps(value, indent=2).encode()


class RegionWriter:
    """Writes the tensors of regions, and returns their JSON."""

    def __init__(self, put: Callable[[Any], Any], at: int, *, sparse: bool = True) -> None:
        self._put = put
        self._sparse = sparse
        self.at = at  # position behind all that was put

    def put(self, data: Any) -> None:
        """Write bytes."""
        self._put(data)
        self.at += memoryview(data).nbytes

    def region(self, value: Any, path: Trail) -> tuple[int, int]:
        """Write a region; return position and length of its JSON."""
        data = dump(self.plain(value, path))
        start = self.at
        self.put(data)
        return start, len(data)

    def plain(self, value: Any, path: Trail) -> Any:
        """Return a value as JSON, whose tensors are written."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, list):
            return [self.plain(item, path / index) for index, item in enumerate(value)]
        if isinstance(value, TensorBytes):
            return self._tensor(value, path)
        if isinstance(value, Adapted) and isinstance(value.plain, dict):
            return {_CLASS: value.name, _FIELDS: self._dict(value.plain, path)}
        if type(value).__name__ == "device":
            return {"_type": "torch.device", "_value": str(value)}
        raise IncompatibleState(
            "a .thalia file has no form for this value",
            where=path,
            found=type(value).__name__,
            hint="Pull to a .pt file, or choose components with `--only`.",
        )

    def _dict(self, value: dict[Any, Any], path: Trail) -> dict[str, Any]:
        if value.get("_type") == _TENSOR and "_offset" in value:
            raise IncompatibleState("a dict looks like a reference to a tensor", where=path)
        for key in value:
            if not isinstance(key, str):
                raise IncompatibleState(
                    "a key of a dict is no string, and a .thalia file has no others",
                    where=path,
                    found=repr(key)[:100],
                )
        return {key: self.plain(item, path / key) for key, item in value.items()}

    def _tensor(self, tensor: TensorBytes, path: Trail) -> dict[str, Any]:
        check_dtype("a .thalia file", tensor.dtype, DTYPES, path)
        start = self.at
        length = encode(tensor, self.put, sparse=self._sparse)
        return {"_type": _TENSOR, "_offset": start, "_bytes": length}
