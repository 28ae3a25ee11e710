"""Rows in the order of their keys, in a temporary file where there are many.

Upkeep holds in such rows what grows with the store: the objects of a listing, those that runs
need, those that a sweep condemns, the chunks of all states. Rows beyond a bound wait in a file, by
the first bits of their keys, and are sorted part by part. Two lists are compared by sorting both as
one: `what` says from which of them a row is.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from holdfast.registry.objects import RECORD_BYTES, ObjectKey, records_in
from holdfast.registry.upkeep.gc_report import Tally
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.shelf import no_room

#: Rows that are kept in memory before they go to a file, and that are sorted at once.
_ROWS = 2**17
#: Rows of which objects are made at once.
_TOGETHER = 2**13
#: Parts of a file of rows, by the first bits of their key.
_PARTS_BITS = 6
#: An object, and something that is said of it.
OBJECT = np.dtype(
    [
        ("key", "u8", 5),  # the record of its key
        ("what", "u1"),  # a bit; 1 where a listing says it
        ("size", "u8"),  # bytes, by a listing; any number by others
        ("put_s", "f8"),  # when it was put, seconds by the store's clock, by a listing
    ]
)
LISTED, SPARED = 1, 2
Rows = np.ndarray[Any, Any]


class SortedRows:
    """Rows by a key that is spread evenly; many of them lie in a file."""

    def __init__(
        self,
        dtype: np.dtype[Any] = OBJECT,
        then: str = "what",
        bits: int = 0,
        shard: Shard | None = None,
    ) -> None:
        self._dtype, self._then = dtype, then  # field that orders the rows of one key
        self._bits = bits  # bits of the key that all rows have in common
        self._shard = shard or Shard()  # rows of other keys are not taken
        self._rows = list[Rows]()
        self._waiting = 0  # rows in memory
        self._file: IO[bytes] | None = None
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in range(2**_PARTS_BITS)]
        self.count = 0

    def add(self, rows: Rows) -> None:
        """Take rows."""
        rows = self._shard.of_rows(rows)
        self._rows.append(rows)
        self._waiting += len(rows)
        self.count += len(rows)
        if self._waiting >= _ROWS:
            self._spill()

    def __iter__(self) -> Iterator[Rows]:
        """Yield all rows in the order of their keys, those of one key together."""
        return self.beside()

    def beside(self, *others: SortedRows) -> Iterator[Rows]:
        """Yield all rows, and others with them."""
        lists = [one for one in (self, *others) if one.count]
        if all(one._file is None for one in lists):
            if lists:
                rows = np.concatenate([rows for one in lists for rows in one._rows])
                yield rows[np.lexsort([rows[self._then], *rows["key"].T[::-1]])]
            return
        for one in lists:
            one._spill()
        for number in range(2**_PARTS_BITS):
            part = SortedRows(self._dtype, self._then, self._bits + _PARTS_BITS)
            for one in lists:
                for rows in one._read(number):
                    part.add(rows)
            yield from part

    def _read(self, number: int) -> Iterator[Rows]:
        """Yield the rows of a part of the file."""
        assert self._file is not None
        for start, count in self._pieces[number]:
            self._file.seek(start)
            yield np.frombuffer(self._file.read(count * self._dtype.itemsize), self._dtype)

    def _spill(self) -> None:
        """Write the rows in memory to the file, part by part."""
        if self._bits + _PARTS_BITS > 64:
            return  # equal keys: they are needed at once
        rows = np.concatenate([np.empty(0, self._dtype), *self._rows])
        shift = np.uint64(64 - self._bits - _PARTS_BITS)
        parts = (rows["key"][:, 0] >> shift) & np.uint64(2**_PARTS_BITS - 1)
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(2**_PARTS_BITS), side="right")
        begun = 0
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the rows
                weakref.finalize(self, self._file.close)
            start = self._file.seek(0, 2)
            self._file.write(rows[order].tobytes())
            self._file.flush()
        except OSError as error:
            raise no_room(error) from error
        for part, end in enumerate(map(int, ends)):
            if end > begun:
                place = start + begun * self._dtype.itemsize
                self._pieces[part].append((place, end - begun))
            begun = end
        self._rows, self._waiting = [], 0


class Objects:
    """Objects with their sizes, in the order of their keys."""

    def __init__(self) -> None:
        self._rows = SortedRows()
        self.packs = 0  # how many of them are packs
        self.tally = Tally()

    def add(self, rows: Rows) -> None:
        """Take rows of further objects."""
        if not len(rows):
            return
        self._rows.add(rows)
        self.packs += int((rows["key"][:, 4] >> np.uint64(56) == 0).sum())
        self.tally += Tally(len(rows), int(rows["size"].sum()))

    def __len__(self) -> int:
        return self._rows.count

    def __iter__(self) -> Iterator[ObjectKey]:
        """Yield each object."""
        return (key for key, _ in self.sizes())

    def sizes(self) -> Iterator[tuple[ObjectKey, int]]:
        """Yield each object with its size."""
        for rows in self.parts():
            yield from zip(keys_of(rows), rows["size"].tolist(), strict=True)

    def parts(self) -> Iterator[Rows]:
        """Yield rows in order, not too many at a time."""
        for part in self._rows:
            for start in range(0, len(part), _TOGETHER):
                yield part[start : start + _TOGETHER]

    def largest(self, count: int) -> Objects:
        """Return as many of them as that, the largest."""
        some = Objects()
        for rows in self.parts():
            both = np.concatenate([*some._rows, rows])
            some = Objects()
            some.add(both[np.argsort(both["size"])[-count:]])
        return some

    def without(self, others: SortedRows) -> Objects:
        """Return these objects but for others."""
        if not others.count:
            return self
        kept = Objects()
        for part in self._rows.beside(others):
            heads, told = grouped(part)
            kept.add(heads[told == LISTED])
        return kept


def object_rows(records: Iterable[bytes], what: int, size: int = 0) -> Rows:
    """Return rows that say something of objects."""
    keys = np.frombuffer(b"".join(records), ">u8").reshape(-1, RECORD_BYTES // 8)
    rows = np.zeros(len(keys), OBJECT)
    rows["key"], rows["what"], rows["size"] = keys, what, size
    return rows


def keys_of(rows: Rows) -> list[ObjectKey]:
    """Return the keys of rows of objects."""
    return list(map(ObjectKey.of_record, records_in(rows["key"].astype(">u8").tobytes())))


def starts(rows: Rows, *names: str) -> Rows:
    """Return whether each sorted row differs from the one before it in these fields."""
    differs: Rows = np.arange(len(rows)) == 0
    for name in names:
        other = rows[name][1:] != rows[name][:-1]
        differs[1:] |= other if other.ndim == 1 else other.any(axis=1)
    return differs


def grouped(part: Rows) -> tuple[Rows, Rows]:
    """Return the first row of each object, and the bits of all that is said of it."""
    first = np.flatnonzero(starts(part, "key"))
    told: Rows = np.bitwise_or.reduceat(part["what"], first)
    return part[first], told
