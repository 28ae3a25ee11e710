"""The read path: chunks straight into the memory that wants them, hashed as they land.

Owns the plan of ranged reads and the check of every byte. Where the memory comes from is the
business of `registry.checkpoint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from backends import ByteRange
from registry.codecs import RAW
from registry.digest import Digest
from registry.errors import Damaged, Malformed, ObjectNotFound, ObjectTruncated
from registry.keys import ObjectKey
from registry.manifest import Manifest, TensorEntry, parse_list
from registry.pack import PackTable
from registry.placement import ChunkPlace, PackRef, Placement
from registry.pools import results
from registry.store import Store, missing

#: Neighbouring chunks are read together up to so many bytes ...
_JOB_BYTES = 16 * 2**20
#: ... and so many buffers, what one system call takes.
_JOB_CHUNKS = 1024

#: A tensor and the memory that its bytes go to.
Target = tuple[TensorEntry, memoryview]


@dataclass(frozen=True, slots=True)
class _Wanted:
    digest: Digest
    place: ChunkPlace
    view: memoryview


@dataclass(frozen=True, slots=True)
class _Job:
    """One ranged read: chunks that lie one after another in one pack."""

    pack: PackRef
    chunks: list[_Wanted]

    @property
    def byte_range(self) -> ByteRange:
        last = self.chunks[-1].place
        return ByteRange(self.chunks[0].place.offset, last.offset + last.stored_bytes)


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
    places: Mapping[Digest, ChunkPlace],
    wanted: Mapping[Digest, memoryview],
) -> None:
    """Fill memory with single chunks, every byte verified.

    Args:
        store: Where from.
        placement: Where the chunks lie.
        places: The same, as `index_chunks` gives it.
        wanted: Chunks, each with a writable flat byte view of its raw length.

    Raises:
        Damaged: A chunk's bytes do not hash to its digest; the memory is then not to be used.
        MissingObject: A pack is gone.
    """
    _fetch(store, placement, [_want(d, places[d], view) for d, view in wanted.items()])


def index_chunks(
    manifest: Manifest, placement: Placement, lists: Mapping[Digest, bytes]
) -> dict[Digest, ChunkPlace]:
    """Return each chunk's place, deltas' bases included.

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
    # Rows follow the manifest's own chunks first, so lists can be found before they are read.
    if len(placement.rows) < len(manifest.direct_chunks):
        raise Malformed(
            "placement does not cover its manifest",
            where=placement.digest,
            expected=f"at least {len(manifest.direct_chunks)} rows",
            found=len(placement.rows),
        )
    rows = dict(zip(manifest.direct_chunks, placement.rows, strict=False))
    buffers = {}
    for digest in manifest.chunk_lists:
        # Before memory is taken: a manifest can claim any shape, a pack only what it holds.
        _check_length(digest, rows[digest], manifest.direct_chunks[digest])
        buffers[digest] = bytearray(manifest.direct_chunks[digest])
    _fetch(store, placement, [_want(d, rows[d], memoryview(data)) for d, data in buffers.items()])
    return {digest: bytes(data) for digest, data in buffers.items()}


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


def _want(digest: Digest, place: ChunkPlace, view: memoryview) -> _Wanted:
    _check_length(digest, place, len(view))
    return _Wanted(digest, place, view)


def _check_length(digest: Digest, place: ChunkPlace, raw_bytes: int) -> None:
    if place.stored_bytes != raw_bytes:
        raise Malformed(
            "a raw chunk has another length than its tensor gives it",
            where=digest,
            expected=f"{raw_bytes} bytes",
            found=place.stored_bytes,
        )


def _fetch(store: Store, placement: Placement, wanted: Sequence[_Wanted]) -> None:
    jobs = _jobs(placement, wanted)
    if len(jobs) == 1:
        return _read(store, jobs[0])
    results([store.pools.bulk.submit(_read, store, job) for job in jobs])
    return None


def _jobs(placement: Placement, wanted: Sequence[_Wanted]) -> list[_Job]:
    jobs: list[_Job] = []
    pack, end, size = -1, -1, 0
    for chunk in sorted(wanted, key=lambda chunk: (chunk.place.pack, chunk.place.offset)):
        place = chunk.place
        adjoins = place.pack == pack and place.offset == end
        if not adjoins or size >= _JOB_BYTES or len(jobs[-1].chunks) >= _JOB_CHUNKS:
            jobs.append(_Job(placement.packs[place.pack], []))
            size = 0
        jobs[-1].chunks.append(chunk)
        pack, end, size = place.pack, place.offset + place.stored_bytes, size + place.stored_bytes
    return jobs


def _read(store: Store, job: _Job) -> None:
    key = job.pack.key
    try:
        store.backend.get(str(key), job.byte_range, into=[chunk.view for chunk in job.chunks])
    except ObjectNotFound as error:
        raise missing(key) from error
    except ObjectTruncated as error:
        raise Damaged(
            "damaged pack: it ends before its chunks do",
            where=key,
            expected=f"{job.pack.size_bytes} bytes",
            found=error.found,
        ) from error
    for chunk in job.chunks:
        verify_chunk(chunk.view, chunk.digest, key, chunk.place.offset)


def verify_chunk(data: memoryview, digest: Digest, key: ObjectKey, offset: int) -> None:
    """Check a chunk's raw bytes.

    Raises:
        Damaged: They do not hash to its digest.
    """
    found = hashlib.sha256(data).digest()
    if found != digest:
        raise Damaged(
            "damaged chunk: its bytes do not hash to its digest",
            where=f"{key} at offset {offset}",
            expected=digest,
            found=Digest(found),
            hint="Nothing was returned. Run `holdfast verify --deep`; a mirror can restore it.",
        )


def verify_pack_chunks(data: bytes | memoryview, table: PackTable, key: ObjectKey) -> None:
    """Check every chunk of a pack that is in memory.

    Raises:
        Damaged: A chunk does not hash to its digest.
    """
    view = memoryview(data)
    for entry in table.entries:
        if entry.codec != RAW:
            raise Malformed("codec not allowed", where=key, expected=RAW, found=entry.codec)
        stored = view[entry.offset : entry.offset + entry.stored_bytes]
        verify_chunk(stored, entry.digest, key, entry.offset)
