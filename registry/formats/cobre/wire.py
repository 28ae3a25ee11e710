"""FlatBuffers without trust: every offset is checked before it is followed.

The library for Python writes buffers, and has no verifier to read hostile ones. The reading side
needs little: a table is a position, whose fields a second table finds; a vector is a count and its
elements. Many tables of one kind, such as the cuts of a stage, are read together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import max_record_bytes

_OFFSET: Final = np.dtype("<u4")
#: Bytes that are at most this many times as many as the wanted ones are read with them.
_NEAR: Final = 8


class BufferSource(Protocol):
    """Where the bytes of a buffer are."""

    def __len__(self) -> int:
        """Return their number."""

    def gather(self, positions: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """Return a row of bytes from each of some positions, which are within them."""


class InMemory:
    """The bytes of a file that was read as a whole."""

    def __init__(self, data: bytes) -> None:
        self.bytes = np.frombuffer(data, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

    def gather(self, positions: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """Return rows of bytes; a single one is not copied."""
        if len(positions) == 1:
            return self.bytes[positions[0] : positions[0] + size].reshape(1, size)
        rows: NDArray[np.uint8] = self.bytes[positions[:, None] + np.arange(size)]
        return rows


class OnDisk:
    """An open file; only wanted bytes are read."""

    def __init__(self, fd: int, length: int) -> None:
        self._fd, self._length = fd, length

    def __len__(self) -> int:
        return self._length

    def gather(self, positions: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """Return rows of bytes; neighbours are read together, and equal ones once."""
        if not len(positions):
            return np.empty((0, size), np.uint8)
        first, last = int(positions.min()), int(positions.max()) + size
        if last - first <= _NEAR * size * len(positions):
            return InMemory(self._read(first, last - first)).gather(positions - first, size)
        some, which = np.unique(positions, return_inverse=True)
        data = b"".join(self._read(int(at), size) for at in some)
        return np.frombuffer(data, np.uint8).reshape(-1, size)[which.reshape(-1)]

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) != size:
            raise InvalidInput("the file ended while it was read", found=f"{at + len(data)} bytes")
        return data


@dataclass(frozen=True, slots=True)
class Buffer:
    """A file."""

    data: BufferSource  # its bytes
    where: str  # its name, for messages

    def root(self) -> Tables:
        """Return the root table."""
        start = self.numbers(np.zeros(1, np.int64), _OFFSET, "the root table")
        return self.tables(start.astype(np.int64), "the root table")

    def tables(self, positions: NDArray[np.int64], what: str) -> Tables:
        """Return tables at some positions."""
        back = self.numbers(positions, np.dtype("<i4"), what).astype(np.int64)
        vtables = positions - back
        sizes = self.numbers(vtables, np.dtype("<u2"), what).astype(np.int64)
        lengths = self.numbers(vtables + 2, np.dtype("<u2"), what).astype(np.int64)
        if np.any(sizes < 4) or np.any(vtables + sizes > len(self.data)):
            raise self.broken(f"{what}: the list of its fields is not within the file")
        if np.any(lengths < 4) or np.any(positions + lengths > len(self.data)):
            raise self.broken(f"{what} is not within the file")
        return Tables(self, positions, vtables, sizes, lengths, what)

    def numbers(self, positions: NDArray[np.int64], kind: np.dtype[Any], what: str) -> NDArray[Any]:
        """Return a number at each of some positions."""
        size = kind.itemsize
        if np.any(positions < 0) or np.any(positions > len(self.data) - size):
            raise self.broken(f"{what} is not within the file")
        found: NDArray[Any] = self.data.gather(positions, size).reshape(-1).view(kind)
        return found

    def broken(self, fault: str) -> InvalidInput:
        """Return the error for a damaged file."""
        return InvalidInput("not a sound FlatBuffer", where=self.where, found=fault)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of one kind."""

    buffer: Buffer  # the file
    positions: NDArray[np.int64]
    vtables: NDArray[np.int64]  # position of the list of its fields
    sizes: NDArray[np.int64]  # length of that list
    lengths: NDArray[np.int64]  # length of the table itself
    what: str  # name for messages

    def __len__(self) -> int:
        return len(self.positions)

    def fields(self, field: int) -> NDArray[np.int64]:
        """Return the offset of a field in each table; 0 where it is absent."""
        slot = 4 + 2 * field
        offsets = np.zeros(len(self), np.int64)
        has = self.sizes >= slot + 2
        offsets[has] = self.buffer.numbers(self.vtables[has] + slot, np.dtype("<u2"), self.what)
        return offsets

    def numbers(self, field: int, form: str) -> NDArray[Any]:
        """Return one scalar field per table, or 0 (the schema's default) where it is absent."""
        kind = np.dtype(form)
        found = np.zeros(len(self), kind)
        offsets = self.fields(field)
        has = offsets > 0
        if np.any(offsets[has] + kind.itemsize > self.lengths[has]):
            raise self.buffer.broken(f"field {field} of {self.what} is not within its table")
        found[has] = self.buffer.numbers(self.positions[has] + offsets[has], kind, self.what)
        return found

    def number(self, field: int, form: str) -> int:
        """Return an integer of the only table."""
        return int(self.numbers(field, form)[0])

    def vectors(self, field: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return position of the first element and number of elements of a vector of each table.

        An absent vector has no elements.
        """
        starts, counts = np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        offsets = self.fields(field)
        has = offsets > 0
        if np.any(offsets[has] + 4 > self.lengths[has]):
            raise self.buffer.broken(f"field {field} of {self.what} is not within its table")
        at = self.positions[has] + offsets[has]
        begins = at + self.buffer.numbers(at, _OFFSET, self.what).astype(np.int64)
        counts[has] = self.buffer.numbers(begins, _OFFSET, self.what)
        starts[has] = begins + 4
        return starts, counts

    def array(self, field: int, form: str) -> NDArray[Any]:
        """Return a vector of numbers of the only table."""
        kind = np.dtype(form)
        starts, counts = self.vectors(field)
        start, count = int(starts[0]), int(counts[0])
        if count * kind.itemsize > len(self.buffer.data) - start:
            raise self.buffer.broken(f"field {field} of {self.what} is not within the file")
        raw = self.buffer.data.gather(np.array([start]), count * kind.itemsize)
        return raw.reshape(-1).view(kind).copy()

    def rows(self, field: int, form: str, absent: int | None = None) -> NDArray[Any]:
        """Return a vector of each table as a row; all of them must have the same length.

        With `absent`, which is that length if no table has the vector, absent ones are zeros.
        """
        kind = np.dtype(form)
        starts, counts = self.vectors(field)
        has = counts > 0
        width = int(counts[has][0]) if np.any(has) else absent or 0
        if np.any(counts[has] != width) or (absent is None and np.any(has != np.any(has))):
            raise self.buffer.broken(f"{self.what} have vectors of different lengths")
        nbytes = width * kind.itemsize
        if nbytes * int(has.sum()) > len(self.buffer.data) or np.any(
            starts[has] + nbytes > len(self.buffer.data)
        ):
            raise self.buffer.broken(f"the vectors of {self.what} are not within the file")
        if nbytes * len(self) > max_record_bytes():
            raise self.buffer.broken(f"{self.what} without vectors would take too much memory")
        found = np.zeros((len(self), width), kind)
        for row in np.flatnonzero(has):
            raw = self.buffer.data.gather(starts[row : row + 1], nbytes)
            found[row] = raw.reshape(-1).view(kind)
        return found

    def first(self) -> Tables:
        """Return the first of these tables, or none."""
        names = ("positions", "vtables", "sizes", "lengths")
        return replace(self, **{name: getattr(self, name)[:1] for name in names})

    def count(self, field: int) -> int:
        """Return the number of elements of a vector of the only table; 0 without any table."""
        return int(self.vectors(field)[1].sum())

    def children(self, field: int, what: str) -> Tables:
        """Return the tables in a vector of the only table."""
        starts, counts = self.vectors(field)
        start, count = int(starts[0]), int(counts[0])
        if count * 4 > len(self.buffer.data) - start:
            raise self.buffer.broken(f"{what} are not within the file")
        at = start + 4 * np.arange(count, dtype=np.int64)
        return self.buffer.tables(
            at + self.buffer.numbers(at, _OFFSET, what).astype(np.int64), what
        )
