"""The grid `rows/1`: how a tensor is cut into chunks. A pure function of shape and dtype.

A piece is the largest block of trailing axes that fits into `CHUNK_BYTES`. A chunk is as many
adjacent pieces along the axis before them as fit. Chunks are contiguous in C order: each is a slice
of the tensor's bytes, and all of them joined are the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from holdfast.registry.values import item_size

GRID = "rows/1"
CHUNK_BYTES = 4 * 2**20
#: The manifest itself holds tensors of at most this many bytes.
INLINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Grid:
    """How one tensor is cut.

    Attributes:
        nbytes: Size of the tensor.
        chunk_bytes: Size of a full chunk.
        chunks_per_run: Chunks in one run along the cut axis; the last of a run may be smaller.
        tail_bytes: Size of the last chunk of each run.
        runs: Product of the axes before the cut axis.
        axis: The cut axis.
        rows: Rows along it in a full chunk.
    """

    nbytes: int
    chunk_bytes: int
    chunks_per_run: int
    tail_bytes: int
    runs: int
    axis: int = 0
    rows: int = 0

    @property
    def count(self) -> int:
        """Number of chunks; 0 for an empty tensor."""
        return self.chunks_per_run * self.runs

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
