"""Decoded chunks that were used last, for views that read a chunk in several parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from holdfast.registry.values import Digest

#: The most bytes of decoded chunks that a view keeps.
RECENT_BYTES = 64 * 2**20


class RecentChunks:
    """The most recently used chunks; a chunk that several threads want is read once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._chunks: OrderedDict[tuple[Digest, int], memoryview] = OrderedDict()
        self._coming: dict[tuple[Digest, int], Future[memoryview]] = {}
        self._lock = Lock()

    def get(self, key: tuple[Digest, int], read: Callable[[], memoryview]) -> memoryview:
        """Return a chunk; read it if it is not kept."""
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return self._chunks[key]
            coming = self._coming.get(key)
            if coming is None:
                mine = self._coming[key] = Future()
        if coming is not None:
            return coming.result()
        try:
            chunk = read()
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._coming[key]
            self._keep(key, chunk)
        mine.set_result(chunk)
        return chunk

    def peek(self, key: tuple[Digest, int]) -> memoryview | None:
        """Return a chunk if it is kept."""
        with self._lock:
            return self._chunks.get(key)

    def _keep(self, key: tuple[Digest, int], chunk: memoryview) -> None:
        self._chunks[key] = chunk
        self._size_bytes += len(chunk)
        while self._size_bytes > self._limit_bytes:
            _, oldest = self._chunks.popitem(last=False)
            self._size_bytes -= len(oldest)
