"""Check the structure of MessagePack before it is unpacked.

A library makes a list as long as its header claims before it reads an item. So every claim is
compared with the bytes that are left, and the number of values and the depth are bounded; the bytes
of strings are skipped. The forms of MessagePack are those of its specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.parse_limits import check_bytes

#: The most values in a file, and how deeply they may be nested: that of a state, less its top.
MAX_VALUES: Final = 5_000_000
_MAX_DEPTH: Final = 98
#: First byte -> bytes of its number, and what the number counts.
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
    """Check that some bytes are one value of MessagePack, without extensions.

    Raises:
        InvalidInput: They are not, or the value is too large or too deep.
    """
    for _ in _values(lambda at, count: data[at : at + count], len(data), path):
        pass


def outline(file: BinaryIO, size: int, path: Path) -> bytes:
    """Return a file with the length of each byte string, in eight bytes, in place of its bytes.

    The bytes themselves are passed over and not read.

    Raises:
        InvalidInput: As for `check_structure`; or what is left takes too much memory.
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
