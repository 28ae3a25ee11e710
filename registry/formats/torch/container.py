"""The container of a file of `torch.save`: where its pickle is, and where its storages are.

Since torch 1.6 it is a zip archive with an entry for each storage. Every entry must be stored
uncompressed and only once, so that the content is no larger than the file. The form before 1.6 is a
row of pickles with the storages behind it; the tar archive before 0.2 is not read.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np

from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.formats.pickles import Keys, Known, read_pickle
from holdfast.registry.formats.source import KEEP, entries_of, read_exactly, unsound
from holdfast.registry.formats.state_file import RAISED, Faults
from holdfast.registry.values import Budget, check_bytes, max_record_bytes

#: Bytes of memory for each byte of a pickle, at least; what it makes is counted as it is made.
_PICKLED_BYTES: Final = 8
#: The first pickle of the form before 1.6 holds this number, the second the version.
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLED: Final = _MAGIC.to_bytes(10, "little") + b"."
_VERSION: Final = 1001
#: A pickle of the form before 1.6 is looked for in a window of this many bytes, then in larger
#: ones: only its end tells its length.
_WINDOW_BYTES: Final = 2**16
_LOCAL_HEADER_BYTES: Final = 30
_LOCAL_HEADER: Final = b"PK\x03\x04"
#: Takes bytes that begin with the pickle of the value. Returns the storages that it names, by key:
#: the bytes of an element and of the whole; and the length of the pickle.
Scan = Callable[[memoryview], tuple[Mapping[str, tuple[int, int]], int]]
broken = partial(unsound, "torch")


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a storage is."""

    start: int  # offset in the file: of its header in an archive, otherwise of its bytes
    nbytes: int
    crc: int = 0  # its CRC-32; 0 if the program that wrote it computed none
    has_header: bool = True  # whether a header of an archive is before it


@dataclass(frozen=True, slots=True)
class Container:
    """A file that is open."""

    file: BinaryIO
    path: Path
    size_bytes: int
    pickle: memoryview  # the pickle of the value
    extents: Mapping[str, Extent]  # its storages by key
    is_swapped: bool = False  # whether the storages are big-endian
    #: Takes the errors of single storages; by default the first one is raised.
    faults: Faults = RAISED

    def check(self, key: str, nbytes: int) -> None:
        """Check that a storage is there and of a length."""
        with self.faults:
            extent = self.extents.get(key)
            if extent is None:
                broken(self.path, "a storage is missing", f"storage {key[:50]!r}", None)
            if extent.nbytes != nbytes:
                broken(f"{self.path}: storage {key!r}", "another length", nbytes, extent.nbytes)

    def read(self, key: str) -> memoryview:
        """Read a storage straight into new memory."""
        return _read_extent(self.file, self.extents[key], f"{self.path}: storage {key!r}")

    def reading(self, key: str, offset: int) -> Callable[[memoryview], None]:
        """Return a function that reads the next bytes of a storage, from an offset on."""
        where = f"{self.path}: storage {key!r}"
        self.file.seek(_begin(self.file, self.extents[key], where) + offset)
        return partial(read_exactly, self.file, path=Path(where))


def is_one(head: bytes) -> bool:
    """Return whether the first bytes of a file begin the form before 1.6."""
    return head[:1] == b"\x80" and _MAGIC_PICKLED in head[:40]


def opened(file: BinaryIO, path: Path, scan: Scan) -> Container:
    """Return the container of an open file."""
    head = file.read(512)
    size = file.seek(0, 2)
    if head.startswith(_LOCAL_HEADER):
        return _archive(file, path, size)
    if is_one(head):
        return _row(file, path, size, scan)
    return _refuse_other(head, path)


def _refuse_other(head: bytes, path: Path) -> NoReturn:
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        kind = "a bare pickle, not a file of torch.save"
    elif head[257:262] == b"ustar":
        kind = "a tar archive: torch.save's format before 0.2"
    else:
        kind = "not a file of torch.save" if head else "an empty file"
    raise InvalidInput(
        kind,
        where=path,
        expected="a file of torch.save with the state of a module",
        hint=f"Load it where you trust it, and save it again with today's torch. {KEEP}",
    )


def _begin(file: BinaryIO, extent: Extent, where: str) -> int:
    start = extent.start
    if extent.has_header:
        head = bytearray(_LOCAL_HEADER_BYTES)
        file.seek(start)
        read_exactly(file, memoryview(head), Path(where))
        if not head.startswith(_LOCAL_HEADER):
            broken(where, "an entry of the archive is not where it should be", None, None)
        start += _LOCAL_HEADER_BYTES
        start += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return start


def _read_extent(file: BinaryIO, extent: Extent, where: str) -> memoryview:
    start = _begin(file, extent, where)
    try:
        array: Any = np.empty(extent.nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise IncompatibleState("a storage does not fit into memory", where=where) from error
    data = memoryview(array)
    file.seek(start)
    read_exactly(file, data, Path(where))
    if extent.crc and zlib.crc32(data) != extent.crc:
        broken(where, "damaged data", f"CRC-32 {extent.crc:08x}", f"{zlib.crc32(data):08x}")
    return data


# The archive


def _archive(file: BinaryIO, path: Path, size: int) -> Container:
    entries = _entries(file, path, size)
    pickled = entries["data.pkl"]
    check_bytes(pickled.file_size * _PICKLED_BYTES, "unpickling it", where=path, kind=InvalidInput)
    data = _read_extent(file, _extent(pickled), f"{path}: data.pkl")
    order = b"little"
    if (entry := entries.get("byteorder")) is not None and entry.file_size <= 16:
        order = bytes(_read_extent(file, _extent(entry), f"{path}: byteorder"))
    if order not in (b"little", b"big"):
        broken(path, "an unknown order of bytes", "little or big", order)
    extents = {
        name.removeprefix("data/"): _extent(one)
        for name, one in entries.items()
        if name.startswith("data/")
    }
    return Container(file, path, size, data, extents, order == b"big")


def _entries(file: BinaryIO, path: Path, size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of an archive that `torch.save` may have written, by name."""
    try:
        entries = entries_of(file, path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        is_cut = str(error) == "File is not a zip file"
        found = "no end: it was cut off" if is_cut else error
        broken(path, "a damaged archive", "a whole zip archive", found)
    names = [entry.filename for entry in entries]
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        raise InvalidInput(
            "a TorchScript archive: it holds a program",
            where=path,
            expected="a file of torch.save with the state of a module",
            hint=Hint.of(
                Hint("Save module.state_dict() instead.", "Save the state of the module instead."),
                KEEP,
            ),
        )
    if "data.pkl" not in inner:
        broken(path, "not an archive of torch.save", "an entry data.pkl", ", ".join(names[:4]))
    if len(set(names)) != len(names) or len({name.partition("/")[0] for name in names}) != 1:
        broken(path, "ambiguous entries in the archive", "each entry once, in one folder", None)
    total = sum(entry.file_size for entry in entries)
    if total > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        broken(path, "the archive is compressed or overlaps itself", f"{size} bytes", total)
    if any(entry.header_offset < 0 for entry in entries):
        broken(path, "a damaged archive", "entries within the file", None)
    return {entry.filename.partition("/")[2]: entry for entry in entries}


def _extent(entry: zipfile.ZipInfo) -> Extent:
    return Extent(entry.header_offset, entry.file_size, entry.CRC)


# The form before 1.6


def _row(file: BinaryIO, path: Path, size: int, scan: Scan) -> Container:
    length = min(size, _WINDOW_BYTES)
    while True:
        data = memoryview(bytearray(length))
        file.seek(0)
        read_exactly(file, data, path)
        try:
            start = _head(data, path)
            sizes, used = scan(data[start:])
            keys, after = _plain_pickle(data[start + used :], path)
            break
        except (UnsupportedValue, IncompatibleState):
            raise  # more bytes change nothing
        except InvalidInput:
            if length == size or length * 2 * _PICKLED_BYTES > max_record_bytes():
                raise
            length = min(size, length * 2)
    extents = _extents(file, path, start + used + after, keys, sizes)
    if extents and (end := max(one.start + one.nbytes for one in extents.values())) != size:
        broken(path, "the storages do not end with the file", f"{size} bytes", end)
    return Container(file, path, size, data[start : start + used], extents)


def _plain_pickle(data: memoryview, path: Path) -> tuple[Any, int]:
    keys = Keys(Budget(path, "unpickling it", InvalidInput))
    names = {"collections.OrderedDict": Known(call=keys.ordered_dict)}
    return read_pickle(data, names, where=path, keys=keys)


def _head(data: memoryview, path: Path) -> int:
    """Check the pickles before the value's pickle; return the offset of the latter."""
    at, found = 0, []
    for _ in range(3):
        value, length = _plain_pickle(data[at:], path)
        found.append(value)
        at += length
    if found[0] != _MAGIC or found[1] != _VERSION or not isinstance(found[2], dict):
        broken(path, "another version of the form before 1.6", _VERSION, found[1])
    return at


def _extents(
    file: BinaryIO, path: Path, start: int, keys: Any, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, Extent]:
    """Return where the storages are: each is its number of elements, and their bytes."""
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(sizes):
        broken(path, "the list of storages does not fit the value", len(sizes), None)
    extents: dict[str, Extent] = {}
    for key in map(str, keys):
        count = bytearray(8)
        file.seek(start)
        read_exactly(file, memoryview(count), path)
        item, nbytes = sizes[key]
        if int.from_bytes(count, "little") * item != nbytes:
            broken(f"{path}: storage {key!r}", "another length", nbytes // item, None)
        extents[key] = Extent(start + 8, nbytes, has_header=False)
        start += 8 + nbytes
    return extents


# torch itself: needed only for values that are its own, and for writing files.


def torch_of(where: object) -> ModuleType:
    """Return the library."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise IncompatibleState(
            "torch is not installed", where=where, hint="Install it: pip install torch."
        ) from error
    return torch
