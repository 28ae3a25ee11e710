"""Decode chunks and encode them again for a repack.

Reads the raw bytes of any chunk that the runs need, in whatever encoding, and makes the stored
bytes of its new encoding. Every byte is verified before it is encoded, and the result is compared
with the entry in the plan. `holdfast.registry.upkeep.repacking.recoding` chooses the
encodings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from holdfast.backends import Buffer
from holdfast.registry.errors import Damaged
from holdfast.registry.objects import (
    NO_BASE,
    ChunkIndex,
    ChunkRow,
    PackEntry,
    PackRef,
    Placement,
    Rows,
    codecs,
)
from holdfast.registry.objects.codecs import RAW, ZSTD, codec_number
from holdfast.registry.store import Fetch, Store, together
from holdfast.registry.values import Digest, item_size

#: Raw bytes that are decoded together.
_BATCH_BYTES = 16 * 2**20

#: The pack of a chunk, and its entry there.
StoredChunk = tuple[PackRef, PackEntry]


class RawChunks:
    """Reads the raw bytes of chunks; may be used by several threads."""

    def __init__(self, store: Store, stored: Mapping[Digest, StoredChunk]) -> None:
        self._lengths = {digest: entry.raw_bytes for digest, (_, entry) in stored.items()}
        numbers = {digest: number for number, digest in enumerate(stored)}
        packs: dict[PackRef, int] = {}
        rows = [
            ChunkRow(
                packs.setdefault(pack, len(packs)),
                entry.offset,
                entry.stored_bytes,
                codec_number(entry.codec, where=str(pack.key)),
                NO_BASE if entry.base is None else numbers[entry.base],
            )
            for pack, entry in stored.values()
        ]
        # A placement as if one state had all these chunks; nothing reads its manifest digest.
        placement = Placement(Digest(bytes(32)), tuple(packs), Rows(rows))
        # No cache: a repack moves the store's own bytes, and would only push others out of it.
        uncached = copy(store)
        uncached.cache = None
        self._fetch = Fetch(uncached, placement, ChunkIndex(placement, stored))

    def read(self, digests: Iterable[Digest]) -> dict[Digest, memoryview]:
        """Return verified bytes, each in memory of its own."""
        wanted = {digest: memoryview(bytearray(self._lengths[digest])) for digest in digests}
        self._fetch.read(wanted)
        return wanted

    def batches(self, digests: Iterable[Digest]) -> Iterator[list[Digest]]:
        """Yield chunks in batches of bounded size."""
        return together(digests, self._lengths.__getitem__, _BATCH_BYTES)


@dataclass(frozen=True, slots=True)
class ChunkEncoder:
    """Encodes the chunks that a plan stores in another encoding."""

    #: The pack and the entry of each chunk now, bases of deltas included.
    stored: Mapping[Digest, StoredChunk]
    dtypes: Mapping[Digest, str]  # element types, by chunk
    zstd: str  # how frames of `ZSTD` are made: `ZSTD` or `AUTO`

    def only(self, entries: Iterable[PackEntry]) -> ChunkEncoder:
        """Return an encoder of these chunks alone, small enough to be sent to a worker."""
        stored: dict[Digest, StoredChunk] = {}
        waiting = [one for e in entries for one in (e.digest, e.base) if one is not None]
        while waiting:
            digest = waiting.pop()
            if digest not in stored:
                stored[digest] = self.stored[digest]
                base = stored[digest][1].base
                if base is not None:
                    waiting.append(base)
        dtypes = {d: self.dtypes[d] for d in stored if d in self.dtypes}
        return ChunkEncoder(stored, dtypes, self.zstd)

    def encode(
        self, store: Store, entries: Sequence[PackEntry]
    ) -> Iterator[tuple[PackEntry, Buffer]]:
        """Yield the stored bytes of chunks, a bounded number of them in memory."""
        planned = {entry.digest: entry for entry in entries}
        chunks = RawChunks(store, self.stored)
        for batch in chunks.batches(planned):
            chosen = [planned[digest] for digest in batch]
            bases = [entry.base for entry in chosen if entry.base is not None]
            raw = chunks.read(dict.fromkeys([*batch, *bases]))
            for entry in chosen:
                yield entry, self._encode(entry, raw)

    def _encode(self, entry: PackEntry, raw: Mapping[Digest, memoryview]) -> Buffer:
        data = raw[entry.digest]
        if entry.codec == RAW:
            return data
        base = None if entry.base is None else raw[entry.base]
        codec = self.zstd if entry.codec == ZSTD and base is None else entry.codec
        stored = encode_chunk(data, base, codec, self.dtypes[entry.digest])
        found = Digest.of(stored)
        if found != entry.stored_digest:
            raise Damaged(
                "a chunk was encoded to other bytes than a moment ago",
                where=entry.digest,
                expected=entry.stored_digest,
                found=found,
                hint="Nothing was written. If it happens again, this machine is faulty.",
            )
        return stored


def encode_chunk(data: memoryview, base: memoryview | None, codec: str, dtype: str) -> bytes:
    """Return the stored bytes of a chunk."""
    if base is not None:
        data = memoryview(bytearray(data))  # a copy, because it may be the base of others
        codecs.join(data, base)
    return codecs.encode(data, item_size(dtype), codecs.for_type(codec, dtype))
