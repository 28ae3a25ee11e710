"""Read tensors and digest lists of a stored state into the caller's memory.

This module decides which chunk goes to which memory; `fetching` reads and verifies the chunks. The
memory comes from `holdfast.registry.loading.destinations` for a load, from `lazy` for a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.registry.errors import Malformed
from holdfast.registry.objects import ChunkIndex, Manifest, Placement, TensorEntry, thinned
from holdfast.registry.store.fetching import Cache, Fetch, check_length
from holdfast.registry.store.store import Store
from holdfast.registry.values import (
    DIGEST_BYTES,
    LISTED_BYTES,
    Digest,
    ProcessLock,
    check_bytes,
    collector_paused,
)

#: A tensor and the memory for its bytes.
Target = tuple[TensorEntry, memoryview]


def read_tensors(
    store: Store, manifest: Manifest, placement: Placement, targets: Sequence[Target]
) -> None:
    """Fill memory with tensors of a state, every byte verified."""
    index = StateIndex(store, manifest, placement, {})
    lists = index.learn([tensor for tensor, _ in targets])
    with collector_paused():
        digests, views = _chunks(targets, lists)
        first = dict(zip(digests, views, strict=True))
    fetch_chunks(store, placement, index.chunks, first)
    if len(first) < len(views):
        for digest, view in zip(digests, views, strict=True):
            if view is not (source := first[digest]):
                view[:] = source


class StateIndex:
    """The rows of a state's chunks. The digests of a tensor, or its list, are read when it is.

    Rows follow the manifest's distinct chunks. If no two chunks are equal, and none is a delta, the
    rows of each tensor are known without the digests of the others. Otherwise all digests that the
    manifest names are read at once; and all lists, unless only chunks that it names are equal.
    """

    def __init__(
        self, store: Store, manifest: Manifest, placement: Placement, lists: dict[Digest, bytes]
    ) -> None:
        manifest = _covered(manifest, placement)
        self._store, self._manifest, self._placement = store, manifest, placement
        self._lists = lists
        self._lock = ProcessLock()
        self._chunks: ChunkIndex | None = None
        # By list the first row of its chunks; of lists whose chunks are not indexed yet.
        self._apart: dict[Digest, int] = {}
        # A tensor that was given up may begin with the same chunk as one that is there.
        self._is_plain = placement.components is None and _is_plain(manifest, placement)
        at = manifest.named_count if self._is_plain else len(manifest.direct_chunks)
        self._is_whole = not self._is_plain  # whether all chunks that it names are indexed
        for digest, tensor in manifest.chunk_lists.items():
            self._apart[digest] = at
            at += tensor.grid.count
        rows = placement.rows
        self._is_apart = at == len(rows) and not placement.extra and not rows.has_deltas

    @property
    def chunks(self) -> ChunkIndex:
        """The known rows: at least those of the tensors given to `learn`."""
        self.learn(())
        assert self._chunks is not None
        return self._chunks

    def holding(self, wanted: Iterable[Digest]) -> ChunkIndex:
        """Return the rows of these chunks and of others; of an unknown one all lists are read."""
        if not all(map(self.chunks.__contains__, wanted)):
            self.learn(self._manifest.tensors())
        return self.chunks

    def learn(self, tensors: Iterable[TensorEntry]) -> Mapping[Digest, bytes]:
        """Index the chunks of some tensors and read their lists; return the known lists."""
        with self._lock.here():
            tensors = list(tensors)
            wanted = {one.chunk_list for one in tensors if one.chunk_list is not None}
            held = self._placement.components
            if held is not None and not wanted <= self._apart.keys() | self._lists.keys():
                raise thinned(held, self._manifest.digest.short)
            if not self._is_apart:
                wanted = set(self._apart) if self._chunks is None else set()
            lacking = [
                one for one in self._manifest.chunk_lists if one in wanted - set(self._lists)
            ]
            if lacking:
                store, manifest, placement = self._store, self._manifest, self._placement
                self._lists |= read_lists(store, manifest, placement, lacking)
            if self._chunks is None:
                # One by one they would take longer than all at once.
                self._is_whole |= len(tensors) * 2 > self._manifest.named_count
                self._chunks = self._index()
            for one in () if self._is_whole else tensors:
                if one.chunks and one.chunks[0] not in self._chunks:
                    self._chunks.add(self._manifest.first_named[one.chunks[0]], one.chunks)
            for digest in self._apart.keys() & self._lists.keys() if self._is_apart else ():
                tensor = self._manifest.chunk_lists[digest]
                self._chunks.add(self._apart.pop(digest), tensor.chunk_digests(self._lists))
            return self._lists

    def _index(self) -> ChunkIndex:
        if self._is_plain:
            return ChunkIndex(self._placement, self._manifest.named() if self._is_whole else ())
        if self._is_apart:
            return ChunkIndex(self._placement, self._manifest.direct_chunks)
        return index_chunks(self._manifest, self._placement, self._lists)


def _is_plain(manifest: Manifest, placement: Placement) -> bool:
    """Return whether no two chunks of a state are equal, and none is a delta."""
    listed = sum(tensor.grid.count for tensor in manifest.chunk_lists.values())
    rows = placement.rows
    is_distinct = manifest.named_count + listed == len(rows)
    return is_distinct and not placement.extra and not rows.has_deltas


def fetch_chunks(
    store: Store,
    placement: Placement,
    index: ChunkIndex,
    wanted: Mapping[Digest, memoryview],
    caches: Sequence[Cache] = (),
) -> int:
    """Fill memory with single chunks, every byte verified; return the bytes that were read."""
    fetch = Fetch(store, placement, index, caches)
    fetch.read(wanted)
    return fetch.moved_bytes


def index_chunks(
    manifest: Manifest, placement: Placement, lists: Mapping[Digest, bytes]
) -> ChunkIndex:
    """Return the index of a placement: the row of each chunk."""
    return placement.index(_covered(manifest, placement).all_chunks(lists))


def _covered(manifest: Manifest, placement: Placement) -> Manifest:
    """Return the components that a placement covers: all, or those that a thinning left."""
    if placement.manifest != manifest.digest:
        raise Malformed(
            "another checkpoint's placement",
            where=f"placement {placement.digest.short}",
            expected=manifest.digest,
            found=placement.manifest,
        )
    return manifest.part(placement.components)


def read_lists(
    store: Store, manifest: Manifest, placement: Placement, wanted: Iterable[Digest] | None = None
) -> dict[Digest, bytes]:
    """Return the stored digest lists of a manifest's largest tensors, verified."""
    manifest = _covered(manifest, placement)
    if not manifest.chunk_lists:
        return {}
    index = check_list_lengths(manifest, placement)
    some = manifest.chunk_lists if wanted is None else wanted
    buffers = {digest: bytearray(_list_bytes(manifest, digest)) for digest in some}
    views = {digest: memoryview(data) for digest, data in buffers.items()}
    Fetch(store, placement, index).read(views)
    return {digest: bytes(data) for digest, data in buffers.items()}


def check_list_lengths(manifest: Manifest, placement: Placement) -> ChunkIndex:
    """Check the lengths of digest lists against the placement, before memory is allocated.

    A manifest can claim any shape.
    """
    manifest = _covered(manifest, placement)
    # The first rows are those of the manifest's own chunks, so lists are found before any is read.
    is_plain = _is_plain(manifest, placement)
    if not is_plain and len(placement.rows) < len(manifest.direct_chunks):
        raise Malformed(
            "placement does not cover its manifest",
            where=placement.digest,
            expected=f"at least {len(manifest.direct_chunks)} rows",
            found=len(placement.rows),
        )
    index = ChunkIndex(placement, () if is_plain else manifest.direct_chunks)
    for digest in manifest.chunk_lists if is_plain else ():
        index.add(manifest.first_named[digest], [digest])
    counts = sum(tensor.grid.count for tensor in manifest.chunk_lists.values())
    check_bytes(counts * LISTED_BYTES, "reading its digest lists", where=manifest.digest)
    for digest in manifest.chunk_lists:
        check_length(digest, placement.rows[index.row(digest)], _list_bytes(manifest, digest))
    return index


def _list_bytes(manifest: Manifest, digest: Digest) -> int:
    return DIGEST_BYTES * manifest.chunk_lists[digest].grid.count


def _chunks(
    targets: Iterable[Target], lists: Mapping[Digest, bytes]
) -> tuple[list[Digest], list[memoryview]]:
    """Return every chunk of the targets, and its part of the memory; fill inline tensors."""
    digests: list[Digest] = []
    views: list[memoryview] = []
    for tensor, view in targets:
        if tensor.inline is not None:
            view[:] = tensor.inline
            continue
        chunks = tensor.chunk_digests(lists) if tensor.chunk_list else tensor.chunks
        digests += chunks
        if len(chunks) == 1:
            views.append(view)
            continue
        start = 0
        for size in tensor.grid.sizes():
            views.append(view[start : start + size])
            start += size
    return digests, views
