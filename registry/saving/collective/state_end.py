"""The end of storing one state, on rank 0: its manifest and placement, from what ranks have stored.

Stored chunks and their locations are in columns: a state of a trillion parameters has millions of
chunks, and every save sends all to rank 0. A `ChunkLocation` takes 400 bytes; a row here takes 49.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.backends import Buffer
from holdfast.registry import pytree
from holdfast.registry.errors import IntegrityError
from holdfast.registry.history import PlacedState
from holdfast.registry.objects import (
    INLINE_BYTES,
    NO_BASE,
    Component,
    Manifest,
    PackRef,
    Placement,
    Rows,
    TensorEntry,
    grid,
)
from holdfast.registry.pytree import ArrayLeaf, FlatState, NamedLeaf
from holdfast.registry.saving.collective.agreement import join_small
from holdfast.registry.saving.collective.shards import Ints, Layout, whole_shape
from holdfast.registry.values import DIGEST_BYTES, Digest
from holdfast.registry.writing import (
    ChosenKeys,
    Chunk,
    ChunkLocation,
    StateWriter,
    Written,
    build_placement,
    chunked_entry,
    cover,
    is_finite,
    is_watched,
    locations_of,
    place_manifest,
    placed_keys,
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


@dataclass(kw_only=True)
class StateEnd:
    """The end of a state on rank 0, once all ranks have stored their chunks."""

    writer: StateWriter
    layout: Layout  # rank 0's tensors and boxes
    small: Sequence[Any]  # of each rank, its boxes of the sharded tensors that are not cut
    state: FlatState  # the whole state; of a sharded tensor without bytes
    skeletons: Sequence[bytes]  # of its components
    digests: Any  # the digests of the plan's chunks, a row each
    bases: Sequence[PlacedState]  # the states whose chunks it may share
    stored: ChunkTable  # the chunks that the ranks have stored for it
    codec: str
    watched: Sequence[str]  # path patterns of the tensors to check for NaN and infinity

    def __post_init__(self) -> None:
        """Number the tensors by path."""
        self._number = {leaf.path: n for n, leaf in enumerate(self.layout.leaves)}
        self._small_number = {leaf.path: n for n, leaf in enumerate(self.layout.inline)}
        self._lists: dict[Digest, bytes] = {}
        self._chunks: dict[Digest, Chunk] = {}
        #: Paths of watched tensors with NaN or infinity that only rank 0 stores.
        self.nonfinite: set[str] = set()

    def finish(self) -> Written:
        """Put the remaining objects; return the state with its place."""
        components = {
            one.name: Component.build(one.skeleton, [*map(self._entry, one.leaves)], skeleton)
            for one, skeleton in zip(self.state.components, self.skeletons, strict=True)
        }
        manifest = Manifest(self.state.kind, components)
        for base in self.bases:
            if base.manifest.digest == manifest.digest and base.placement.components is None:
                keys = placed_keys(base.place, base.placement)
                return Written(base, ChosenKeys(keys, cover(self.bases)), 0)
        store, writer = self.writer.store, self.writer.objects
        own = ChunkTable.of(write_packs(store, writer, self._batches(), self.codec))
        placement, size = self._placement(manifest, ChunkTable.joined([self.stored, own]))
        return place_manifest(store, writer, manifest, placement, self._lists, self.bases, size)

    @cached_property
    def _known(self) -> ChunkTable:
        """The chunks of the bases."""
        if self._have_deltas:
            return ChunkTable.of(locations_of(self.bases))
        return ChunkTable.joined([*map(ChunkTable.of_state, self.bases)])

    @property
    def _have_deltas(self) -> bool:
        return any(base.placement.rows.has_deltas for base in self.bases)

    def _placement(self, manifest: Manifest, new: ChunkTable) -> tuple[Placement, int]:
        """Return the placement, and the stored bytes of new chunks."""
        wanted, table = named_digests(manifest, self._lists), new
        distinct, rows = table.find(wanted)
        if (rows < 0).any():
            table = ChunkTable.joined([new, self._known])
            distinct, rows = table.find(wanted)
        for position in distinct[rows < 0].tolist():
            raise IntegrityError(
                "no rank has stored a chunk of the state",
                where=f"chunk {Digest(wanted[position].tobytes()).short}",
                hint="Nothing was committed; save again.",
            )
        size = int(table.rows["stored_bytes"][rows[rows < len(new)]].sum())
        if not self._have_deltas:
            return table.placement(manifest, rows), size
        locations = locations_of(self.bases) | dict(new.items())
        return build_placement(manifest, self._lists, locations), size

    def _entry(self, leaf: ArrayLeaf) -> TensorEntry:
        number = self._number.get(leaf.path)
        if number is not None:
            first = self.layout.structure.first
            rows = self.digests[first[number] : first[number + 1]]
            return chunked_entry(leaf, rows.tobytes(), self._lists)
        if leaf.nbytes <= INLINE_BYTES:
            data = self._inline(leaf)
            self._check_finite(leaf, data)
            return TensorEntry(leaf.dtype, leaf.shape, inline=data)
        return chunked_entry(leaf, b"".join(self._cut(leaf)), self._lists)

    def _inline(self, leaf: ArrayLeaf) -> bytes:
        at = self._small_number.get(leaf.path)
        if at is None:
            return bytes(leaf.buffer()) if leaf.nbytes else b""
        boxes = [rank[at] for rank in self.small]
        return join_small(self.layout.inline[at], boxes, self.writer.log.run_id)

    def _cut(self, leaf: ArrayLeaf) -> Iterator[Digest]:
        """Yield the chunks of a tensor that only rank 0 stores: a `PerRank` value of some rank."""
        start = 0
        view = leaf.buffer()
        self._check_finite(leaf, view)
        for number, size in enumerate(grid(leaf.dtype, leaf.shape).sizes()):
            data = view[start : start + size]
            digest = Digest.of(data)
            named = NamedLeaf(leaf.dtype, leaf.shape, leaf.nbytes, leaf.path)
            self._chunks.setdefault(digest, Chunk(digest, data, named, number))
            start += size
            yield digest

    def _check_finite(self, leaf: ArrayLeaf, data: Any) -> None:
        if is_watched(leaf, self.watched) and not is_finite(data, leaf.dtype):
            self.nonfinite.add(leaf.path)

    def _batches(self) -> Iterator[list[Chunk]]:
        """Yield the chunks that only rank 0 stores, and the digest lists."""
        for digest, data in self._lists.items():
            self._chunks.setdefault(digest, Chunk(digest, memoryview(data)))
        wanted = as_digests(b"".join(self._chunks))
        known = [table.find(wanted)[1] >= 0 for table in (self.stored, self._known)]
        chunks = list(self._chunks.values())
        new = [chunks[n] for n in np.flatnonzero(~(known[0] | known[1])).tolist()]
        if new:
            yield new


def known_digests(layout: Layout, bases: Sequence[PlacedState]) -> Digests:
    """Return the digests of a plan's chunks in stored states; zeros if no state has the chunk."""
    first = layout.structure.first
    found = np.zeros((int(first[-1]), DIGEST_BYTES), np.uint8)
    number = {leaf.path: n for n, leaf in enumerate(layout.leaves)}
    done: set[int] = set()
    for base in bases:
        for name, component in base.manifest.components.items():
            paths = pytree.leaf_paths(name, component.skeleton)
            for index, entry in enumerate(component.tensors):
                at = number.get(paths.get(index, ""))
                if at is None or at in done or entry.inline is not None:
                    continue
                leaf = layout.leaves[at]
                if (entry.dtype, entry.shape) != (str(leaf.dtype), whole_shape(leaf)):
                    continue
                done.add(at)
                found[first[at] : first[at + 1]] = as_digests(entry.digest_bytes(base.lists))
    return found
