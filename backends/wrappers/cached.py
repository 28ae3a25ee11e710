"""Remembering small objects that never change, such as the slots of a log."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from holdfast.backends.base import Backend, Body, ByteRange, cut
from holdfast.backends.wrappers.base import Wrapper


class Cached(Wrapper):
    """A backend that reads an immutable object once, while it is among the last used.

    Only whole objects are remembered. A write or deletion through this backend forgets the object;
    one by anybody else is not noticed, so `prefixes` must hold immutable objects only. Absence is
    never remembered.

    Args:
        inner: The backend that is asked.
        prefixes: Beginnings of the keys that are remembered.
        capacity_bytes: Bound on the bytes held.
        largest_bytes: Objects above this size are passed through.
    """

    def __init__(
        self,
        inner: Backend,
        prefixes: Sequence[str],
        *,
        capacity_bytes: int = 64 * 2**20,
        largest_bytes: int = 2**20,
    ) -> None:
        super().__init__(inner)
        self._prefixes = tuple(prefixes)
        self._capacity_bytes = capacity_bytes
        self._largest_bytes = min(largest_bytes, capacity_bytes)
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        held = self._recall(key)
        if held is None:
            data = self.inner.get(key, byte_range, into=into)
            if byte_range is None:
                self._remember(key, data)
            return data
        return held if byte_range is None else cut(key, held, byte_range, into)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        try:
            self.inner.put(key, body)
        finally:
            self._forget(key)

    def delete(self, key: str) -> None:
        """Remove an object."""
        try:
            self.inner.delete(key)
        finally:
            self._forget(key)

    def _recall(self, key: str) -> bytes | None:
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
            return held

    def _remember(self, key: str, data: bytes) -> None:
        if not key.startswith(self._prefixes) or len(data) > self._largest_bytes:
            return
        with self._lock:
            self._drop(key)
            self._held[key] = data
            self._held_bytes += len(data)
            while self._held_bytes > self._capacity_bytes:
                self._drop(next(iter(self._held)))

    def _forget(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._held_bytes -= len(self._held.pop(key, b""))
