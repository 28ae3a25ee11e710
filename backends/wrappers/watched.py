"""`Watched` tells how many bytes went to and from a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from holdfast.backends.base import Backend, Body, ByteRange, as_buffers
from holdfast.backends.wrappers.base import Wrapper


class Watched(Wrapper):
    """A backend that reports how many bytes have gone through it.

    Args:
        inner: The backend.
        progress: Called after each transfer with the number of bytes so far, by any thread.
    """

    def __init__(self, inner: Backend, progress: Callable[[int], object]) -> None:
        super().__init__(inner)
        self._progress = progress
        self._lock = Lock()
        self._done = 0

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
        self._moved(sum(map(len, as_buffers(body))))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        created = self.inner.put_if_absent(key, body)
        self._moved(sum(map(len, as_buffers(body))))
        return created

    def _moved(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            done = self._done
        self._progress(done)
