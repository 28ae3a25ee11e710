"""The packs that this machine has put, or has read whole: a writer may rely on them unread.

The name of a pack covers its bytes, but whoever put it may have put others. So a writer reads a
pack that another one has put, once, before it relies on it. The names are kept beside the heads of
the registry. A name that is forgotten costs one more reading and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from threading import Lock

from holdfast.backends import ByteRange
from holdfast.registry.errors import IntegrityError, ObjectNotFound, ObjectTruncated
from holdfast.registry.storage.fetching import verify_chunk
from holdfast.registry.storage.heads import Heads
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import TRAILER_BYTES, PackEntry, PackTable
from holdfast.registry.storage.placement import PackRef
from holdfast.registry.storage.store import Store

_SUFFIX = ".packs"
_NAME_BYTES = 16
#: The most names in a file, which then has 1 MiB; the oldest are dropped.
MAX_NAMES = 65_536
_READ_BYTES = 16 * 2**20


class ProvenPacks:
    """The proven packs of one registry.

    Args:
        heads: Where they are kept between programs, if they are.
        registry_id: The registry's id.
    """

    def __init__(self, heads: Heads | None, registry_id: str) -> None:
        self._heads, self._id = heads, registry_id
        self._known = dict.fromkeys(self._kept())
        self._is_new = False
        self._lock = Lock()
        if heads is not None:
            heads.beside.append(self._write)

    @classmethod
    def of(cls, store: Store) -> ProvenPacks:
        """Return those of a handle."""
        if cls not in store.companions:
            store.companions[cls] = cls(store.heads, store.config.id)
        found: ProvenPacks = store.companions[cls]
        return found

    def __contains__(self, key: ObjectKey) -> bool:
        return self._name(key) in self._known

    def add(self, key: ObjectKey) -> None:
        """Note a pack that was put or read whole."""
        with self._lock:
            self._known[self._name(key)] = None
            self._is_new = True
            if len(self._known) > MAX_NAMES:
                del self._known[next(iter(self._known))]

    def _write(self) -> None:
        """Keep the names, with those of other programs; a failure is no error."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
            names = list(self._known)
        if is_new and self._heads is not None:
            names = list(dict.fromkeys([*self._kept(), *names]))
            self._heads.keep(_SUFFIX, b"".join(names[-MAX_NAMES:]))

    def _kept(self) -> Iterator[bytes]:
        data = (self._heads.kept(_SUFFIX) if self._heads is not None else None) or b""
        for start in range(0, len(data) - _NAME_BYTES + 1, _NAME_BYTES):
            yield data[start : start + _NAME_BYTES]

    def _name(self, key: ObjectKey) -> bytes:
        return hashlib.sha256(f"{self._id} {key}".encode()).digest()[:_NAME_BYTES]


def is_sound(store: Store, pack: PackRef) -> bool:
    """Return whether a pack is undamaged; every byte of it is read, some MiB at a time."""
    try:
        table = store.read_table(pack)
        filled = sum(entry.stored_bytes for entry in table) + len(table.encode()) + TRAILER_BYTES
        if filled != pack.size_bytes:
            return False
        for some in _stretches(table):
            start, stop = some[0].offset, some[-1].offset + some[-1].stored_bytes
            data = memoryview(store.backend.get(str(pack.key), ByteRange(start, stop)))
            for entry in some:
                stored = data[entry.offset - start :][: entry.stored_bytes]
                verify_chunk(stored, entry.stored_digest or entry.digest, pack.key, entry.offset)
    except (IntegrityError, ObjectNotFound, ObjectTruncated):
        return False
    return True


def _stretches(table: PackTable) -> Iterator[list[PackEntry]]:
    some: list[PackEntry] = []
    for entry in table:
        if some and entry.offset + entry.stored_bytes - some[0].offset > _READ_BYTES:
            yield some
            some = []
        some.append(entry)
    if some:
        yield some
