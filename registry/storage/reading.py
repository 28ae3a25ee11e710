"""Read tensors and digest lists of a stored state into the caller's memory.

This module decides which chunk goes to which memory; `fetching` reads and verifies the chunks, and
`holdfast.registry.loading.stored` allocates the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.registry.errors import Malformed
from holdfast.registry.storage.fetching import Fetch, check_length
from holdfast.registry.storage.manifest import Manifest, TensorEntry
from holdfast.registry.storage.placement import ChunkIndex, Placement
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.parse_limits import LISTED_BYTES, check_bytes

#: A tensor and the memory for its bytes.
Target = tuple[TensorEntry, memoryview]


def read_tensors(
    store: Store, manifest: Manifest, placement: Placement, targets: Sequence[Target]
) -> None:
    """Fill memory with tensors of a state, every byte verified.

    Args:
        store: The store to read.
        manifest: The state.
        placement: Its placement.
        targets: Tensors of the manifest, each with a writable flat byte view of its size.

    Raises:
        Damaged: A chunk's bytes do not hash to its digest; do not use the memory then.
        MissingObject: A pack is gone.
    """
    lists = read_lists(store, manifest, placement)
    index = index_chunks(manifest, placement, lists)
    first: dict[Digest, memoryview] = {}
    copies: list[tuple[memoryview, memoryview]] = []
    for digest, view in _chunks(targets, lists):
        if digest in first:
            copies.append((view, first[digest]))
        else:
            first[digest] = view
    read_chunks(store, placement, index, first)
    for view, source in copies:
        view[:] = source


def read_chunks(
    store: Store,
    placement: Placement,
    index: ChunkIndex,
    wanted: Mapping[Digest, memoryview],
) -> None:
    """Fill memory with single chunks, every byte verified.

    Args:
        store: The store to read.
        placement: The placement that names the chunks.
        index: Its index, from `index_chunks`.
        wanted: Chunks, each with a writable flat byte view of its raw length.

    Raises:
        Damaged: A chunk's bytes do not hash to its digest; do not use the memory then.
        MissingObject: A pack is gone.
    """
    Fetch(store, placement, index).read(wanted)


def index_chunks(
    manifest: Manifest, placement: Placement, lists: Mapping[Digest, bytes]
) -> ChunkIndex:
    """Return the index of a placement: the row of each chunk.

    Raises:
        Malformed: The placement belongs to another manifest, or has more or fewer rows than chunks.
    """
    if placement.manifest != manifest.digest:
        raise Malformed(
            "another checkpoint's placement",
            where=f"placement {placement.digest.short}",
            expected=manifest.digest,
            found=placement.manifest,
        )
    return placement.index(manifest.all_chunks(lists))


def read_lists(store: Store, manifest: Manifest, placement: Placement) -> dict[Digest, bytes]:
    """Return the stored digest lists of a manifest's largest tensors, verified."""
    if not manifest.chunk_lists:
        return {}
    index = check_lists(manifest, placement)
    buffers = {digest: bytearray(manifest.direct_chunks[digest]) for digest in manifest.chunk_lists}
    views = {digest: memoryview(data) for digest, data in buffers.items()}
    Fetch(store, placement, index).read(views)
    return {digest: bytes(data) for digest, data in buffers.items()}


def check_lists(manifest: Manifest, placement: Placement) -> ChunkIndex:
    """Check the lengths of digest lists against the placement, before memory is allocated.

    A manifest can claim any shape.

    Returns:
        The index of the chunks that the manifest itself names.

    Raises:
        Malformed: A list is longer or shorter than the tensor needs.
        BeyondLimit: Reading the lists would take more memory than allowed.
    """
    # The first rows are those of the manifest's own chunks, so lists are found before any is read.
    if len(placement.rows) < len(manifest.direct_chunks):
        raise Malformed(
            "placement does not cover its manifest",
            where=placement.digest,
            expected=f"at least {len(manifest.direct_chunks)} rows",
            found=len(placement.rows),
        )
    index = ChunkIndex(placement, manifest.direct_chunks)
    counts = sum(tensor.grid.count for tensor in manifest.chunk_lists.values())
    check_bytes(counts * LISTED_BYTES, "reading its digest lists", where=manifest.digest)
    for digest in manifest.chunk_lists:
        check_length(digest, placement.rows[index.row(digest)], manifest.direct_chunks[digest])
    return index


def _chunks(
    targets: Iterable[Target], lists: Mapping[Digest, bytes]
) -> Iterator[tuple[Digest, memoryview]]:
    """Yield every chunk of the targets with its part of the memory; fill inline tensors."""
    for tensor, view in targets:
        if tensor.inline is not None:
            view[:] = tensor.inline
            continue
        digests = tensor.chunk_digests(lists)
        if len(digests) == 1:
            yield digests[0], view
            continue
        start = 0
        for digest, size in zip(digests, tensor.grid.sizes(), strict=True):
            yield digest, view[start : start + size]
            start += size
