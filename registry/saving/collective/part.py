"""One rank's storing: hash the chunks that the rank owns, put the new ones.

Stored chunks and their locations are in columns: a state of a trillion parameters has millions of
chunks, and every save sends all to rank 0. A `ChunkLocation` takes 400 bytes; a row here takes 49.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.backends import Buffer
from holdfast.registry.history import PlacedState
from holdfast.registry.history.actions import ReportMetrics
from holdfast.registry.history.replay import Slot
from holdfast.registry.objects import (
    NO_BASE,
    PACK_BYTES,
    Manifest,
    ObjectKey,
    PackRef,
    Placement,
    Rows,
)
from holdfast.registry.pytree import NamedLeaf
from holdfast.registry.saving.collective.agreement import complete_chunks
from holdfast.registry.saving.collective.boxes import Ints
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.plan import Part
from holdfast.registry.saving.collective.shards import Layout, whole_bytes, whole_shape
from holdfast.registry.saving.collective.talk import join
from holdfast.registry.store import Store
from holdfast.registry.values import DIGEST_BYTES, Digest, item_size
from holdfast.registry.writing import (
    Chunk,
    ChunkLocation,
    Writer,
    is_finite,
    is_watched,
    write_packs,
)

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


@dataclass(frozen=True)
class PartOrder:
    """Rank 0's message to a rank, before the rank stores its chunks."""

    links: str  # the connections of the ranks
    codec: str  # the codec of chunks, a name of `holdfast.registry.objects.codecs`
    watched: Sequence[str]  # path patterns of the tensors to check for NaN and infinity
    epoch: int  # the epoch that rank 0 has observed
    #: The digests of the owned chunks in the base, in order; zeros if the base lacks one.
    known: memoryview


@dataclass(frozen=True)
class PartReport:
    """A rank's answer: the chunks that it stored."""

    digests: Any  # the digests of its chunks, in the order of its part of the plan, 32 bytes each
    nonfinite: Sequence[int]  # numbers of the tensors with NaN or infinity in its chunks
    stored: ChunkTable  # the chunks that it has stored

    def encode(self) -> bytes:
        """Return the report as a message; every key was seen, or its put acknowledged (CS2)."""
        named = [
            [one.key.digest.hex(), one.key.generation, one.size_bytes] for one in self.stored.packs
        ]
        header = {"packs": named, "nonfinite": list(self.nonfinite)}
        return join(header, self.digests, *self.stored.encode())

    @classmethod
    def of(cls, header: Mapping[str, Any], columns: Sequence[memoryview]) -> PartReport:
        """Decode the result of `encode`."""
        digests, stored, rows = columns
        packs = [
            PackRef(ObjectKey("packs", Digest.from_hex(name), generation), size)
            for name, generation, size in header["packs"]
        ]
        return cls(digests, header["nonfinite"], ChunkTable.decode(stored, rows, packs))


def write_part(
    store: Store, writer: Writer, group: Group, layout: Layout, part: Part, order: PartOrder
) -> PartReport:
    """Store this rank's chunks that the base does not have."""
    return _PartWriter(store, layout, part, order).write(writer, group)


class _PartWriter:
    """The writing of one rank's part of a state."""

    def __init__(self, store: Store, layout: Layout, part: Part, order: PartOrder) -> None:
        self._store, self._layout, self._part, self._order = store, layout, part, order
        self._items = [item_size(one) for one in layout.structure.dtypes]
        self._leaves = [
            NamedLeaf(leaf.dtype, whole_shape(leaf), whole_bytes(leaf), leaf.path)
            for leaf in layout.leaves
        ]
        self._watched = [is_watched(leaf, order.watched) for leaf in self._leaves]
        self._digests = bytearray(len(part.chunks) * DIGEST_BYTES)
        self._nonfinite: set[int] = set()
        self._memory: dict[int, tuple[Any, Ints]] = {}

    def write(self, writer: Writer, group: Group) -> PartReport:
        writer.hear(self._order.epoch)
        chunks = complete_chunks(group, self._order.links, self._part, self._items, self._memory_of)
        locations = write_packs(self._store, writer, self._groups(chunks), self._order.codec)
        for leaf in self._layout.leaves:
            leaf.release()
        return PartReport(self._digests, sorted(self._nonfinite), ChunkTable.of(locations))

    def _memory_of(self, tensor: int) -> tuple[Any, Ints]:
        found = self._memory.get(tensor)
        if found is None:
            found = self._memory[tensor] = self._layout.memory(tensor)
        return found

    def _groups(self, chunks: Iterator[tuple[int, Ints, memoryview]]) -> Iterator[list[Chunk]]:
        """Yield the new chunks in batches for one pack each; packs never mix components."""
        group: list[tuple[int, Ints, memoryview]] = []
        size, name = 0, ""
        for number, chunk, data in chunks:
            component = self._leaves[int(chunk[0])].path.partition("/")[0]
            if group and (component != name or size + len(data) > PACK_BYTES):
                yield self._fresh(group)
                group, size = [], 0
            group.append((number, chunk, data))
            size, name = size + len(data), component
        if group:
            yield self._fresh(group)

    def _fresh(self, group: Sequence[tuple[int, Ints, memoryview]]) -> list[Chunk]:
        found = self._store.pools.hashing.map(self._hash, group)
        return [chunk for chunk in found if chunk is not None]

    def _hash(self, owned: tuple[int, Ints, memoryview]) -> Chunk | None:
        number, chunk, data = owned
        tensor = int(chunk[0])
        digest = Digest(hashlib.sha256(data).digest())
        at = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        self._digests[at] = digest
        leaf = self._leaves[tensor]
        if self._watched[tensor] and not is_finite(data, leaf.dtype):
            self._nonfinite.add(tensor)
        if bytes(self._order.known[at]) == digest:
            return None
        return Chunk(digest, data, leaf, int(chunk[1]))


def find_write(slots: Iterable[Slot], write: str) -> int | None:
    """Return the number of the checkpoint that a write added or repeated; `None` without one."""
    for slot in slots:
        for _, commit in slot.commits:
            if commit.write != write:
                continue
            repeated = (one.checkpoint for one in commit.actions if isinstance(one, ReportMetrics))
            return next(repeated, commit.n)
    return None
