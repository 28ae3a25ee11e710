"""A histogram of one tensor, from as many of its chunks as a budget of bytes allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.registry.comparing.chunkwise import Piece, reduce_pieces
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.loading import StateHandle, tensors_by_path
from holdfast.registry.objects import CHUNK_BYTES, TensorEntry
from holdfast.registry.values import Digest, near

BINS = 60


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
    parts = _parts(stored, entry, budget_bytes)
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


def _parts(stored: StateHandle, entry: TensorEntry, budget_bytes: int) -> list[memoryview]:
    """Return raw bytes of the tensor: all of it, or chunks evenly spread over it."""
    if entry.inline is not None:
        return [memoryview(entry.inline)]
    source = stored.reader
    chunks = list(zip(source.chunk_digests(entry), entry.grid.sizes(), strict=True))
    pieces = [Piece((digest,), entry.dtype, size) for digest, size in _spread(chunks, budget_bytes)]
    read = reduce_pieces([source], pieces, lambda _, views: bytes(views[0]))
    return [memoryview(read[piece]) for piece in pieces]


def _spread(chunks: Sequence[tuple[Digest, int]], budget_bytes: int) -> list[tuple[Digest, int]]:
    """Return chunks with equal distances whose sizes are within the budget."""
    largest = max((size for _, size in chunks), default=1)
    room = max(1, budget_bytes // largest)
    if len(chunks) <= room:
        return list(chunks)
    return [chunks[at * len(chunks) // room] for at in range(room)]
