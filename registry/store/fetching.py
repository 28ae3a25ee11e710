"""Fetch chunks from the store: ranged reads, decoding, and verification of every byte.

A raw chunk is read straight into the caller's memory. An encoded chunk is read into scratch memory,
verified by the digest of its stored bytes in the pack's table, and then decoded. A delta is joined
with its base, which is read in the same way. The raw bytes are always hashed last. A chunk gets no
more memory than the manifest allows, whatever a pack or a placement claims.

Caches are asked first: those of the caller, such as a model that is being updated, then the cache
of the store, which also gets the chunks that were fetched and verified. So if the base of a delta
is cached, only the delta is fetched.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal, NamedTuple, Protocol

from holdfast.backends import ByteRange
from holdfast.registry.errors import Damaged, Malformed
from holdfast.registry.objects import (
    MAX_DEPTH,
    NO_BASE,
    ChunkIndex,
    ChunkRow,
    ObjectKey,
    PackRef,
    PackTable,
    Placement,
    codecs,
)
from holdfast.registry.objects.codecs import RAW, codec_name, codec_number
from holdfast.registry.store.store import Store
from holdfast.registry.store.threads import results
from holdfast.registry.values import Digest, collector_paused


class Wanted(NamedTuple):
    """A chunk to read, with the fields of its row, and the memory for its raw bytes.

    It begins with its place, so that sorted chunks are in the order of the packs.
    """

    pack: int
    offset: int
    stored_bytes: int
    codec: int
    base: int
    row_number: int  # the number of its row in the placement
    digest: Digest  # the chunk
    raw_bytes: int
    #: The memory; `None` for the base of a delta, which is only joined to others.
    view: memoryview | None

    @property
    def is_held(self) -> bool:
        """Whether its stored bytes need scratch memory: they are encoded, or have no own memory."""
        return self.codec != _RAW or self.view is None


class Job:
    """One ranged read: adjacent chunks of one pack."""

    def __init__(self, pack: PackRef) -> None:
        self.pack = pack
        self.chunks: list[Wanted] = []
        self.held_bytes = 0  # bytes of scratch memory for stored bytes

    @property
    def byte_range(self) -> ByteRange:
        """The range of the pack that holds them."""
        last = self.chunks[-1]
        return ByteRange(self.chunks[0].offset, last.offset + last.stored_bytes)

    def stored(self, scratch: Scratch) -> list[memoryview]:
        """Return memory for the stored bytes of each chunk: its own if it is raw and has some."""
        if not self.held_bytes:
            return [chunk.view for chunk in self.chunks if chunk.view is not None]
        aside = scratch.take("stored", self.held_bytes)
        found, start = [], 0
        for chunk in self.chunks:
            if chunk.view is not None and not chunk.is_held:
                found.append(chunk.view)
            else:
                found.append(aside[start : start + chunk.stored_bytes])
                start += chunk.stored_bytes
        return found


class Scratch:
    """Reusable memory for a job and the bases of its deltas, one block for each use.

    It is returned to the system after the job. Memory that is freed to the heap would stay with the
    process, in pieces, for every thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, memoryview] = {}

    def take(self, use: Literal["stored", "raw", "base"], nbytes: int) -> memoryview:
        """Return `nbytes` of memory; it overwrites what this use had before."""
        kept = self._kept.get(use, memoryview(b""))
        if len(kept) < nbytes:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            try:
                kept = self._kept[use] = memoryview(mmap.mmap(-1, nbytes, flags=private))
            except OSError as error:
                raise MemoryError(f"{nbytes} bytes to read into: {error.strerror}") from error
        return kept[:nbytes]


#: Limits of one read of adjacent chunks: its bytes, and the buffers that one system call accepts.
#: Encoded chunks and bases need scratch memory, so a read of `least_read_bytes` of those is full.
_JOB_BYTES = 16 * 2**20
_JOB_CHUNKS = 1024
#: The number of the codec `raw`; a placement with another one than those of the list is refused.
_RAW = codec_number(RAW, where="its own list")


class Cache(Protocol):
    """It may hold a chunk already; any number of threads ask it at the same time."""

    def fill(
        self, wanted: Mapping[Digest, memoryview], *, verified: bool = True
    ) -> Sequence[Digest]:
        """Fill memory with the chunks that are here."""

    def peek(self, digest: Digest, size: int, /) -> memoryview | None:
        """Return a chunk where it lies, unverified; `None` if it would have to be copied."""


class Fetch:
    """Reads chunks of one placed manifest."""

    def __init__(
        self, store: Store, placement: Placement, index: ChunkIndex, caches: Sequence[Cache] = ()
    ) -> None:
        self._store = store
        self._placement = placement
        self._index = index
        self._caches = (*caches, *([] if store.cache is None else [store.cache]))
        self._moved: list[int] = []  # appended to by many threads

    @property
    def moved_bytes(self) -> int:
        """Stored bytes that were read so far, bases of deltas included."""
        return sum(self._moved)

    def read(self, wanted: Mapping[Digest, memoryview]) -> None:
        """Fill memory with chunks, every byte verified."""
        lacking = self._fill_from_caches(wanted)
        with collector_paused():
            views = lacking.values()
            numbers = self._index.rows_of(lacking)
            jobs = self._jobs(self._wanted(numbers, lacking, map(len, views), views))
        if len(jobs) == 1:
            self._read_job(jobs[0])
            return
        if self._store.cache is not None:  # processes that miss the same chunks share the work
            random.shuffle(jobs)
        results([self._store.pools.bulk.submit(self._read_job, job) for job in jobs])

    def _fill_from_caches(self, wanted: Mapping[Digest, memoryview]) -> Mapping[Digest, memoryview]:
        """Fill memory with the chunks that caches hold; return the rest."""
        if not self._caches:
            return wanted
        batches = list(_batches(wanted))
        if len(batches) == 1:
            return self._fill(wanted)
        bulk = self._store.pools.bulk
        lacking = results([bulk.submit(self._fill, batch) for batch in batches])
        return {digest: view for batch in lacking for digest, view in batch.items()}

    def _fill(
        self, wanted: Mapping[Digest, memoryview], *, verified: bool = True
    ) -> Mapping[Digest, memoryview]:
        for cache in self._caches:
            if not wanted:
                break
            lacking = cache.fill(wanted, verified=verified)
            wanted = {digest: wanted[digest] for digest in lacking}
        return wanted

    def _peek(self, digest: Digest, size: int) -> memoryview | None:
        found = (cache.peek(digest, size) for cache in self._caches)
        return next((view for view in found if view is not None), None)

    def _wanted(
        self,
        numbers: Sequence[int],
        digests: Iterable[Digest],
        sizes: Iterable[int],
        views: Iterable[memoryview | None],
    ) -> Iterable[Wanted]:
        """Return the chunks of rows; column by column, for they may be a hundred thousand."""
        columns = (map(column.__getitem__, numbers) for column in self._placement.rows.columns)
        made: Any = partial(tuple.__new__, Wanted)
        return map(made, zip(*columns, numbers, digests, sizes, views, strict=False))

    def _jobs(self, wanted: Iterable[Wanted]) -> list[Job]:
        jobs: list[Job] = []
        chunks: list[Wanted] = []
        enough = self._store.backend.least_read_bytes
        pack, end, size, held = -1, -1, 0, 0
        for chunk in sorted(wanted):
            at, offset, stored, codec, _, _, _, raw_bytes, view = chunk
            if stored != raw_bytes if codec == _RAW else stored >= raw_bytes:
                check_length(chunk.digest, chunk, raw_bytes)
            adjoins = at == pack and offset == end
            if not adjoins or size >= _JOB_BYTES or len(chunks) >= _JOB_CHUNKS or held >= enough:
                jobs.append(Job(self._placement.packs[at]))
                chunks, size, held = jobs[-1].chunks, 0, 0
            chunks.append(chunk)
            pack, end = at, offset + stored
            size += stored
            if codec != _RAW or view is None:
                held = jobs[-1].held_bytes = held + stored
        return jobs

    def _read_job(self, job: Job) -> None:
        cache = self._store.cache
        if cache is None:
            self._fetch_job(job)
            return
        views = {chunk.digest: chunk.view for chunk in job.chunks if chunk.view is not None}

        def fetch(lacking: Collection[Digest]) -> Mapping[Digest, memoryview]:
            if len(lacking) == len(views):
                self._fetch_job(job)
            else:
                names = set(lacking)
                for part in self._jobs(one for one in job.chunks if one.digest in names):
                    self._fetch_job(part)
            return {digest: views[digest] for digest in lacking}

        cache.fetch_once(views, fetch)

    def _fetch_job(self, job: Job) -> None:
        # First use cached bases unverified: the hash of the result covers them, at half the cost.
        is_made = False
        try:
            self._make(job, verified=False)
            is_made = True
        except Damaged:
            if not self._caches or all(chunk.base == NO_BASE for chunk in job.chunks):
                raise
        if not is_made:  # outside of `except`, where the error keeps the memory of the first try
            self._make(job, verified=True)

    def _make(self, job: Job, *, verified: bool) -> None:
        """Make a job's chunks from the store and the caches."""
        scratch = Scratch()
        deltas: dict[int, list[memoryview]] = {}
        stored = self._stored(job, scratch)
        for chunk, view in self._decoded(job, stored, scratch) if job.held_bytes else ():
            if chunk.base != NO_BASE:
                deltas.setdefault(chunk.base, []).append(view)
        for _ in range(MAX_DEPTH):
            if not deltas:
                break
            deltas = self._join(deltas, scratch, verified=verified)
        if deltas:
            raise Malformed(
                "a chain of deltas is too long", where=job.pack.key, expected=f"at most {MAX_DEPTH}"
            )
        for chunk in job.chunks:
            if chunk.view is not None:
                verify_chunk(chunk.view, chunk.digest, job.pack.key, chunk.offset)

    def _join(
        self, deltas: Mapping[int, list[memoryview]], scratch: Scratch, *, verified: bool
    ) -> dict[int, list[memoryview]]:
        """Join deltas with their bases; return the deltas whose bases are deltas themselves.

        Only the sum of a chain is needed: the chunks between its ends are neither made nor hashed.
        The result is verified by its digest, and each link by the digest of its stored bytes.
        """
        wanted: dict[int, tuple[Digest, int]] = {}
        for number, of in deltas.items():
            digest, raw_bytes = self._index.digest(number), len(of[0])
            if any(len(view) != raw_bytes for view in of):
                raise Malformed("deltas of several lengths on one chunk", where=digest)
            if not verified and (lying := self._peek(digest, raw_bytes)) is not None:
                _add(of, lying)
                continue
            if self._caches:
                base = scratch.take("base", raw_bytes)  # one at a time: they are many
                if not self._fill({digest: base}, verified=verified):
                    _add(of, base)
                    continue
            wanted[number] = digest, raw_bytes
        further: dict[int, list[memoryview]] = {}
        # In this thread, since the other threads of the pool may be doing the same.
        digests, sizes = zip(*wanted.values(), strict=True) if wanted else ((), ())
        for job in self._jobs(self._wanted([*wanted], digests, sizes, repeat(None))):
            for chunk, raw in self._decoded(job, self._stored(job, scratch), scratch):
                _add(deltas[chunk.row_number], raw)
                if chunk.base != NO_BASE:
                    further.setdefault(chunk.base, []).extend(deltas[chunk.row_number])
                elif self._store.cache is not None:  # many other chunks may be based on it
                    verify_chunk(raw, chunk.digest, job.pack.key, chunk.offset)
                    self._store.cache.offer({chunk.digest: raw})
        return further

    def _stored(self, job: Job, scratch: Scratch) -> list[memoryview]:
        """Read the stored bytes of a job's chunks; raw ones go straight to their memory."""
        # Allocated when the job runs, so that waiting jobs hold no scratch memory.
        stored = job.stored(scratch)
        self._store.read_part(job.pack, job.byte_range, stored)
        self._moved.append(len(job.byte_range))
        return stored

    def _decoded(
        self, job: Job, stored: Sequence[memoryview], scratch: Scratch
    ) -> Iterator[tuple[Wanted, memoryview]]:
        """Yield each chunk of a job unverified, and a delta as it is, not yet joined.

        The memory of a base is reused for the next chunk.
        """
        key = job.pack.key
        for chunk, data in zip(job.chunks, stored, strict=True):
            if chunk.codec == _RAW:
                yield chunk, data
                continue
            where = f"{key} at offset {chunk.offset}"
            table = self._store.table(job.pack, self._placement.ends[chunk.pack])
            self._check_entry(table, chunk, data, where)
            raw = chunk.view
            if raw is None:
                raw = scratch.take("raw", chunk.raw_bytes)
            codecs.decode(data, codec_name(chunk.codec, where=where), raw, where=where)
            yield chunk, raw

    def _check_entry(self, table: PackTable, chunk: Wanted, stored: memoryview, where: str) -> None:
        """Check the stored bytes and the base of a chunk against the pack's table."""
        entry = table.at(chunk.offset)
        base = None if chunk.base == NO_BASE else self._index.digest(chunk.base)
        placed = (chunk.digest, chunk.stored_bytes, codec_name(chunk.codec, where=where), base)
        if entry is None or placed != (entry.digest, entry.stored_bytes, entry.codec, entry.base):
            raise Malformed(
                "a placement and its pack name different chunks at one offset",
                where=where,
                expected=chunk.digest.short,
            )
        found = Digest.of(stored)
        if found != entry.stored_digest:
            raise Damaged(
                "damaged chunk: its stored bytes do not hash to their digest",
                where=where,
                expected=entry.stored_digest,
                found=found,
                hint=_MEND,
            )


def _batches(wanted: Mapping[Digest, memoryview]) -> Iterator[dict[Digest, memoryview]]:
    """Split the chunks that a cache is asked for into batches as large as the reads of a store."""
    batch: dict[Digest, memoryview] = {}
    size = 0
    for digest, view in wanted.items():
        batch[digest] = view
        size += len(view)
        if size >= _JOB_BYTES or len(batch) >= _JOB_CHUNKS:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


_MEND = "Nothing was returned. Run `holdfast verify --deep`; a mirror can restore it."


def _add(differences: Iterable[memoryview], base: memoryview) -> None:
    for view in differences:
        codecs.join(view, base)


def check_length(digest: Digest, row: ChunkRow | Wanted, raw_bytes: int) -> None:
    """Check the stored length of a chunk before memory is taken for it."""
    raw = row.codec == _RAW
    if row.stored_bytes != raw_bytes if raw else row.stored_bytes >= raw_bytes:
        raise Malformed(
            "a raw chunk has another length than its tensor gives it"
            if raw
            else "an encoded chunk is as long as its raw bytes, or longer",
            where=digest,
            expected=f"{raw_bytes} bytes" if raw else f"fewer than {raw_bytes} bytes",
            found=row.stored_bytes,
        )


def verify_chunk(data: memoryview, digest: Digest, key: ObjectKey, offset: int) -> None:
    """Check a chunk's raw bytes."""
    found = Digest.of(data)
    if found != digest:
        raise Damaged(
            "damaged chunk: its bytes do not hash to its digest",
            where=f"{key} at offset {offset}",
            expected=digest,
            found=found,
            hint=_MEND,
        )


def verify_pack_chunks(data: bytes | memoryview, table: PackTable, key: ObjectKey) -> None:
    """Check every chunk of a pack that is in memory: encoded ones by their stored bytes."""
    view = memoryview(data)
    for entry in table:
        stored = view[entry.offset : entry.offset + entry.stored_bytes]
        verify_chunk(stored, entry.stored_digest or entry.digest, key, entry.offset)
