"""Check the bytes of an object against its name, and a placement against its packs."""

from __future__ import annotations

from collections import defaultdict

from holdfast.registry.errors import Malformed
from holdfast.registry.objects import (
    NO_BASE,
    ChunkRow,
    Manifest,
    ObjectKey,
    PackEntry,
    PackRef,
    PackTable,
    Placement,
    open_pack,
)
from holdfast.registry.objects.codecs import CODECS
from holdfast.registry.store import (
    Store,
    decode_manifest,
    index_chunks,
    read_lists,
    verify_pack_chunks,
)
from holdfast.registry.values import Digest


def check_object(data: bytes, key: ObjectKey) -> PackTable | None:
    """Check every byte of an object; return the table of a pack."""
    where = str(key)
    if key.kind == "manifests":
        decode_manifest(data, key)
    elif key.kind == "placements":
        Placement.decode(data, key.digest, where=where)
    else:
        table = open_pack(data, key.digest, where=where)
        verify_pack_chunks(data, table, key)
        return table
    return None


class Tables:
    """Tables of contents of packs, kept in memory; even a whole registry's fit there."""

    def __init__(self) -> None:
        self._kept: dict[ObjectKey, PackTable] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._kept

    def keep(self, key: ObjectKey, table: PackTable) -> None:
        """Remember the table of a pack that was read."""
        self._kept[key] = table

    def of(self, store: Store, pack: PackRef) -> PackTable:
        """Return a pack's table; read it if it is not kept."""
        if pack.key not in self._kept:
            self.keep(pack.key, store.read_table(pack))
        return self._kept[pack.key]


def check_rows(store: Store, tables: Tables, manifest: Manifest, placement: Placement) -> None:
    """Compare each row of a placement with the table of its pack and with the manifest."""
    manifest = manifest.part(placement.components)
    lists = read_lists(store, manifest, placement)
    lengths = manifest.all_chunks(lists)
    index_chunks(manifest, placement, lists)
    digests = [*lengths, *placement.extra]
    by_pack: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(placement.rows):
        by_pack[row.pack].append(number)
    raw_bytes: dict[int, int] = {}
    for position, numbers in by_pack.items():
        table = tables.of(store, placement.packs[position])
        for number in numbers:
            row = placement.rows[number]
            raw_bytes[number] = _check_row(
                placement, row, digests[number], digests, table.at(row.offset)
            )
    for number, row in enumerate(placement.rows):
        wanted = lengths.get(digests[number], raw_bytes[number])
        _check_raw(placement, row, raw_bytes[number], wanted)
        if row.base != NO_BASE:
            base = placement.rows[row.base]
            _check_raw(placement, base, raw_bytes[row.base], raw_bytes[number])


def _check_row(
    placement: Placement,
    row: ChunkRow,
    digest: Digest,
    digests: list[Digest],
    entry: PackEntry | None,
) -> int:
    """Compare a row with the table's entry; return the raw length that the entry gives."""
    base = None if row.base == NO_BASE else digests[row.base]
    expected = (digest, row.stored_bytes, CODECS[row.codec], base)
    if entry is None or expected != (entry.digest, entry.stored_bytes, entry.codec, entry.base):
        raise Malformed(
            "a placement and its pack name different chunks at one offset",
            where=_where(placement, row),
            expected=_described(*expected),
            found="no chunk begins there"
            if entry is None
            else _described(entry.digest, entry.stored_bytes, entry.codec, entry.base),
        )
    return entry.raw_bytes


def _check_raw(placement: Placement, row: ChunkRow, found: int, wanted: int) -> None:
    if found != wanted:
        raise Malformed(
            "a pack gives a chunk another raw length than its tensor, or the delta on it, does",
            where=_where(placement, row),
            expected=f"{wanted} bytes",
            found=found,
        )


def _described(digest: Digest, stored_bytes: int, codec: str, base: Digest | None) -> str:
    against = "" if base is None else f", a delta to {base.short}"
    return f"chunk {digest.short}, {stored_bytes} bytes of {codec}{against}"


def _where(placement: Placement, row: ChunkRow) -> str:
    pack = placement.packs[row.pack].key
    return f"placement {placement.digest.short}: {pack} at offset {row.offset}"
