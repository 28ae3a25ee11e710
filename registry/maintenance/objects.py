"""One object's bytes held against its name, and a placement against the packs that it names."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from registry.codecs import CODECS, codec_number
from registry.digest import Digest
from registry.errors import Malformed
from registry.objects.keys import ObjectKey
from registry.objects.manifest import Manifest
from registry.objects.pack import PackTable, open_pack
from registry.objects.placement import NO_BASE, ChunkPlace, PackRef, Placement
from registry.reading.fetching import verify_pack_chunks
from registry.reading.loading import index_chunks, read_lists
from registry.store import Store

#: Digest, stored and raw length, number of the codec, whether it is a delta.
_ENTRY = struct.Struct("<32sQQB?")
_DIGEST_BYTES = 32


def check_object(data: bytes, key: ObjectKey) -> PackTable | None:
    """Check every byte of an object; return the table of a pack.

    Raises:
        IntegrityError: The bytes are not those that its name stands for.
        UnsupportedFormat: It is of a format that this version does not know.
    """
    where = str(key)
    if key.kind == "manifests":
        Manifest.decode(data, key.digest, where=where)
    elif key.kind == "placements":
        Placement.decode(data, key.digest, where=where)
    else:
        table = open_pack(data, key.digest, where=where)
        verify_pack_chunks(data, table, key)
        return table
    return None


class Entry(NamedTuple):
    """What a pack's table says of one chunk.

    Attributes:
        digest: The chunk.
        stored_bytes: Length as stored.
        raw_bytes: Length when decoded.
        codec: Number in `registry.codecs`.
        base: The chunk that a delta is against.
    """

    digest: Digest
    stored_bytes: int
    raw_bytes: int
    codec: int
    base: Digest | None


class Tables:
    """Tables of contents of packs, packed to 50 bytes a chunk and 32 more for that of a delta.

    Those of a whole registry fit into memory.

    Args:
        store: Where the packs lie.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[ObjectKey, tuple[bytes, bytes]] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._kept

    def keep(self, key: ObjectKey, table: PackTable) -> None:
        """Remember the table of a pack that was read."""
        entries = b"".join(
            _ENTRY.pack(
                entry.digest,
                entry.stored_bytes,
                entry.raw_bytes,
                codec_number(entry.codec, where=str(key)),
                entry.base is not None,
            )
            for entry in table.entries
        )
        bases = b"".join(entry.base for entry in table.entries if entry.base is not None)
        self._kept[key] = entries, bases

    def chunks(self, pack: PackRef) -> dict[int, Entry]:
        """Return what a pack's table says of every chunk, by its offset; read it if need be.

        Raises:
            MissingObject: The pack is gone.
            IntegrityError: The table is damaged.
        """
        if pack.key not in self._kept:
            self.keep(pack.key, self._store.read_table(pack))
        return dict(_unpacked(*self._kept[pack.key]))


def _unpacked(entries: bytes, bases: bytes) -> Iterator[tuple[int, Entry]]:
    offset = base_at = 0
    for digest, stored_bytes, raw_bytes, codec, is_delta in _ENTRY.iter_unpack(entries):
        base = None
        if is_delta:
            base = Digest(bases[base_at : base_at + _DIGEST_BYTES])
            base_at += _DIGEST_BYTES
        yield offset, Entry(Digest(digest), stored_bytes, raw_bytes, codec, base)
        offset += stored_bytes


def check_rows(store: Store, tables: Tables, manifest: Manifest, placement: Placement) -> None:
    """Hold each row of a placement against the table of its pack and against the manifest.

    Raises:
        IntegrityError: A row says something else than its pack's table; a chunk has another raw
            length there than the manifest or the delta on it gives it; there are more or fewer
            rows than chunks; or deltas go on without end.
    """
    lists = read_lists(store, manifest, placement)
    lengths = manifest.all_chunks(lists)
    digests = list(index_chunks(manifest, placement, lists))
    by_pack: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(placement.rows):
        by_pack[row.pack].append(number)
    raw_bytes: dict[int, int] = {}
    for position, numbers in by_pack.items():
        there = tables.chunks(placement.packs[position])
        for number in numbers:
            row = placement.rows[number]
            raw_bytes[number] = _check_row(
                placement, row, digests[number], digests, there.get(row.offset)
            )
    for number, row in enumerate(placement.rows):
        wanted = lengths.get(digests[number], raw_bytes[number])
        _check_raw(placement, row, raw_bytes[number], wanted)
        if row.base != NO_BASE:
            base = placement.rows[row.base]
            _check_raw(placement, base, raw_bytes[row.base], raw_bytes[number])


def _check_row(
    placement: Placement,
    row: ChunkPlace,
    digest: Digest,
    digests: list[Digest],
    entry: Entry | None,
) -> int:
    """Hold a row against the table's entry; return the raw length that the entry gives."""
    base = None if row.base == NO_BASE else digests[row.base]
    said = (digest, row.stored_bytes, row.codec, base)
    if entry is None or said != (entry.digest, entry.stored_bytes, entry.codec, entry.base):
        raise Malformed(
            "a placement names a chunk where its pack has another",
            where=_where(placement, row),
            expected=_told(*said),
            found="no chunk begins there"
            if entry is None
            else _told(entry.digest, entry.stored_bytes, entry.codec, entry.base),
        )
    return entry.raw_bytes


def _check_raw(placement: Placement, row: ChunkPlace, found: int, wanted: int) -> None:
    if found != wanted:
        raise Malformed(
            "a pack gives a chunk another raw length than its tensor, or the delta on it, does",
            where=_where(placement, row),
            expected=f"{wanted} bytes",
            found=found,
        )


def _told(digest: Digest, stored_bytes: int, codec: int, base: Digest | None) -> str:
    against = "" if base is None else f", a delta to {base.short}"
    return f"chunk {digest.short}, {stored_bytes} bytes of {CODECS[codec]}{against}"


def _where(placement: Placement, row: ChunkPlace) -> str:
    pack = placement.packs[row.pack].key
    return f"placement {placement.digest.short}: {pack} at offset {row.offset}"
