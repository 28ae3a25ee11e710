"""Files of `numpy.savez`: `{"arrays": {name: array}}`, in the order of the file.

Only numbers, truth values and times are read: an array of objects is a pickle, which is never
loaded. A zip archive can claim any size in a few bytes, so every claim is checked before memory is
taken: entries may not overlap, deflate cannot shrink more than it can, the header of each array
must fit the size of its entry, and all arrays together must fit into memory.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.formats.content import Content, NamedTensors
from holdfast.registry.formats.digesting import filling, is_digesting, taken
from holdfast.registry.formats.source import KEEP, check_room, entries_of, stable, unsound
from holdfast.registry.formats.state_file import (
    RAISED,
    Faults,
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.values import ITEM_SIZES

#: The component that holds the arrays.
COMPONENT = "arrays"
#: The longest header of one array, in bytes; NumPy's own bound.
MAX_HEADER_BYTES = 10_000
_SUFFIX = ".npy"
_MAX_AXES = 64
_MAX_NAME_BYTES = 60_000
#: Longer arrays need the fields of zip's version 64.
_LARGE_BYTES = 2**31 - 2**16
_STEP_BYTES = 2**20
#: The element types that NumPy has by itself; ml_dtypes adds others to its table.
_DTYPES = frozenset(
    name for name in ITEM_SIZES if getattr(np.sctypeDict.get(name), "__module__", "") == "numpy"
)
#: Deflate makes at most this many bytes of one.
_MAX_DEFLATE = 1032
_DEFLATE_SLACK = 4096
_METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MAX_DEFLATE}
_broken = partial(unsound, "NumPy")
_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    # It differs from 2.0 in the names of fields, and arrays with fields are refused.
    (3, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, slots=True)
class _Array:
    """An array as its header describes it."""

    entry: zipfile.ZipInfo  # its entry in the archive
    start: int  # where its data begins within the entry
    dtype: np.dtype[Any]  # its type, in the byte order of the file
    shape: tuple[int, ...]  # lengths of the axes
    is_fortran: bool  # whether the first axis is the fastest

    @property
    def name(self) -> str:
        return self.entry.filename.removesuffix(_SUFFIX)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Reading


def detect(path: Path) -> bool:
    """Return whether a file is a zip archive that begins with an array of NumPy."""
    with stable(path) as file:
        head = file.read(30)
        if not head.startswith(b"PK\x03\x04"):
            return False
        return file.read(int.from_bytes(head[26:28], "little")).endswith(_SUFFIX.encode())


def read(path: Path) -> FileState:
    """Read a file."""
    with stable(path) as file:
        archive, size = _opened(file, path)
        arrays = [_checked(archive, entry, path) for entry in archive.infolist()]
        check_room(sum(array.nbytes for array in arrays), path)
        state = {array.name: _loaded(archive, array, path) for array in arrays}
    return FileState({COMPONENT: state}, "npz", size)


def validate(path: Path) -> list[str]:
    """Return the problems of the archive, or of each of its arrays."""
    faults = Faults()
    with faults, stable(path) as file:
        archive, _ = _opened(file, path, faults)
        for entry in () if faults else archive.infolist():
            with faults:
                array = _checked(archive, entry, path)
                check_room(array.nbytes, path)
                _loaded(archive, array, path)
    return faults.lines


def inspect(path: Path) -> FileReport:
    """Read the headers of the arrays."""
    with stable(path) as file:
        archive, size = _opened(file, path)
        arrays = [_header(archive, entry, path) for entry in archive.infolist()]
    tensors = {f"{COMPONENT}/{one.name}": TensorHeader(str(one.dtype), one.shape) for one in arrays}
    return FileReport("npz", size, tensors)


def _opened(file: BinaryIO, path: Path, faults: Faults = RAISED) -> tuple[zipfile.ZipFile, int]:
    """Open an archive whose entries keep the rules; return it and the size of the file."""
    size = os.fstat(file.fileno()).st_size
    try:
        entries = entries_of(file, path)
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        _broken(path, "a damaged archive", "a whole zip archive", error)
    if len({entry.filename for entry in entries}) != len(entries):
        _broken(path, "an entry is there twice", "each entry once", None)
    if sum(entry.compress_size for entry in entries) > size:
        _broken(path, "the entries overlap", f"at most {size} bytes", None)
    for entry in entries:
        with faults:
            _check_entry(entry, path)
    return archive, size


def _check_entry(entry: zipfile.ZipInfo, path: Path) -> None:
    where = f"{path}: {entry.filename}"
    if not entry.filename.endswith(_SUFFIX):
        _broken(where, "an entry is no array", f"a name that ends with {_SUFFIX}", None)
    most = _METHODS.get(entry.compress_type)
    if most is None or entry.flag_bits & 1:
        _broken(where, "an entry is encrypted or packed", "stored or deflated entries", None)
    is_stored = entry.compress_type == zipfile.ZIP_STORED
    bound = entry.compress_size * most + (0 if is_stored else _DEFLATE_SLACK)
    if entry.file_size > bound:
        _broken(where, "an entry cannot be that long", f"{bound} bytes", entry.file_size)


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> _Array:
    where = f"{path}: {entry.filename}"
    try:
        with archive.open(entry) as file:
            # A header names its own length: no more than this is ever read for it.
            head = io.BytesIO(file.read(MAX_HEADER_BYTES + 12))
        version = np.lib.format.read_magic(head)
        if version not in _HEADERS:
            _broken(where, "an unknown version of arrays", "1.0 to 3.0", version)
        shape, is_fortran, dtype = _HEADERS[version](head, max_header_size=MAX_HEADER_BYTES)
    except InvalidInput:
        raise
    except Exception as error:  # hostile bytes can provoke anything
        _broken(where, "a damaged header", "the header of an array", error)
    if dtype.subdtype is not None:  # NumPy writes none, and reads none
        _broken(where, "elements that are arrays", "numbers, truth values or times", dtype)
    if len(shape) > _MAX_AXES or any(type(n) is not int or not 0 <= n < 2**63 for n in shape):
        _broken(where, "a bad shape", f"at most {_MAX_AXES} axes from 0 to 2^63", shape)
    return _Array(entry, head.tell(), dtype, shape, is_fortran)


def _checked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> _Array:
    """Return an array that can be stored, and whose entry is as long as its header claims."""
    array = _header(archive, entry, path)
    where = f"{path}: {entry.filename}"
    try:
        pytree.describe(np.empty(0, array.dtype.newbyteorder("=")))
    except UnsupportedValue as error:
        raise UnsupportedValue(
            "an array of objects would be loaded by running code"
            if array.dtype.hasobject
            else "an array has a type that cannot be stored",
            where=where,
            expected="numbers, truth values or times",
            found=str(array.dtype)[:200],
            hint=f"Nothing in it was run. Convert the array to numbers and save it again. {KEEP}",
        ) from error
    if array.start + array.nbytes != entry.file_size:
        expected = f"{array.start + array.nbytes} bytes"
        _broken(where, "an array does not fill its entry", expected, entry.file_size)
    return array


def _loaded(archive: zipfile.ZipFile, array: _Array, path: Path) -> Any:
    shape = array.shape[::-1] if array.is_fortran else array.shape
    try:
        with archive.open(array.entry) as file:
            file.read(array.start)
            if is_digesting() and array.dtype.isnative and not array.is_fortran:
                return _hashed(array, partial(_fill, file))
            value = np.empty(shape, array.dtype)
            flat: Any = value.reshape(-1).view(np.uint8)
            _fill(file, memoryview(flat))
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError) as error:
        _broken(f"{path}: {array.entry.filename}", "damaged data", "data of its CRC-32", error)
    if not array.dtype.isnative:
        value = value.byteswap(inplace=True).view(array.dtype.newbyteorder("="))
    value = value.T if array.is_fortran else value
    if is_digesting():  # no more than one such array is in memory
        data: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _hashed(array, filling(memoryview(data)))
    return value


def _hashed(array: _Array, fill: Callable[[memoryview], object]) -> Any:
    """Return an array that repeats one element; its own bytes are hashed."""
    unread = np.broadcast_to(np.zeros((), array.dtype.newbyteorder("=")), array.shape)
    return taken(pytree.describe(unread)[0], array.shape, fill, unread)


def _fill(file: IO[bytes], into: memoryview) -> None:
    """Fill memory from an entry; at its end zipfile checks its CRC-32."""
    done = 0
    while done < len(into) and (part := file.read(min(_STEP_BYTES, len(into) - done))):
        into[done : done + len(part)] = part
        done += len(part)
    if done != len(into):
        raise EOFError(f"{done} of {len(into)} bytes")


# Writing


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write one component of a state, uncompressed; equal components give equal files."""
    fitting = NamedTensors("NumPy", path.name, _DTYPES, tags=frozenset({"t", "n", "nt"}))
    leaves, _ = fitting.of(content)
    for name in leaves:
        if "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
            raise fitting.unfit(quoted(name)[:80], "the name of an array cannot be a file name")
    with new_file(path, content.size_bytes, force=force) as file:
        rest = memoryview(b"")
        parts = content.stream(leaf.path for leaf in leaves.values())
        with zipfile.ZipFile(file, "w") as archive:
            for name, leaf in leaves.items():
                # Without a date of its own an entry has the same bytes in every call.
                entry = zipfile.ZipInfo(name + _SUFFIX)
                with archive.open(entry, "w", force_zip64=leaf.nbytes > _LARGE_BYTES) as into:
                    np.lib.format.write_array_header_1_0(into, _header_of(leaf))
                    left = leaf.nbytes
                    while left:
                        rest = rest or next(parts)
                        part, rest = rest[:left], rest[left:]
                        into.write(part)
                        left -= len(part)
        size = file.tell()
    return WrittenFile(path, "npz", size)


def _header_of(leaf: ArrayLeaf) -> dict[str, Any]:
    is_array = isinstance(leaf.source, np.ndarray)  # an array of times has its unit
    dtype = leaf.source.dtype if is_array else np.dtype(str(leaf.dtype))
    descr = np.lib.format.dtype_to_descr(dtype)
    return {"descr": descr, "fortran_order": False, "shape": leaf.shape}
