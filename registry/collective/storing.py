"""The end of storing one state: what rank 0 alone has, then manifest and placement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.registry.collective import agreement
from holdfast.registry.collective.agreement import RankPart
from holdfast.registry.errors import IntegrityError
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState
from holdfast.registry.pytree.leaves import NamedLeaf
from holdfast.registry.storage.chunking import INLINE_BYTES, grid
from holdfast.registry.storage.manifest import Component, Manifest, TensorEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.finite import is_finite, is_watched
from holdfast.registry.writing.object_writer import ChosenKeys, placed_keys
from holdfast.registry.writing.placing import (
    ChunkLocation,
    Written,
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
        fresh: dict[Digest, ChunkLocation],
        codec: str,
        watched: Sequence[str],
    ) -> None:
        self._committer, self._said, self._state = committer, small, state
        self._skeletons, self._digests, self._bases = skeletons, digests, bases
        self._fresh, self._codec, self._watched = fresh, codec, watched
        self._layout = part.layout
        self._number = {leaf.path: n for n, leaf in enumerate(part.layout.leaves)}
        self._small = {leaf.path: n for n, leaf in enumerate(part.layout.inline)}
        self._stored = locations_of(bases)
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
        self._fresh.update(write_packs(store, writer, self._groups(), self._codec))
        locations = {**self._stored, **self._fresh}
        for digest in manifest.all_chunks(self._lists):
            if digest not in locations:
                raise IntegrityError(
                    "no rank has stored a chunk of the state",
                    where=f"chunk {digest.short}",
                    hint="Nothing was committed; save again.",
                )
        size = sum(one.stored_bytes for one in self._fresh.values())
        return place_manifest(store, writer, manifest, self._lists, locations, self._bases, size)

    def _component(self, part: FlatComponent, skeleton: bytes) -> Component:
        return Component.build(part.skeleton, [*map(self._entry, part.leaves)], skeleton)

    def _entry(self, leaf: ArrayLeaf) -> TensorEntry:
        number = self._number.get(leaf.path)
        if number is not None:
            first = self._layout.structure.first
            rows = self._digests[first[number] : first[number + 1]]
            return self._chunked(leaf, tuple(Digest.each(rows.tobytes())))
        if leaf.nbytes <= INLINE_BYTES:
            data = self._inline(leaf)
            self._look(leaf, data)
            return TensorEntry(leaf.dtype, leaf.shape, inline=data)
        return self._chunked(leaf, tuple(self._cut(leaf)))

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

    def _chunked(self, leaf: ArrayLeaf, chunks: tuple[Digest, ...]) -> TensorEntry:
        return chunked_entry(leaf, chunks, self._lists)

    def _groups(self) -> Iterator[list[Chunk]]:
        """Yield what rank 0 stores alone, and the digest lists."""
        for digest, data in self._lists.items():
            self._chunks.setdefault(digest, Chunk(digest, memoryview(data)))
        new = [
            one
            for digest, one in self._chunks.items()
            if digest not in self._stored and digest not in self._fresh
        ]
        if new:
            yield new
