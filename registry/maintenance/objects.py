"""One object's bytes held against its name, and a placement against the packs that it names."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator

from registry.digest import Digest
from registry.errors import Malformed
from registry.objects.keys import ObjectKey
from registry.objects.manifest import Manifest
from registry.objects.pack import PackTable, open_pack
from registry.objects.placement import ChunkPlace, PackRef, Placement
from registry.reading.fetching import verify_pack_chunks
from registry.reading.loading import index_chunks, read_lists
from registry.store import Store

_ENTRY = struct.Struct("<32sI")


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


class Tables:
    """Tables of contents of packs, packed to 36 bytes a chunk: those of a whole registry fit.

    Args:
        store: Where the packs lie.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[ObjectKey, bytes] = {}

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._kept

    def keep(self, key: ObjectKey, table: PackTable) -> None:
        """Remember the table of a pack that was read."""
        self._kept[key] = b"".join(
            _ENTRY.pack(entry.digest, entry.stored_bytes) for entry in table.entries
        )

    def chunks(self, pack: PackRef) -> dict[Digest, tuple[int, int]]:
        """Return offset and stored length of every chunk of a pack; read its table if need be.

        Raises:
            MissingObject: The pack is gone.
            IntegrityError: The table is damaged.
        """
        if pack.key not in self._kept:
            self.keep(pack.key, self._store.read_table(pack))
        return dict(_unpacked(self._kept[pack.key]))


def _unpacked(packed: bytes) -> Iterator[tuple[Digest, tuple[int, int]]]:
    offset = 0
    for digest, stored_bytes in _ENTRY.iter_unpack(packed):
        yield Digest(digest), (offset, stored_bytes)
        offset += stored_bytes


def check_rows(store: Store, tables: Tables, manifest: Manifest, placement: Placement) -> None:
    """Hold each row of a placement against the table of the pack that it names.

    Raises:
        IntegrityError: A row is not where its chunk lies, or there are more or fewer than chunks.
    """
    lists = read_lists(store, manifest, placement)
    by_pack: defaultdict[int, list[tuple[Digest, ChunkPlace]]] = defaultdict(list)
    for digest, row in index_chunks(manifest, placement, lists).items():
        by_pack[row.pack].append((digest, row))
    for number, rows in by_pack.items():
        there = tables.chunks(placement.packs[number])
        for digest, row in rows:
            if there.get(digest) != (row.offset, row.stored_bytes):
                raise Malformed(
                    "a placement names a chunk where its pack has another",
                    where=f"placement {placement.digest.short}",
                    expected=digest.short,
                )
