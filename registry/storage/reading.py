"""The read path: which chunks of a state go to which memory.

How they come there, verified, is the business of `fetching`; where the memory comes from that of
`holdfast.registry.loading.stored`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.registry.errors import Malformed
from holdfast.registry.storage.fetching import Fetch, check_length
from holdfast.registry.storage.manifest import Manifest, TensorEntry, parse_list
from holdfast.registry.storage.placement import ChunkIndex, Placement
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.parse_limits import LISTED_BYTES, check_bytes

#: A tensor and the memory that its bytes go to.
Target = tuple[TensorEntry, memoryview]


def read_tensors(
    store: Store, manifest: Manifest, placement: Placement, targets: Sequence[Target]
) -> None:
    """Fill memory with tensors of a checkpoint, every byte verified.

    Args:
        store: Where from.
        manifest: The checkpoint.
        placement: Where its chunks lie.
        targets: Tensors of the manifest, each with a writable flat byte view of its size.

    Raises:
        Damaged: A chunk's bytes do not hash to its digest; the memory is then not to be used.
        MissingObject: A pack is gone.
    """
    lists = read_lists(store, manifest, placement)
    places = index_chunks(manifest, placement, lists)
    first: dict[Digest, memoryview] = {}
    copies: list[tuple[memoryview, memoryview]] = []
    for digest, view in _chunks(targets, lists):
        if digest in first:
            copies.append((view, first[digest]))
        else:
            first[digest] = view
    read_chunks(store, placement, places, first)
    for view, source in copies:
        view[:] = source


def read_chunks(
    store: Store,
    placement: Placement,
    places: ChunkIndex,
    wanted: Mapping[Digest, memoryview],
) -> None:
    """Fill memory with single chunks, every byte verified.

    Args:
        store: Where from.
        placement: Where the chunks lie.
        places: Which chunk lies in which row, as `index_chunks` gives it.
        wanted: Chunks, each with a writable flat byte view of its raw length.

    Raises:
        Damaged: A chunk's bytes do not hash to its digest; the memory is then not to be used.
        MissingObject: A pack is gone.
    """
    Fetch(store, placement, places).read(wanted)


def index_chunks(
    manifest: Manifest, placement: Placement, lists: Mapping[Digest, bytes]
) -> ChunkIndex:
    """Return which chunk lies in which row of a placement.

    Raises:
        Malformed: The placement is another manifest's, or has fewer or more rows than chunks.
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
    places = check_lists(manifest, placement)
    buffers = {digest: bytearray(manifest.direct_chunks[digest]) for digest in manifest.chunk_lists}
    views = {digest: memoryview(data) for digest, data in buffers.items()}
    Fetch(store, placement, places).read(views)
    return {digest: bytes(data) for digest, data in buffers.items()}


def check_lists(manifest: Manifest, placement: Placement) -> ChunkIndex:
    """Check the lengths of digest lists against the packs, before memory is taken.

    A manifest can claim any shape.

    Returns:
        The row of each chunk that the manifest itself names.

    Raises:
        Malformed: A list is longer or shorter than the tensor needs.
        BeyondLimit: Reading the lists would take more memory than allowed.
    """
    # Rows follow the manifest's own chunks first, so lists can be found before they are read.
    if len(placement.rows) < len(manifest.direct_chunks):
        raise Malformed(
            "placement does not cover its manifest",
            where=placement.digest,
            expected=f"at least {len(manifest.direct_chunks)} rows",
            found=len(placement.rows),
        )
    places = ChunkIndex(placement, manifest.direct_chunks)
    counts = sum(tensor.grid.count for tensor in manifest.chunk_lists.values())
    check_bytes(counts * LISTED_BYTES, "reading its digest lists", where=manifest.digest)
    for digest in manifest.chunk_lists:
        check_length(digest, placement.rows[places.row(digest)], manifest.direct_chunks[digest])
    return places


def _chunks(
    targets: Iterable[Target], lists: Mapping[Digest, bytes]
) -> Iterator[tuple[Digest, memoryview]]:
    """Yield every chunk of the targets with its part of their memory; fill inline tensors."""
    for tensor, view in targets:
        if tensor.inline is not None:
            view[:] = tensor.inline
            continue
        digests = tensor.chunks
        if tensor.chunk_list is not None:
            digests = parse_list(
                lists[tensor.chunk_list], tensor.grid.count, where=tensor.chunk_list
            )
        if len(digests) == 1:
            yield digests[0], view
            continue
        start = 0
        for digest, size in zip(digests, tensor.grid.sizes(), strict=True):
            yield digest, view[start : start + size]
            start += size
