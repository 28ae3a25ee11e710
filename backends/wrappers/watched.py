"""`Watched` tells how many bytes went to and from a store, and how many names it listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock

from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo, body_bytes
from holdfast.backends.wrappers.base import Wrapper

#: Names of a listing that are told together.
_TOGETHER = 1000


class Watched(Wrapper):
    """A backend that reports how many bytes have gone through it, and how many names.

    Args:
        inner: The backend.
        progress: Called after each transfer with the number of bytes so far, by any thread.
        listed: Called with the number of names listed so far, by any thread.
    """

    def __init__(
        self,
        inner: Backend,
        progress: Callable[[int], object],
        listed: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(inner)
        self._progress = progress
        self._listed = listed
        self._lock = Lock()
        self._done = self._names = 0

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        data = self.inner.get(key, byte_range, into=into)
        self._moved(len(data) if byte_range is None else len(byte_range))
        return data

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        self.inner.put(key, body)
        self._moved(body_bytes(body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        created = self.inner.put_if_absent(key, body)
        self._moved(body_bytes(body))
        return created

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order."""
        found = 0
        for info in self.inner.list(
            prefix, start_after=start_after, limit=limit, delimiter=delimiter
        ):
            yield info
            found += 1
            if found == _TOGETHER:
                self._saw(found)
                found = 0
        self._saw(found)

    def _saw(self, names: int) -> None:
        with self._lock:
            self._names += names
            found = self._names
        self._listed(found)

    def _moved(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            done = self._done
        self._progress(done)
