"""Read chunks of stored states one after another, verify them, and reduce each to a small result.

Bounds the memory and runs the threads; the callers compute the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from holdfast.registry.store import Source, Threads, results, together
from holdfast.registry.values import Digest, cores

#: Raw chunks that one thread reads together.
_BATCH_BYTES = 8 * 2**20
#: While a source's chunks are read, their stored bytes and bases take at most this many times the
#: size of the chunks.
READING = 4
#: The most memory that the threads take together.
BUDGET_BYTES = 240 * 2**20
_MAX_THREADS = 6

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks that are reduced together, one of each source."""

    digests: tuple[Digest, ...]  # the chunks, in the order of the sources
    dtype: str  # the type of their elements
    nbytes: int


def reduce_pieces(
    sources: Sequence[Source],
    pieces: Iterable[Piece],
    reduce: Callable[[Piece, Sequence[memoryview]], _T],
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> dict[Piece, _T]:
    """Read chunks and return the result of each piece; equal pieces are read once."""
    batches = list(batches_of(pieces))
    if not batches:
        return {}
    for source in sources:
        source.index()
    size = max(map(held_bytes, batches))
    # Sources are read one after another.
    most = budget_bytes // (size + READING * -(-size // len(sources)))
    threads = max(1, min(cores(), _MAX_THREADS, len(batches), most))
    # Buffers are used again: new pages would cost more than the work on them.
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(size)))

    def work(batch: Sequence[Piece]) -> list[tuple[Piece, _T]]:
        buffer = buffers.get()
        try:
            return list(zip(batch, reduce_batch(sources, batch, reduce, buffer), strict=True))
        finally:
            buffers.put(buffer)

    with Threads(threads, "holdfast-chunks") as pool:
        done = results([pool.submit(work, batch) for batch in batches])
    return {piece: found for batch in done for piece, found in batch}


def reduce_batch(
    sources: Sequence[Source],
    batch: Sequence[Piece],
    reduce: Callable[[Piece, Sequence[memoryview]], _T],
    buffer: memoryview,
) -> list[_T]:
    """Read the chunks of a batch together, and return the result of each piece."""
    views = _read(sources, batch, buffer)
    return [
        reduce(piece, [views[at, one] for at, one in enumerate(piece.digests)]) for piece in batch
    ]


def held_bytes(batch: Iterable[Piece]) -> int:
    """Return the bytes of the chunks of pieces."""
    return sum(map(_held, batch))


def _held(piece: Piece) -> int:
    return piece.nbytes * len(piece.digests)


def batches_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces that are read together: neighbours, which are mostly in one pack."""
    return together(dict.fromkeys(pieces), _held, _BATCH_BYTES)


def _read(
    sources: Sequence[Source], batch: Sequence[Piece], buffer: memoryview
) -> Mapping[tuple[int, Digest], memoryview]:
    views: dict[tuple[int, Digest], memoryview] = {}
    start = 0
    for piece in batch:
        for key in enumerate(piece.digests):
            if key not in views:
                views[key] = buffer[start : start + piece.nbytes]
                start += piece.nbytes
    for at, source in enumerate(sources):
        source.read_chunks({digest: view for (of, digest), view in views.items() if of == at})
    return views
