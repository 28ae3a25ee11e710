"""Chunks with their locations in columns: the ranks' stored chunks, and the placement of a state.

A state of a trillion parameters has millions of chunks, and every save sends all to rank 0.
A `ChunkLocation` takes 400 bytes; a row here takes 49.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.backends import Buffer
from holdfast.registry.history import PlacedState
from holdfast.registry.objects import NO_BASE, Manifest, PackRef, Placement, Rows
from holdfast.registry.saving.collective.structure import Ints
from holdfast.registry.values import DIGEST_BYTES, Digest
from holdfast.registry.writing import ChunkLocation

Digests = NDArray[np.uint8]

#: The columns of a placement, without that of bases.
ROW = np.dtype([("pack", "<u4"), ("offset", "<u8"), ("stored_bytes", "<u4"), ("codec", "u1")])
#: Filter a table before sorting it if it has this many times more rows than wanted chunks.
_FEW = 16


@dataclass(frozen=True)
class ChunkTable:
    """Chunks, none of them a delta, and their locations. The first row of a chunk counts."""

    digests: Digests  # the chunks, a row of 32 bytes each
    rows: NDArray[Any]  # their locations
    packs: tuple[PackRef, ...]  # the packs, which `rows` name by number

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, locations: Mapping[Digest, ChunkLocation]) -> Self:
        """Return the table of some locations; bases of deltas are dropped."""
        packs: dict[PackRef, int] = {}
        rows = [
            (packs.setdefault(one.pack, len(packs)), one.offset, one.stored_bytes, one.codec)
            for one in locations.values()
        ]
        return cls(as_digests(b"".join(locations)), np.array(rows, ROW), tuple(packs))

    @classmethod
    def of_state(cls, state: PlacedState) -> Self:
        """Return the table of a stored state that has no delta."""
        named = named_digests(state.manifest, state.lists)
        extra = as_digests(b"".join(state.placement.extra))
        digests = np.concatenate([named[_distinct(_numbers(named))], extra])
        rows = np.zeros(len(digests), ROW)
        columns, start = state.placement.rows.encode(), 0
        for name in ROW.names or ():
            rows[name] = np.frombuffer(columns, ROW[name], len(rows), start)
            start += len(rows) * ROW[name].itemsize
        return cls(digests, rows, state.placement.packs)

    @classmethod
    def decode(cls, digests: Buffer, rows: Buffer, packs: Sequence[PackRef]) -> Self:
        """Decode the result of `encode`."""
        return cls(as_digests(digests), np.frombuffer(rows, ROW), tuple(packs))

    def encode(self) -> tuple[bytes, bytes]:
        """Return digests and rows as bytes; the caller sends the packs."""
        return self.digests.tobytes(), self.rows.tobytes()

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of several tables, one table after another."""
        number: dict[PackRef, int] = {}
        parts = []
        for one in tables:
            packs = [number.setdefault(pack, len(number)) for pack in one.packs]
            rows = one.rows.copy()
            rows["pack"] = np.array(packs, np.uint32)[rows["pack"]]
            parts.append(rows)
        digests = np.concatenate([as_digests(b""), *(one.digests for one in tables)])
        return cls(digests, np.concatenate([np.zeros(0, ROW), *parts]), tuple(number))

    def find(self, wanted: Digests) -> tuple[Ints, Ints]:
        """Look up chunks."""
        some = np.arange(len(self))
        if len(wanted) * _FEW < len(self):
            some = np.flatnonzero(np.isin(_words(self.digests)[:, 0], _words(wanted)[:, 0]))
        number = _numbers(np.concatenate([self.digests[some], wanted]))
        row = np.full(len(number), -1, np.int64)
        row[number[: len(some)][::-1]] = some[::-1]
        number = number[len(some) :]
        distinct = _distinct(number)
        return distinct, row[number[distinct]]

    def placement(self, manifest: Manifest, rows: Ints) -> Placement:
        """Return the placement of a manifest, given the row of each of its distinct chunks."""
        found = self.rows[rows]
        first = np.full(len(self.packs), len(found), np.int64)
        first[found["pack"][::-1]] = np.arange(len(found))[::-1]
        used = np.flatnonzero(first < len(found))
        used = used[np.argsort(first[used])]
        number = np.zeros(len(self.packs), np.uint32)
        number[used] = np.arange(len(used))
        found["pack"] = number[found["pack"]]
        columns = [found[name].tobytes() for name in ROW.names or ()]
        columns.append(np.full(len(found), NO_BASE, "<u4").tobytes())
        packs = tuple(self.packs[pack] for pack in used.tolist())
        return Placement(manifest.digest, packs, Rows.parse(b"".join(columns), len(found)))

    def items(self) -> Iterator[tuple[Digest, ChunkLocation]]:
        """Yield chunks and locations, a chunk's first row last, so that a dict keeps it."""
        for digest, row in zip(
            Digest.each(self.digests[::-1].tobytes()), self.rows[::-1].tolist(), strict=True
        ):
            pack, offset, stored_bytes, codec = row
            yield digest, ChunkLocation(self.packs[pack], offset, stored_bytes, codec)


def as_digests(data: Buffer) -> Digests:
    """Return digests of 32 bytes each as a table."""
    return np.frombuffer(data, np.uint8).reshape(-1, DIGEST_BYTES)


def named_digests(manifest: Manifest, lists: Mapping[Digest, bytes]) -> Digests:
    """Return the chunks of a manifest in the order of its placement, with repetitions."""
    direct = (one.chunk_list or b"".join(one.chunks) for one in manifest.tensors())
    listed = (lists[digest] for digest in manifest.chunk_lists)
    return as_digests(b"".join(chain(direct, listed)))


def _words(digests: Digests) -> NDArray[np.uint64]:
    return np.ascontiguousarray(digests).view(np.uint64)


def _numbers(digests: Digests) -> Ints:
    """Number digests: two get the same number exactly if they are equal."""
    words = _words(digests)
    # The first eight bytes nearly always differ; sorting by all bytes takes longer.
    for order in (np.argsort(words[:, 0]), None):
        order = np.lexsort(words.T) if order is None else order
        ordered = words[order]
        differs = (ordered[1:] != ordered[:-1]).any(axis=1)
        if np.array_equal(differs, ordered[1:, 0] != ordered[:-1, 0]):
            break
    numbers = np.empty(len(digests), np.int64)
    numbers[order] = np.concatenate([[0], differs.cumsum()])[: len(digests)]
    return numbers


def _distinct(numbers: Ints) -> Ints:
    """Return the positions at which a number occurs first."""
    first = np.empty(int(numbers.max(initial=-1)) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return np.flatnonzero(first[numbers] == np.arange(len(numbers)))
