"""One object's bytes held against its name, and a placement against the packs that it names."""

from __future__ import annotations

from collections import defaultdict

from holdfast.registry.errors import Malformed
from holdfast.registry.storage.codecs import CODECS
from holdfast.registry.storage.fetching import verify_pack_chunks
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.storage.pack import PackEntry, PackTable, open_pack
from holdfast.registry.storage.placement import NO_BASE, ChunkRow, PackRef, Placement
from holdfast.registry.storage.reading import index_chunks, read_lists
from holdfast.registry.storage.store import Store, decode_manifest
from holdfast.registry.values.digest import Digest


def check_object(data: bytes, key: ObjectKey) -> PackTable | None:
    """Check every byte of an object; return the table of a pack.

    Raises:
        IntegrityError: The bytes are not those that its name stands for.
        UnsupportedFormat: It is of a format that this version does not know.
    """
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
    """Tables of contents of packs; those of a whole registry fit into memory.

    Args:
        store: Where the packs lie.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[ObjectKey, PackTable] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._kept

    def keep(self, key: ObjectKey, table: PackTable) -> None:
        """Remember the table of a pack that was read."""
        self._kept[key] = table

    def of(self, pack: PackRef) -> PackTable:
        """Return a pack's table; read it if need be.

        Raises:
            MissingObject: The pack is gone.
            IntegrityError: The table is damaged.
        """
        if pack.key not in self._kept:
            self.keep(pack.key, self._store.read_table(pack))
        return self._kept[pack.key]


def check_rows(store: Store, tables: Tables, manifest: Manifest, placement: Placement) -> None:
    """Hold each row of a placement against the table of its pack and against the manifest.

    Raises:
        IntegrityError: A row says something else than its pack's table; a chunk has another raw
            length there than the manifest or the delta on it gives it; there are more or fewer
            rows than chunks; or a chain of deltas is too long.
    """
    lists = read_lists(store, manifest, placement)
    lengths = manifest.all_chunks(lists)
    index_chunks(manifest, placement, lists)
    digests = [*lengths, *placement.extra]
    by_pack: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(placement.rows):
        by_pack[row.pack].append(number)
    raw_bytes: dict[int, int] = {}
    for position, numbers in by_pack.items():
        there = tables.of(placement.packs[position])
        for number in numbers:
            row = placement.rows[number]
            raw_bytes[number] = _check_row(
                placement, row, digests[number], digests, there.at(row.offset)
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
    """Hold a row against the table's entry; return the raw length that the entry gives."""
    base = None if row.base == NO_BASE else digests[row.base]
    said = (digest, row.stored_bytes, CODECS[row.codec], base)
    if entry is None or said != (entry.digest, entry.stored_bytes, entry.codec, entry.base):
        raise Malformed(
            "a placement and its pack name different chunks at one offset",
            where=_where(placement, row),
            expected=_told(*said),
            found="no chunk begins there"
            if entry is None
            else _told(entry.digest, entry.stored_bytes, entry.codec, entry.base),
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


def _told(digest: Digest, stored_bytes: int, codec: str, base: Digest | None) -> str:
    against = "" if base is None else f", a delta to {base.short}"
    return f"chunk {digest.short}, {stored_bytes} bytes of {codec}{against}"


def _where(placement: Placement, row: ChunkRow) -> str:
    pack = placement.packs[row.pack].key
    return f"placement {placement.digest.short}: {pack} at offset {row.offset}"
