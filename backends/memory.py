"""A store in the memory of a process, for tests and notebooks; stores can have names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.backends.base import (
    Backend,
    Body,
    ByteRange,
    ObjectInfo,
    as_buffers,
    check_into,
    check_key,
    cut,
)
from holdfast.backends.errors import ObjectNotFound


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    modified_s: float


@dataclass(slots=True)
class _Store:
    objects: dict[str, _Object] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_stores: dict[str, _Store] = {}
_stores_lock = threading.Lock()


class MemoryBackend(Backend):
    """Objects in a dict.

    Args:
        name: Backends of one name share a store; without a name the backend has its own.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        if name is None:
            self._store = _Store()
        else:
            with _stores_lock:
                self._store = _stores.setdefault(name, _Store())

    @property
    def url(self) -> str:
        """`memory://NAME`; a store without a name cannot be opened again."""
        return f"memory://{self._name or ''}"

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        data = self._object(key).data
        if byte_range is None:
            check_into(byte_range, into)
            return data
        return cut(key, data, byte_range, into)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        stored = _Object(b"".join(as_buffers(body)), time.time())
        with self._store.lock:
            self._store.objects[check_key(key)] = stored

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        stored = _Object(b"".join(as_buffers(body)), time.time())
        with self._store.lock:
            return self._store.objects.setdefault(check_key(key), stored) is stored

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""
        return _info(key, self._object(key))

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List the objects that exist when the iteration begins."""
        with self._store.lock:
            items = self._store.objects.items()
            found = sorted(item for item in items if item[0].startswith(prefix))
        left = len(found) if limit is None else limit
        folder = None
        for key, stored in found:
            if left <= 0:
                return
            cut = key.find("/", len(prefix)) + 1 if delimiter else 0
            name = key[:cut] or key
            if name <= start_after or name == folder:
                continue
            if cut:
                folder = name
            yield ObjectInfo(name, 0, 0.0) if cut else _info(key, stored)
            left -= 1

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        with self._store.lock:
            self._store.objects.pop(check_key(key), None)

    def close(self) -> None:
        """Do nothing; a named store lives as long as its process."""

    def _object(self, key: str) -> _Object:
        with self._store.lock:
            stored = self._store.objects.get(check_key(key))
        if stored is None:
            raise ObjectNotFound("no such object", where=key)
        return stored


def _info(key: str, stored: _Object) -> ObjectInfo:
    return ObjectInfo(key, len(stored.data), stored.modified_s)
