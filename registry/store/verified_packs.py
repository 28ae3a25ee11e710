"""The packs that this machine has put, or has read whole: a writer may rely on them unread.

The name of a pack covers its bytes, but whoever put it may have put others. So a writer reads a
pack that another one has put, once, before it relies on it. The names are kept beside the heads of
the registry. A name that is forgotten costs one more reading and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from threading import Semaphore

from holdfast.registry.errors import IntegrityError
from holdfast.registry.objects import ObjectKey, PackRef, open_pack
from holdfast.registry.store.fetching import verify_pack_chunks
from holdfast.registry.store.heads import Heads
from holdfast.registry.store.store import Store
from holdfast.registry.values import ProcessLock

_SUFFIX = ".packs"
_NAME_BYTES = 16
#: The most names in a file, which then has 1 MiB; the oldest are dropped.
MAX_NAMES = 65_536
#: Packs that are read at once, each whole in memory.
_AT_ONCE = 2


class VerifiedPacks:
    """The verified packs of one registry."""

    def __init__(self, heads: Heads | None, registry_id: str) -> None:
        self._heads, self._id = heads, registry_id
        self._known = dict.fromkeys(self._kept())
        self._is_new = False
        self._lock, self._turns = ProcessLock(), ProcessLock(lambda: Semaphore(_AT_ONCE))
        if heads is not None:
            heads.beside.append(self._write)

    @classmethod
    def of(cls, store: Store) -> VerifiedPacks:
        """Return the verified packs of a handle."""
        if cls not in store.companions:
            store.companions[cls] = cls(store.heads, store.config.id)
        found: VerifiedPacks = store.companions[cls]
        return found

    def __contains__(self, key: ObjectKey) -> bool:
        return self._name(key) in self._known

    def verifies(self, store: Store, pack: PackRef) -> bool:
        """Return whether a pack is undamaged; it is read if it is not known yet."""
        if pack.key in self:
            return True
        with self._turns.here():
            sound = is_sound(store, pack)
        if sound:
            self.add(pack.key)
        return sound

    def add(self, key: ObjectKey) -> None:
        """Note a pack that was put or read whole."""
        with self._lock.here():
            self._known[self._name(key)] = None
            self._is_new = True
            if len(self._known) > MAX_NAMES:
                del self._known[next(iter(self._known))]

    def _write(self) -> None:
        """Keep the names, with those of other programs; a failure is no error."""
        with self._lock.here():
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
    """Return whether a pack is undamaged; every byte of it is read."""
    try:
        data = store.read(pack.key)
        verify_pack_chunks(data, open_pack(data, pack.key.digest, where=str(pack.key)), pack.key)
    except IntegrityError:
        return False
    return len(data) == pack.size_bytes
