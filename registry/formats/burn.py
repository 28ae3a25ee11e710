"""Records of Burn, `.mpk`: what its `NamedMpkFileRecorder` writes, its default recorder.

The file is one value of MessagePack, as Rust's `rmp_serde` writes structs by name:

    {"metadata": {"float", "int", "format", "version", "settings": strings},
     "item": the record, "_b": nil}

A module is a map of its fields, a list a sequence, `None` nil, a parameter
`{"id": string, "param": TensorData}`, and a tensor, `TensorData`,
`{"bytes": bin, "shape": [lengths], "dtype": "F32"}` in little-endian C order, since release 0.14.
Since `DType::Bool` names its storage it is `{"Bool": "Native"}`. Quantized tensors
(`{"QFloat": ...}`) and the records of older releases stay plain values.

The state is `{"metadata": ..., "item": ...}` with tensors in place of `TensorData`, and `dtypes`,
the other spelling of element types by path, where there is one. Records of other recorders have no
names (Bin) and are opaque files. A record has no index: a description passes over the bytes of its
tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import Content, portable
from holdfast.registry.formats.message_pack import check_structure, outline, starts_record
from holdfast.registry.formats.size_limit import check_room
from holdfast.registry.formats.source import read_exactly, stable
from holdfast.registry.formats.state_file import (
    RAISED,
    Faults,
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.pytree import TensorBytes
from holdfast.registry.pytree.paths import Trail
from holdfast.registry.values.dtypes import ITEM_SIZES
from holdfast.registry.values.parse_limits import Budget

FORMAT: Final = "burn"
_METADATA: Final = ("float", "int", "format", "version", "settings")
_TENSOR: Final = {"bytes", "shape", "dtype"}
_MAX_AXES: Final = 64
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "Flex32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "Bool": "bool",
}
_NAMES: Final = {ours: theirs for theirs, ours in _DTYPES.items() if theirs != "Flex32"}


def detect(path: Path) -> bool:
    """Return whether a file begins like a record."""
    with stable(path) as file:
        return starts_record(file.read(64))


def read(path: Path) -> FileState:
    """Read a record as a state.

    Raises:
        InvalidInput: It is damaged, or a tensor does not fit its shape.
        IncompatibleState: It does not fit into memory, or `msgpack` is not installed.
    """
    record, size = _record(path)
    walk = _Tensors(path)
    item = walk.convert(record["item"], walk.top)
    state = {"metadata": record["metadata"], "item": item}
    if walk.spelled:
        state["dtypes"] = walk.spelled
    return FileState(state, FORMAT, size, record["metadata"])


def inspect(path: Path) -> FileReport:
    """Describe a record from everything but the bytes of its tensors.

    Raises:
        InvalidInput: It is damaged, or a tensor does not fit its shape.
        IncompatibleState: `msgpack` is not installed.
    """
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        record = _unpacked(outline(file, size, path), path)
    walk = _Tensors(path, with_data=False)
    walk.convert(record["item"], walk.top)
    return FileReport(FORMAT, size, walk.headers, record["metadata"])


def validate(path: Path) -> list[str]:
    """Return what is wrong with the record, or with each of its tensors."""
    faults = Faults()
    with faults:
        record, _ = _record(path)
        walk = _Tensors(path, faults=faults)
        walk.convert(record["item"], walk.top)
    return faults.lines


def _msgpack(where: object) -> ModuleType:
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise IncompatibleState(
            "msgpack is not installed",
            where=where,
            hint="Install it: pip install holdfast[formats].",
        ) from error
    module: ModuleType = msgpack
    return module


def _record(path: Path) -> tuple[dict[str, Any], int]:
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_room(size, path, copies=2)
        data = bytearray(size)
        read_exactly(file, memoryview(data), path)
    check_structure(memoryview(data), path)
    return _unpacked(data, path), size


def _unpacked(data: bytes | bytearray, path: Path) -> dict[str, Any]:
    """Return a record whose structure was checked."""
    msgpack = _msgpack(path)
    try:
        found = msgpack.unpackb(
            data, strict_map_key=True, object_pairs_hook=_unique, max_ext_len=0, use_list=True
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise _unsound(path, "it is not MessagePack of a record", error) from error
    if not isinstance(found, dict) or found.keys() - {"_b"} != {"metadata", "item"}:
        raise _unsound(path, "it is no record with metadata and item", type(found).__name__)
    about = found["metadata"]
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise _unsound(path, "its metadata are not strings by name", None)
    return found


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _unsound(where: object, rule: str, found: object) -> InvalidInput:
    return InvalidInput(
        f"not a sound record of Burn: {rule}",
        where=where,
        expected="a file of NamedMpkFileRecorder",
        found=None if found is None else str(found)[:200],
    )


class _Tensors:
    """Puts tensors in place of `TensorData`.

    Args:
        path: The file, for messages.
        with_data: Whether `bytes` are the data; otherwise they are its length, of an outline.
        faults: Takes the error of each bad tensor; by default the first one is raised.

    Attributes:
        headers: Each tensor by path.
        spelled: Element types that are spelled in another way than they are written here.
        top: The path of the record.
    """

    def __init__(self, path: Path, *, with_data: bool = True, faults: Faults = RAISED) -> None:
        self.headers: dict[str, TensorHeader] = {}
        self.spelled: dict[str, Any] = {}
        self.top = Trail("item", None, Budget(path, "spelling the paths in it", InvalidInput))
        self._path, self._with_data, self._faults = path, with_data, faults

    def convert(self, value: Any, path: Trail) -> Any:
        """Return a value with tensors; `message_pack` has bounded its depth."""
        if isinstance(value, list):
            return [self.convert(item, path / at) for at, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        dtype = _dtype(value.get("dtype")) if value.keys() == _TENSOR else None
        if dtype is not None and isinstance(value["bytes"], bytes):
            with self._faults:
                return self._tensor(value, dtype, str(path))
            return None
        return {key: self.convert(item, path / key) for key, item in value.items()}

    def _tensor(self, value: dict[str, Any], dtype: str, path: str) -> TensorBytes | None:
        shape, data = _shape(value["shape"]), memoryview(value["bytes"])
        length = len(data) if self._with_data else int.from_bytes(data, "big")
        if shape is None or math.prod(shape) * ITEM_SIZES[dtype] != length:
            fault = "the bytes of a tensor do not fit its shape"
            raise _unsound(f"{self._path}: {path}", fault, value["shape"])
        if value["dtype"] != _NAMES[dtype]:
            self.spelled[path] = value["dtype"]
        self.headers[path] = TensorHeader(dtype, shape)
        if not self._with_data:
            return None
        return TensorBytes(dtype, shape, data)


def _dtype(found: Any) -> str | None:
    match found:
        case str():
            return _DTYPES.get(found)
        case {"Bool": "Native" | "U8"} if len(found) == 1:
            return "bool"
    return None


def _shape(found: Any) -> tuple[int, ...] | None:
    if not isinstance(found, list) or len(found) > _MAX_AXES:
        return None
    if not all(type(length) is int and 0 <= length < 2**62 for length in found):
        return None
    if math.prod(filter(None, found)) >= 2**58:
        return None
    return tuple(found)


# Writing


def write(
    path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
) -> WrittenFile:
    """Write a record; equal states give equal files.

    Raises:
        IncompatibleState: The state is no record; the message names the path. Or `msgpack` is not
            installed.
    """
    msgpack = _msgpack(path)
    state = portable(content)
    about = {**state["metadata"], **(metadata or {})} if "metadata" in state else metadata
    known = {"item", "metadata", "dtypes"}
    if "item" not in state or set(state) - known or not _is_metadata(about):
        raise IncompatibleState(
            "not the state of a record of Burn",
            where=content.where,
            expected=f"item, and metadata with {', '.join(_METADATA)}",
            found=", ".join(state) or "nothing",
            hint="Choose components with `--only`, or pull to a .pt file.",
        )
    spelled = state.get("dtypes", {})
    item = _plain(state["item"], Trail("item"), spelled if isinstance(spelled, dict) else {})
    try:
        data = msgpack.packb(
            {"metadata": about, "item": item, "_b": None}, strict_types=True, use_bin_type=True
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise IncompatibleState(
            "a value cannot be part of a record", where=content.where, found=error
        ) from error
    with new_file(path, len(data), force=force) as file:
        file.write(data)
    return WrittenFile(path, FORMAT, len(data))


def _is_metadata(about: Any) -> bool:
    return isinstance(about, dict) and all(isinstance(about.get(key), str) for key in _METADATA)


def _plain(value: Any, path: Trail, spelled: Mapping[str, Any]) -> Any:
    if isinstance(value, TensorBytes):
        if value.dtype not in _NAMES:
            raise IncompatibleState(
                "Burn has no such element type",
                where=path,
                expected=", ".join(_NAMES),
                found=value.dtype,
            )
        dtype = spelled.get(str(path), _NAMES[value.dtype])
        if _dtype(dtype) != value.dtype:
            raise IncompatibleState("dtypes does not fit the tensor", where=path, found=dtype)
        return {"bytes": bytes(value.data), "shape": list(value.shape), "dtype": dtype}
    if isinstance(value, dict):
        return {key: _plain(item, path / key, spelled) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, path / at, spelled) for at, item in enumerate(value)]
    return value
