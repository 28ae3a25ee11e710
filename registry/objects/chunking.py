"""The grid `rows/1`: how a tensor is cut into chunks. A pure function of shape and dtype.

A piece is the largest block of trailing axes that fits into `CHUNK_BYTES`. A chunk is as many
adjacent pieces along the axis before them as fit. Chunks are contiguous in C order: each is a slice
of the tensor's bytes, and all of them joined are the tensor. `RecentChunks` keeps the decoded
chunks that were used last, for views that read a chunk in several parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from math import prod
from threading import Lock
from typing import NamedTuple

from holdfast.registry.values import Digest, item_size

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


GRID = "rows/1"
CHUNK_BYTES = 4 * 2**20
#: The manifest itself holds tensors of at most this many bytes.
INLINE_BYTES = 64


class Grid(NamedTuple):
    """How one tensor is cut."""

    nbytes: int  # size of the tensor
    chunk_bytes: int  # size of a full chunk
    chunks_per_run: int  # chunks in one run along the cut axis; the last of a run may be smaller
    tail_bytes: int  # size of the last chunk of each run
    runs: int  # product of the axes before the cut axis
    axis: int = 0  # the cut axis
    rows: int = 0  # rows along it in a full chunk

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of chunks; 0 for an empty tensor."""
        return self.chunks_per_run * self.runs

    @property
    def run_bytes(self) -> int:
        """Size of the chunks of one run."""
        return (self.chunks_per_run - 1) * self.chunk_bytes + self.tail_bytes

    def sizes(self) -> tuple[int, ...]:
        """Return the length of every chunk, in order."""
        run = (self.chunk_bytes,) * (self.chunks_per_run - 1) + (self.tail_bytes,)
        return run * self.runs


# A model has thousands of tensors and a few dozen shapes.
@lru_cache(maxsize=4096)
def grid(dtype: str, shape: tuple[int, ...]) -> Grid:
    """Cut a tensor of this dtype and shape."""
    item = item_size(dtype)
    nbytes = prod(shape) * item
    if nbytes == 0:
        return Grid(0, 0, 0, 0, 0)
    if nbytes <= CHUNK_BYTES:
        return Grid(nbytes, nbytes, 1, nbytes, 1, 0, shape[0] if shape else 1)
    axis, piece = len(shape) - 1, item
    while piece * shape[axis] <= CHUNK_BYTES:
        piece *= shape[axis]
        axis -= 1
    pieces = CHUNK_BYTES // piece
    chunks = -(-shape[axis] // pieces)
    tail = shape[axis] - (chunks - 1) * pieces
    runs = prod(shape[:axis])
    return Grid(nbytes, pieces * piece, chunks, tail * piece, runs, axis, pieces)
