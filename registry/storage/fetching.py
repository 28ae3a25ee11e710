"""Chunks off the store: ranged reads, decoding, and the check of every byte.

A raw chunk goes straight into the memory that wants it. An encoded one is read aside, held
against the digest of its stored bytes, which the pack's table has, and then decoded; a delta is
joined with its base, read the same way. Whatever it was, the raw bytes are hashed last. No more
memory is taken than the manifest gives a chunk, whatever a pack or a placement claims.

Memory that may hold a chunk already is asked first: what the caller knows of, such as a model that
is being brought up to date, then the store's cache, which is also offered what was fetched and
verified. So a delta whose base is at hand moves the delta alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from holdfast.registry.errors import Damaged, Malformed, ObjectNotFound, ObjectTruncated
from holdfast.registry.storage import codecs
from holdfast.registry.storage.codecs import RAW, codec_name
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import PackTable
from holdfast.registry.storage.placement import MAX_DEPTH, NO_BASE, ChunkIndex, ChunkRow, Placement
from holdfast.registry.storage.ranged_reads import Job, Scratch, Wanted
from holdfast.registry.storage.store import Store, missing
from holdfast.registry.storage.threads import results
from holdfast.registry.values.digest import Digest

#: Neighbouring chunks are read together up to so many bytes ...
_JOB_BYTES = 16 * 2**20
#: ... and so many buffers, what one system call takes. What is stored of encoded chunks, and of
#: bases, is held aside meanwhile: of that no more than makes up the store's `least_read_bytes`.
_JOB_CHUNKS = 1024


class Recall(Protocol):
    """A place that may hold a chunk already; any number of threads ask it at once."""

    def fill(
        self, wanted: Mapping[Digest, memoryview], *, verified: bool = True
    ) -> Sequence[Digest]:
        """Fill memory with those chunks that are here.

        Args:
            wanted: Chunks, each with a writable flat byte view of its raw length.
            verified: Whether each is held against its digest; else whoever asks does that with
                what is made of it, and asks again if it was wrong.

        Returns:
            Those that are not here; their memory may have been written to.
        """


class Fetch:
    """Reads chunks of one placed manifest.

    Args:
        store: Where from.
        placement: Where its chunks lie.
        places: Which chunk lies in which row, as `index_chunks` gives it.
        recalls: What is asked before the store's cache and the store.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        places: ChunkIndex,
        recalls: Sequence[Recall] = (),
    ) -> None:
        self._store = store
        self._placement = placement
        self._places = places
        self._recalls = (*recalls, *([] if store.cache is None else [store.cache]))
        self._moved: list[int] = []  # appended to by many threads

    @property
    def moved_bytes(self) -> int:
        """Stored bytes of chunks that have come off the store so far, bases of deltas included."""
        return sum(self._moved)

    def read(self, wanted: Mapping[Digest, memoryview]) -> None:
        """Fill memory with chunks, every byte verified.

        Args:
            wanted: Chunks, each with a writable flat byte view of its raw length.

        Raises:
            Damaged: A chunk's bytes do not hash to its digest; the memory is then not to be used.
            MissingObject: A pack is gone.
        """
        lacking = self._recall(wanted)
        row_of = self._places.row
        jobs = self._jobs(self._want(row_of(digest), len(v), v) for digest, v in lacking.items())
        if len(jobs) == 1:
            self._read_job(jobs[0])
        else:
            results([self._store.pools.bulk.submit(self._read_job, job) for job in jobs])

    def _recall(self, wanted: Mapping[Digest, memoryview]) -> Mapping[Digest, memoryview]:
        """Fill what need not come off the store; return the rest."""
        if not self._recalls:
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
        for recall in self._recalls:
            if not wanted:
                break
            lacking = recall.fill(wanted, verified=verified)
            wanted = {digest: wanted[digest] for digest in lacking}
        return wanted

    def _jobs(self, wanted: Iterable[Wanted]) -> list[Job]:
        jobs: list[Job] = []
        enough = self._store.backend.least_read_bytes
        pack, end, size, held = -1, -1, 0, 0
        for chunk in sorted(wanted, key=lambda chunk: (chunk.place.pack, chunk.place.offset)):
            place = chunk.place
            adjoins = place.pack == pack and place.offset == end
            is_full = size >= _JOB_BYTES or held >= enough
            if not adjoins or is_full or len(jobs[-1].chunks) >= _JOB_CHUNKS:
                jobs.append(Job(self._placement.packs[place.pack]))
                size = held = 0
            jobs[-1].chunks.append(chunk)
            pack, end = place.pack, place.offset + place.stored_bytes
            size += place.stored_bytes
            held += chunk.held_bytes
        return jobs

    def _want(self, row: int, raw_bytes: int, view: memoryview | None = None) -> Wanted:
        digest, place = self._places.digest(row), self._placement.rows[row]
        check_length(digest, place, raw_bytes)
        is_raw = codec_name(place.codec, where=f"{digest}") == RAW
        return Wanted(row, digest, place, raw_bytes, view, is_raw)

    def _read_job(self, job: Job) -> None:
        # A base that is at hand is hashed with what is made of it: half of the hashing.
        is_made = False
        try:
            self._make(job, verified=False)
            is_made = True
        except Damaged:
            if not self._recalls or all(chunk.place.base == NO_BASE for chunk in job.chunks):
                raise
        if not is_made:  # not while the error is handled: it keeps what was held
            self._make(job, verified=True)
        if self._store.cache is not None:
            views = {chunk.digest: chunk.view for chunk in job.chunks if chunk.view is not None}
            self._store.cache.offer(views)

    def _make(self, job: Job, *, verified: bool) -> None:
        """Make a job's chunks out of what is stored and what is at hand.

        Args:
            job: The chunks.
            verified: Whether bases that are at hand are held against their digests.

        Raises:
            Damaged: A chunk does not hash to its digest.
        """
        scratch = Scratch()
        deltas: dict[int, list[memoryview]] = {}
        for chunk, view in self._decoded(job, scratch):
            if chunk.place.base != NO_BASE:
                deltas.setdefault(chunk.place.base, []).append(view)
        for _ in range(MAX_DEPTH):
            if not deltas:
                break
            deltas = self._join(deltas, scratch, verified=verified)
        if deltas:
            raise Malformed(
                "deltas on deltas without end", where=job.pack.key, expected=f"{MAX_DEPTH}"
            )
        for chunk in job.chunks:
            if chunk.view is not None:
                verify_chunk(chunk.view, chunk.digest, job.pack.key, chunk.place.offset)

    def _join(
        self, deltas: Mapping[int, list[memoryview]], scratch: Scratch, *, verified: bool
    ) -> dict[int, list[memoryview]]:
        """Join differences with what they are to; return what they are differences to then.

        Of a chain only the sum is wanted: what lies between its ends is never made, nor hashed. The
        end is held against its digest, and before that each link against that of its stored bytes.

        Args:
            deltas: By the row of the chunk that they are differences to.
            scratch: Memory of the job.
            verified: Whether bases that are at hand are held against their digests.
        """
        wanted = []
        for row, of in deltas.items():
            digest, raw_bytes = self._places.digest(row), len(of[0])
            if any(len(view) != raw_bytes for view in of):
                raise Malformed("deltas of several lengths on one chunk", where=digest)
            if self._recalls:
                base = scratch.take("base", raw_bytes)  # one at a time: they are many
                if not self._fill({digest: base}, verified=verified):
                    _add(of, base)
                    continue
            wanted.append(self._want(row, raw_bytes))
        further: dict[int, list[memoryview]] = {}
        # In this thread: the others of the pool may be waiting for the same.
        for job in self._jobs(wanted):
            for chunk, raw in self._decoded(job, scratch):
                _add(deltas[chunk.row], raw)
                if chunk.place.base != NO_BASE:
                    further.setdefault(chunk.place.base, []).extend(deltas[chunk.row])
                elif self._store.cache is not None:  # many others may build on it
                    verify_chunk(raw, chunk.digest, job.pack.key, chunk.place.offset)
                    self._store.cache.offer({chunk.digest: raw})
        return further

    def _decoded(self, job: Job, scratch: Scratch) -> Iterator[tuple[Wanted, memoryview]]:
        """Read a job; yield each chunk, not verified yet, a delta as the difference that it is.

        A base without memory of its own is there until the next chunk is asked for.
        """
        key = job.pack.key
        # Not before the job runs: a state's own size is all that waits for one.
        stored = job.stored(scratch)
        try:
            self._store.backend.get(str(key), job.byte_range, into=stored)
        except ObjectNotFound as error:
            raise missing(key) from error
        except ObjectTruncated as error:
            raise Damaged(
                "damaged pack: it ends before its chunks do",
                where=key,
                expected=f"{job.pack.size_bytes} bytes",
                found=error.found,
            ) from error
        self._moved.append(len(job.byte_range))
        for chunk, data in zip(job.chunks, stored, strict=True):
            if chunk.is_raw:
                yield chunk, data
                continue
            where = f"{key} at offset {chunk.place.offset}"
            table = self._store.table(job.pack, self._ends[job.pack.key])
            self._check_entry(table, chunk, data, where)
            raw = chunk.view
            if raw is None:
                raw = scratch.take("raw", chunk.raw_bytes)
            codecs.decode(data, codec_name(chunk.place.codec, where=where), raw, where=where)
            yield chunk, raw

    def _check_entry(self, table: PackTable, chunk: Wanted, stored: memoryview, where: str) -> None:
        """Hold stored bytes, and the base of a delta, against what the pack's table says.

        Raises:
            Damaged: They do not hash to the digest that it gives them.
            Malformed: Table and placement do not say the same.
        """
        place = chunk.place
        entry = table.at(place.offset)
        base = None if place.base == NO_BASE else self._places.digest(place.base)
        said = (chunk.digest, place.stored_bytes, codec_name(place.codec, where=where), base)
        if entry is None or said != (entry.digest, entry.stored_bytes, entry.codec, entry.base):
            raise Malformed(
                "a placement names a chunk where its pack has another",
                where=where,
                expected=chunk.digest.short,
            )
        found = hashlib.sha256(stored).digest()
        if found != entry.stored_digest:
            raise Damaged(
                "damaged chunk: its stored bytes do not hash to their digest",
                where=where,
                expected=entry.stored_digest,
                found=Digest(found),
                hint=_MEND,
            )

    @cached_property
    def _ends(self) -> dict[ObjectKey, int]:
        """Where the last known chunk of each pack ends: its table is looked for from there on."""
        ends: dict[ObjectKey, int] = {}
        packs = self._placement.packs
        for row in self._placement.rows:
            key = packs[row.pack].key
            ends[key] = max(ends.get(key, 0), row.offset + row.stored_bytes)
        return ends


def _batches(wanted: Mapping[Digest, memoryview]) -> Iterator[dict[Digest, memoryview]]:
    """Cut what is asked of the cache into the same portions as what is asked of the store."""
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


def check_length(digest: Digest, place: ChunkRow, raw_bytes: int) -> None:
    """Check the stored length of a chunk before memory is taken for it.

    Raises:
        Malformed: A raw chunk of another length, or one that encoding has not made shorter.
    """
    raw = codec_name(place.codec, where=f"{digest}") == RAW
    if place.stored_bytes != raw_bytes if raw else place.stored_bytes >= raw_bytes:
        raise Malformed(
            "a raw chunk has another length than its tensor gives it"
            if raw
            else "an encoded chunk is as long as its raw bytes, or longer",
            where=digest,
            expected=f"{raw_bytes} bytes" if raw else f"fewer than {raw_bytes} bytes",
            found=place.stored_bytes,
        )


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
            hint=_MEND,
        )


def verify_pack_chunks(data: bytes | memoryview, table: PackTable, key: ObjectKey) -> None:
    """Check every chunk of a pack that is in memory: encoded ones by their stored bytes.

    Raises:
        Damaged: A chunk does not hash to its digest.
    """
    view = memoryview(data)
    for entry in table:
        stored = view[entry.offset : entry.offset + entry.stored_bytes]
        verify_chunk(stored, entry.stored_digest or entry.digest, key, entry.offset)
