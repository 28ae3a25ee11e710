"""Records of Burn, `.mpk`: files of `NamedMpkFileRecorder`, its default recorder.

The file is one value of MessagePack, as Rust's `rmp_serde` writes structs by name:

    {"metadata": {"float", "int", "format", "version", "settings": strings},
     "item": the record, "_b": nil}

A module is a map of its fields, a list a sequence, `None` nil, a parameter
`{"id": string, "param": TensorData}`, and a tensor, `TensorData`,
`{"bytes": bin, "shape": [lengths], "dtype": "F32"}` in little-endian C order, since release 0.14.
Since `DType::Bool` names its storage it is `{"Bool": "Native"}`. Quantized tensors
(`{"QFloat": ...}`) and the records of older releases stay plain values.

The state is `{"metadata": ..., "item": ...}` with tensors in place of `TensorData`, and `dtypes`,
the other spelling of element types by path, where there is one. Files of `NamedMpkGzFileRecorder`,
`.mpk.gz`, are the same in a stream of gzip. Records of the Bin recorders have no names and are
opaque files, with the metadata of the record. A record has no index: a description passes over the
bytes of its tensors.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, NoReturn

from holdfast.backends.errors import install_extra
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import Content, check_dtype, portable
from holdfast.registry.formats.source import check_room, read_exactly, stable, unique_keys
from holdfast.registry.formats.state_file import (
    RAISED,
    Faults,
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.pytree import TensorBytes, Trail
from holdfast.registry.values import ITEM_SIZES, Budget, check_bytes

# Check the structure of MessagePack before it is unpacked.


#: The most values in a file, and how deeply they may be nested: that of a state, less its top.
MAX_VALUES: Final = 5_000_000
_MAX_DEPTH: Final = 98
#: First byte -> bytes of its number, and the unit that the number counts.
_LENGTHS: Final = {
    **{0xC4 + n: (2**n, "bytes") for n in range(3)},
    **{0xD9 + n: (2**n, "bytes") for n in range(3)},
    **{0xDC + n: (2 << n, "items") for n in range(2)},
    **{0xDE + n: (2 << n, "pairs") for n in range(2)},
}
#: First bytes of byte strings, whose data can be long.
_BYTES: Final = (0xC4, 0xC5, 0xC6)
#: A file is read in pieces of this many bytes, or of one value.
_WINDOW_BYTES: Final = 2**12
#: First byte -> bytes of the value after it.
_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **{0xCC + n: 2**n for n in range(4)},
    **{0xD0 + n: 2**n for n in range(4)},
    0xCA: 4,
    0xCB: 8,
}


def starts_record(head: bytes) -> bool:
    """Return whether some bytes begin a map of two or three with the key `metadata`."""
    return head[:1] in (b"\x82", b"\x83") and head[1:10] == b"\xa8metadata"


def check_structure(data: memoryview, path: Path) -> None:
    """Check that some bytes are one value of MessagePack, without extensions."""
    for _ in _values(lambda at, count: data[at : at + count], len(data), path):
        pass


def outline(file: BinaryIO, size: int, path: Path) -> bytes:
    """Return a file with the length of each byte string, in eight bytes, in place of its bytes.

    The bytes themselves are passed over and not read.
    """
    window = _Window(file)
    found = bytearray()
    for start, end, first in _values(window.read, size, path):
        if first in _BYTES:
            width, _ = _LENGTHS[first]
            found += b"\xc4\x08" + (end - start - 1 - width).to_bytes(8, "big")
            continue
        wanted = len(found) + end - start
        check_bytes(wanted, "describing it", where=path, kind=InvalidInput)
        found += window.read(start, end - start)
    return bytes(found)


class _Window:
    """Reads a file in pieces around the positions that are asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start, self._data = file, 0, b""

    def read(self, at: int, count: int) -> bytes:
        """Return bytes; fewer at the end of the file."""
        if not self._start <= at <= at + count <= self._start + len(self._data):
            self._file.seek(at)
            self._start, self._data = at, self._file.read(max(count, _WINDOW_BYTES))
        return self._data[at - self._start : at - self._start + count]


def _values(
    read: Callable[[int, int], bytes | memoryview], size: int, path: Path
) -> Iterator[tuple[int, int, int]]:
    """Yield where each value begins, where it or the head of its items ends, and its first byte."""
    at, values = 0, 0
    open_items = [1]
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        open_items[-1] -= 1
        values += 1
        if at >= size:
            _broken(path, at, "it breaks off")
        start, first = at, read(at, 1)[0]
        length, inner = _token(read, at + 1, first, size, path)
        at += 1 + length
        if at > size or inner > size - at:
            _broken(path, at, "a length is larger than the rest of the file")
        if values + inner > MAX_VALUES:
            _broken(path, at, f"it holds more than {MAX_VALUES} values")
        if inner:
            open_items.append(inner)
        if len(open_items) > _MAX_DEPTH:
            _broken(path, at, f"it is nested more than {_MAX_DEPTH} levels deep")
        yield start, at, first
    if at != size:
        _broken(path, at, "there are bytes after its end")


def _token(
    read: Callable[[int, int], bytes | memoryview], at: int, first: int, size: int, path: Path
) -> tuple[int, int]:
    """Return the bytes after the first one that belong to a value, and its number of items."""
    if first <= 0x7F or first >= 0xE0:
        return 0, 0
    if first <= 0x8F:
        return 0, 2 * (first & 0x0F)
    if first <= 0x9F:
        return 0, first & 0x0F
    if first <= 0xBF:
        return first & 0x1F, 0
    if first in _FIXED:
        return _FIXED[first], 0
    if first not in _LENGTHS:
        _broken(path, at, f"a value of the unknown kind {first:#04x}")
    width, kind = _LENGTHS[first]
    if at + width > size:
        _broken(path, at, "it breaks off")
    count = int.from_bytes(read(at, width), "big")
    if kind == "bytes":
        return width + count, 0
    return width, count * (2 if kind == "pairs" else 1)


def _broken(path: Path, at: int, rule: str) -> NoReturn:
    raise InvalidInput(
        f"not sound MessagePack: {rule}", where=f"{path}, byte {at}", expected="one value"
    )


FORMAT: Final = "burn"
_METADATA: Final = ("float", "int", "format", "version", "settings")
_GZIP: Final = b"\x1f\x8b"
#: zlib's number for streams of gzip.
_GZIP_FORM: Final = 31
_PART_BYTES: Final = 2**22
#: The longest text whose length bincode writes in one byte.
_LONGEST_TEXT: Final = 250
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
    """Return whether a file begins like a record, decompressed if need be."""
    return starts_record(_head(path)[:64])


def bin_metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a record of Burn's Bin recorders; `None` of any other file."""
    head, at, found = _head(path), 0, {}
    for name in _METADATA:
        length = head[at] if at < len(head) else 0
        if not 0 < length <= _LONGEST_TEXT:
            return None
        found[name] = head[at + 1 : at + 1 + length].decode(errors="replace")
        at += 1 + length
    is_one = found["format"].startswith("burn") and "::Bin" in found["format"]
    return found if is_one else None


def _head(path: Path) -> bytes:
    """Return the first bytes of a record, decompressed if need be."""
    with stable(path) as file:
        head = file.read(_WINDOW_BYTES)
    if not head.startswith(_GZIP):
        return head
    try:
        return zlib.decompressobj(_GZIP_FORM).decompress(head, _WINDOW_BYTES)
    except zlib.error:
        return b""


def _inflated(file: BinaryIO, path: Path) -> bytearray:
    """Decompress a file; what it becomes is bounded like the bytes of any other record."""
    stream, data = zlib.decompressobj(_GZIP_FORM), bytearray()
    try:
        while not stream.eof:
            part = stream.unconsumed_tail or file.read(_PART_BYTES)
            more = stream.decompress(part, _PART_BYTES)
            if not part and not more:
                raise _unsound(path, "its stream of gzip breaks off", None)
            data += more
            check_room(len(data), path, copies=3)  # growing may copy it
    except zlib.error as error:
        raise _unsound(path, "its stream of gzip is damaged", error) from error
    if stream.unused_data or file.read(1):
        raise _unsound(path, "there are bytes after its stream of gzip", None)
    return data


def read(path: Path) -> FileState:
    """Read a record as a state."""
    record, size = _record(path)
    walk = _Tensors(path)
    item = walk.convert(record["item"], walk.top)
    state = {"metadata": record["metadata"], "item": item}
    if walk.spelled:
        state["dtypes"] = walk.spelled
    return FileState(state, FORMAT, size, record["metadata"])


def inspect(path: Path) -> FileReport:
    """Describe a record from everything but the bytes of its tensors."""
    with stable(path) as file:
        size = length = os.fstat(file.fileno()).st_size
        plain: BinaryIO = file
        if file.read(2) == _GZIP:
            file.seek(0)
            plain = io.BytesIO(_inflated(file, path))
            length = plain.getbuffer().nbytes
        record = _unpacked(outline(plain, length, path), path)
    walk = _Tensors(path, with_data=False)
    walk.convert(record["item"], walk.top)
    return FileReport(FORMAT, size, walk.headers, record["metadata"])


def validate(path: Path) -> list[str]:
    """Return the problems of the record, or of each of its tensors."""
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
            hint=install_extra("formats"),
        ) from error
    module: ModuleType = msgpack
    return module


def _record(path: Path) -> tuple[dict[str, Any], int]:
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_gzip = file.read(2) == _GZIP
        file.seek(0)
        if is_gzip:
            data = _inflated(file, path)
        else:
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
            data, strict_map_key=True, object_pairs_hook=unique_keys, max_ext_len=0, use_list=True
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise _unsound(path, "it is not MessagePack of a record", error) from error
    if not isinstance(found, dict) or found.keys() - {"_b"} != {"metadata", "item"}:
        raise _unsound(path, "it is no record with metadata and item", type(found).__name__)
    about = found["metadata"]
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise _unsound(path, "its metadata are not strings by name", None)
    return found


def _unsound(where: object, rule: str, found: object) -> InvalidInput:
    return InvalidInput(
        f"not a sound record of Burn: {rule}",
        where=where,
        expected="a file of NamedMpkFileRecorder",
        found=None if found is None else str(found)[:200],
    )


class _Tensors:
    """Puts tensors in place of `TensorData`."""

    def __init__(self, path: Path, *, with_data: bool = True, faults: Faults = RAISED) -> None:
        self.headers: dict[str, TensorHeader] = {}  # each tensor by path
        #: Element types that are spelled in another way than they are written here.
        self.spelled: dict[str, Any] = {}
        #: The path of the record.
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
    """Write a record; equal states give equal files."""
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
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    with new_file(path, len(data), force=force) as file:
        file.write(data)
    return WrittenFile(path, FORMAT, len(data))


def _is_metadata(about: Any) -> bool:
    return isinstance(about, dict) and all(isinstance(about.get(key), str) for key in _METADATA)


def _plain(value: Any, path: Trail, spelled: Mapping[str, Any]) -> Any:
    if isinstance(value, TensorBytes):
        check_dtype("Burn", value.dtype, _NAMES, path)
        dtype = spelled.get(str(path), _NAMES[value.dtype])
        if _dtype(dtype) != value.dtype:
            raise IncompatibleState("dtypes does not fit the tensor", where=path, found=dtype)
        return {"bytes": bytes(value.data), "shape": list(value.shape), "dtype": dtype}
    if isinstance(value, dict):
        return {key: _plain(item, path / key, spelled) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, path / at, spelled) for at, item in enumerate(value)]
    return value
