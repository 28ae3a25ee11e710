"""The end of storing one state: what rank 0 alone has, then manifest and placement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.collective import agreement
from holdfast.registry.collective.agreement import RankPart
from holdfast.registry.collective.chunk_table import (
    ChunkTable,
    Digests,
    as_digests,
    named_digests,
)
from holdfast.registry.collective.shards import Layout, whole_shape
from holdfast.registry.errors import IntegrityError
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState
from holdfast.registry.pytree.leaves import NamedLeaf
from holdfast.registry.storage.chunking import INLINE_BYTES, grid
from holdfast.registry.storage.manifest import Component, Manifest
from holdfast.registry.storage.placement import Placement
from holdfast.registry.storage.tensor_entry import TensorEntry
from holdfast.registry.values.digest import DIGEST_BYTES, Digest
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.finite import is_finite, is_watched
from holdfast.registry.writing.object_writer import ChosenKeys, placed_keys
from holdfast.registry.writing.placing import (
    Written,
    build_placement,
    cover,
    locations_of,
    place_manifest,
)
from holdfast.registry.writing.saving import Chunk, chunked_entry, write_packs


class Storing:
    """The end of storing one state: what rank 0 alone has, manifest and placement.

    Args:
        committer: Commits to the run.
        part: The state as rank 0 has it.
        small: What each rank has of the sharded tensors that are not cut.
        state: The state, whole.
        skeletons: The canonical JSON of each component's skeleton.
        digests: The digests of all chunks that the ranks own, a row each.
        bases: Stored states of the run.
        fresh: The chunks that the ranks have stored.
        codec: The codec of chunks.
        watched: Patterns of the paths of tensors that are checked for NaN and infinity.

    Attributes:
        nonfinite: Paths of watched tensors of rank 0 alone that hold NaN or infinity.
    """

    def __init__(
        self,
        committer: Committer,
        part: RankPart,
        small: Sequence[Any],
        state: FlatState,
        skeletons: Sequence[bytes],
        digests: Any,
        bases: Sequence[PlacedState],
        fresh: ChunkTable,
        codec: str,
        watched: Sequence[str],
    ) -> None:
        self._committer, self._said, self._state = committer, small, state
        self._skeletons, self._digests, self._bases = skeletons, digests, bases
        self._fresh, self._codec, self._watched = fresh, codec, watched
        self._layout = part.layout
        self._number = {leaf.path: n for n, leaf in enumerate(part.layout.leaves)}
        self._small = {leaf.path: n for n, leaf in enumerate(part.layout.inline)}
        self._lists: dict[Digest, bytes] = {}
        self._chunks: dict[Digest, Chunk] = {}
        self.nonfinite: set[str] = set()

    def finish(self) -> Written:
        """Put the rest; return the state with its place."""
        committer = self._committer
        components = {
            part.name: self._component(part, skeleton)
            for part, skeleton in zip(self._state.components, self._skeletons, strict=True)
        }
        manifest = Manifest(self._state.kind, components)
        for base in self._bases:
            if base.manifest.digest == manifest.digest:
                keys = placed_keys(base.place, base.placement)
                return Written(base, ChosenKeys(keys, cover(self._bases)), 0)
        store, writer = committer.store, committer.writer
        own = ChunkTable.of(write_packs(store, writer, self._groups(), self._codec))
        placement, size = self._placement(manifest, ChunkTable.joined([self._fresh, own]))
        return place_manifest(store, writer, manifest, placement, self._lists, self._bases, size)

    @cached_property
    def _stored(self) -> ChunkTable:
        """The chunks of the bases."""
        if self._have_deltas:
            return ChunkTable.of(locations_of(self._bases))
        return ChunkTable.joined([*map(ChunkTable.of_state, self._bases)])

    @property
    def _have_deltas(self) -> bool:
        return any(base.placement.rows.has_deltas for base in self._bases)

    def _placement(self, manifest: Manifest, fresh: ChunkTable) -> tuple[Placement, int]:
        """Return the placement, and the stored bytes of new chunks.

        Raises:
            IntegrityError: A chunk of the state is stored nowhere.
        """
        wanted, table = named_digests(manifest, self._lists), fresh
        distinct, rows = table.find(wanted)
        if (rows < 0).any():
            table = ChunkTable.joined([fresh, self._stored])
            distinct, rows = table.find(wanted)
        for position in distinct[rows < 0].tolist():
            raise IntegrityError(
                "no rank has stored a chunk of the state",
                where=f"chunk {Digest(wanted[position].tobytes()).short}",
                hint="Nothing was committed; save again.",
            )
        size = int(table.rows["stored_bytes"][rows[rows < len(fresh)]].sum())
        if not self._have_deltas:
            return table.placement(manifest, rows), size
        locations = locations_of(self._bases) | dict(fresh.items())
        return build_placement(manifest, self._lists, locations), size

    def _component(self, part: FlatComponent, skeleton: bytes) -> Component:
        return Component.build(part.skeleton, [*map(self._entry, part.leaves)], skeleton)

    def _entry(self, leaf: ArrayLeaf) -> TensorEntry:
        number = self._number.get(leaf.path)
        if number is not None:
            first = self._layout.structure.first
            rows = self._digests[first[number] : first[number + 1]]
            return chunked_entry(leaf, rows.tobytes(), self._lists)
        if leaf.nbytes <= INLINE_BYTES:
            data = self._inline(leaf)
            self._look(leaf, data)
            return TensorEntry(leaf.dtype, leaf.shape, inline=data)
        return chunked_entry(leaf, b"".join(self._cut(leaf)), self._lists)

    def _inline(self, leaf: ArrayLeaf) -> bytes:
        at = self._small.get(leaf.path)
        if at is None:
            return bytes(leaf.buffer()) if leaf.nbytes else b""
        parts = [one[at] for one in self._said]
        where = self._committer.log.run_id
        return agreement.join_small(self._layout.inline[at], parts, where)

    def _cut(self, leaf: ArrayLeaf) -> Iterator[Digest]:
        """Yield the chunks of a tensor that rank 0 has alone: an own value of some rank."""
        start = 0
        view = leaf.buffer()
        self._look(leaf, view)
        for number, size in enumerate(grid(leaf.dtype, leaf.shape).sizes()):
            data = view[start : start + size]
            digest = Digest(hashlib.sha256(data).digest())
            named = NamedLeaf(leaf.dtype, leaf.shape, leaf.nbytes, leaf.path)
            self._chunks.setdefault(digest, Chunk(digest, data, named, number))
            start += size
            yield digest

    def _look(self, leaf: ArrayLeaf, data: Any) -> None:
        if is_watched(leaf, self._watched) and not is_finite(data, leaf.dtype):
            self.nonfinite.add(leaf.path)

    def _groups(self) -> Iterator[list[Chunk]]:
        """Yield what rank 0 stores alone, and the digest lists."""
        for digest, data in self._lists.items():
            self._chunks.setdefault(digest, Chunk(digest, memoryview(data)))
        wanted = as_digests(b"".join(self._chunks))
        known = [table.find(wanted)[1] >= 0 for table in (self._fresh, self._stored)]
        chunks = list(self._chunks.values())
        new = [chunks[n] for n in np.flatnonzero(~(known[0] | known[1])).tolist()]
        if new:
            yield new


def known_digests(layout: Layout, bases: Sequence[PlacedState]) -> Digests:
    """Return the digests that stored states have for the chunks of a layout, zeros for none."""
    first = layout.structure.first
    found = np.zeros((int(first[-1]), DIGEST_BYTES), np.uint8)
    number = {leaf.path: n for n, leaf in enumerate(layout.leaves)}
    done: set[int] = set()
    for base in bases:
        for component, part in base.manifest.components.items():
            paths = pytree.leaf_paths(component, part.skeleton)
            for index, entry in enumerate(part.tensors):
                at = number.get(paths.get(index, ""))
                if at is None or at in done or entry.inline is not None:
                    continue
                leaf = layout.leaves[at]
                if (entry.dtype, entry.shape) != (str(leaf.dtype), whole_shape(leaf)):
                    continue
                done.add(at)
                found[first[at] : first[at + 1]] = as_digests(entry.digest_bytes(base.lists))
    return found
