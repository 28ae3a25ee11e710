"""Statistics of the tensors of a stored state: extremes, means, norms, NaN and infinities.

Chunks are read one after another in bounded memory, equal chunks once, and every byte is verified.
NaN and infinities are counted, and skipped by all other figures, so that one of them does not hide
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from holdfast.registry.comparing.chunkwise import (
    READING,
    Piece,
    batches_of,
    held_bytes,
    reduce_batch,
    reduce_pieces,
)
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.history import RunLog, StateReader
from holdfast.registry.loading import StateHandle, tensors_by_path
from holdfast.registry.objects import CHUNK_BYTES, TensorEntry
from holdfast.registry.store import Store, Workers
from holdfast.registry.values import Digest, near

if TYPE_CHECKING:
    from holdfast.registry.comparing.elements import Summary

BINS = 60


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The statistics of one tensor."""

    path: str  # component and keys joined with `/`
    dtype: str  # name of its element type
    shape: tuple[int, ...]  # axis lengths
    nbytes: int
    count: int
    #: The least finite element, exact: an integer for integers and bools. `None` where there is
    #: none, and for complex types, which have no order.
    min: int | float | None
    max: int | float | None  # the greatest finite element, likewise
    #: Mean of the finite elements; for integers exact except for one rounding. `None` where there
    #: is none.
    mean: float | complex | None
    norm: float  # L2 norm of the finite elements
    nan: int  # number of NaN elements; complex ones count if either part is NaN
    inf: int  # number of infinite elements that are not NaN
    zeros: int  # number of zeros of either sign

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not self.nan and not self.inf

    @property
    def zeros_share(self) -> float:
        """Share of the elements that are zero; 0 of an empty tensor."""
        return self.zeros / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class StateStats:
    """The statistics of the tensors of a state."""

    tensors: tuple[TensorStats, ...]  # one for each tensor, in the order of the state

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, equal ones counted each time."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def count(self) -> int:
        """Number of elements."""
        return sum(one.count for one in self.tensors)

    @property
    def nan(self) -> int:
        """Number of NaN elements."""
        return sum(one.nan for one in self.tensors)

    @property
    def inf(self) -> int:
        """Number of infinite elements."""
        return sum(one.inf for one in self.tensors)

    @property
    def zeros(self) -> int:
        """Number of zeros."""
        return sum(one.zeros for one in self.tensors)

    @property
    def zeros_share(self) -> float:
        """Share of the elements that are zero; 0 where there are none."""
        return self.zeros / self.count if self.count else 0.0

    @property
    def norm(self) -> float:
        """L2 norm of all finite elements together."""
        return math.hypot(*(one.norm for one in self.tensors))

    @property
    def nonfinite(self) -> tuple[TensorStats, ...]:
        """The tensors that hold NaN or infinity."""
        return tuple(one for one in self.tensors if not one.is_finite)


def stats(
    stored: StateHandle, patterns: Sequence[str] = (), *, executor: Executor | None = None
) -> StateStats:
    """Read the tensors of a state and return their statistics. Memory stays below 256 MiB."""
    return _stats(stored, _wanted(stored, patterns), executor)


def stats_of(stored: StateHandle, paths: Iterable[str]) -> StateStats:
    """Read these tensors of a state and return their statistics, as `stats` does."""
    entries = tensors_by_path(stored.manifest.components)
    return _stats(stored, {path: entries[path] for path in paths})


def _stats(
    stored: StateHandle, entries: Mapping[str, TensorEntry], executor: Executor | None = None
) -> StateStats:
    from holdfast.registry.comparing import elements

    reader = stored.reader
    workers = Workers(executor, reader.store)
    pieces = {path: _pieces(stored, entry) for path, entry in entries.items()}
    if any(pieces.values()):
        reader.index()
    found: dict[Piece, Summary] = {}
    workers.each(
        Summarising(reader.run_id, reader.digest, reader.ref, reader),
        batches_of(piece for parts in pieces.values() for piece in parts),
        lambda batch, done: found.update(zip(batch, done.result(), strict=True)),
        size_of=lambda batch: (1 + READING) * held_bytes(batch),
    )

    def summary(path: str, entry: TensorEntry) -> Summary:
        if entry.inline is not None:
            return elements.summarise(memoryview(entry.inline), entry.dtype)
        return elements.join(found[piece] for piece in pieces[path])

    return StateStats(
        tuple(_tensor(path, entry, summary(path, entry)) for path, entry in entries.items())
    )


class Summarising:
    """Read and summarise chunks of a state. A copy in another process opens the run there."""

    def __init__(
        self, run_id: str, digest: Digest, ref: str, reader: StateReader | None = None
    ) -> None:
        self._state = (run_id, digest, ref)
        self._reader = reader
        self._lock = Lock()
        # Buffers are used again: new pages would cost more than the work on them.
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()

    def __reduce__(self) -> tuple[object, ...]:
        return (Summarising, self._state)

    def __call__(self, store: Store, batch: Sequence[Piece]) -> list[Summary]:
        """Return the summary of each piece."""
        from holdfast.registry.comparing import elements

        buffer = self._buffer(held_bytes(batch))
        try:
            return reduce_batch(
                [self._source(store)],
                batch,
                lambda piece, views: elements.summarise(views[0], piece.dtype),
                buffer,
            )
        finally:
            self._buffers.put(buffer)

    def _source(self, store: Store) -> StateReader:
        with self._lock:
            if self._reader is None:
                run_id, digest, ref = self._state
                log = RunLog(store, run_id)
                log.open()
                self._reader = StateReader(store, log, digest, ref)
                self._reader.index()
            return self._reader

    def _buffer(self, size: int) -> memoryview:
        try:
            buffer = self._buffers.get_nowait()
        except Empty:
            buffer = memoryview(b"")
        return buffer if buffer.nbytes >= size else memoryview(bytearray(size))


def _wanted(stored: StateHandle, patterns: Sequence[str]) -> dict[str, TensorEntry]:
    entries = tensors_by_path(stored.manifest.components)
    if not patterns:
        return entries
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in entries):
            raise NotFound(
                "no tensor matches",
                where=f"{stored.ref}: {pattern}",
                hint=near(pattern, entries) or "`holdfast show --tensors` lists the paths.",
            )
    return {
        path: entry
        for path, entry in entries.items()
        if any(fnmatchcase(path, pattern) for pattern in patterns)
    }


def _pieces(stored: StateHandle, entry: TensorEntry) -> list[Piece]:
    if entry.inline is not None:
        return []
    return [
        Piece((digest,), entry.dtype, size)
        for digest, size in zip(stored.reader.chunk_digests(entry), entry.grid.sizes(), strict=True)
    ]


def _tensor(path: str, entry: TensorEntry, found: Summary) -> TensorStats:
    mean: float | complex | None = None
    if found.finite:
        mean = float(found.total / found.finite)
        if entry.dtype.startswith("complex"):
            mean = complex(mean, float(found.imaginary / found.finite))
    return TensorStats(
        path,
        entry.dtype,
        entry.shape,
        entry.nbytes,
        found.count,
        found.low,
        found.high,
        mean,
        found.norm,
        found.nans,
        found.infs,
        found.zeros,
    )


@dataclass(frozen=True, slots=True)
class Histogram:
    """How the elements of a tensor are distributed."""

    path: str  # component and keys joined with `/`
    dtype: str  # name of its element type
    nbytes: int  # size of the tensor in bytes
    read_bytes: int  # bytes of it that were read; fewer than `nbytes` if the budget was smaller
    count: int  # number of its elements
    read: int  # number of elements that were read; everything below is about these
    #: The least finite element; `None` without one, and for complex types.
    low: int | float | None
    high: int | float | None  # the greatest finite element, likewise
    nan: int  # number of NaN elements
    inf: int  # number of infinite elements
    zeros: int
    norm: float  # L2 norm of the finite elements
    #: Edges of the bins, ascending, one more than there are bins; of complex elements for both
    #: parts together. Empty if no element is finite.
    edges: tuple[float, ...]
    counts: tuple[int, ...]  # number of finite elements in each bin


def histogram(
    stored: StateHandle, path: str, *, budget_bytes: int = 32 * 2**20, bins: int = BINS
) -> Histogram:
    """Read a tensor, or chunks evenly spread over it, and count its elements by value."""
    from holdfast.registry.comparing import elements

    if budget_bytes < CHUNK_BYTES:
        raise InvalidInput(
            "a budget below one chunk", expected=f"{CHUNK_BYTES} or more", found=budget_bytes
        )
    entries = tensors_by_path(stored.manifest.components)
    if path not in entries:
        raise NotFound("no such tensor", where=f"{stored.ref}: {path}", hint=near(path, entries))
    entry = entries[path]
    parts = _raw_parts(stored, entry, budget_bytes)
    found, edges, counts = elements.histogram(parts, entry.dtype, bins)
    return Histogram(
        path,
        entry.dtype,
        entry.nbytes,
        sum(map(len, parts)),
        math.prod(entry.shape),
        found.count,
        found.low,
        found.high,
        found.nans,
        found.infs,
        found.zeros,
        found.norm,
        edges,
        counts,
    )


def _raw_parts(stored: StateHandle, entry: TensorEntry, budget_bytes: int) -> list[memoryview]:
    """Return raw bytes of the tensor: all of it, or chunks evenly spread over it."""
    if entry.inline is not None:
        return [memoryview(entry.inline)]
    pieces = _spread(_pieces(stored, entry), budget_bytes)
    read = reduce_pieces([stored.reader], pieces, lambda _, views: bytes(views[0]))
    return [memoryview(read[piece]) for piece in pieces]


def _spread(chunks: list[Piece], budget_bytes: int) -> list[Piece]:
    """Return chunks with equal distances whose sizes are within the budget."""
    room = max(1, budget_bytes // max((one.nbytes for one in chunks), default=1))
    if len(chunks) <= room:
        return chunks
    return [chunks[at * len(chunks) // room] for at in range(room)]
