"""Tensors that are cut into chunks, chunks and parts of ranks as boxes, and tables of integers.

All boxes have as many axes as the tensor with the most axes; added axes, of length 1, come first.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdfast.backends import Buffer
from holdfast.registry.objects import grid

Ints = NDArray[np.int64]
#: Before a table: rows, columns, and the number of its type.
_TABLE = "<IIB"
_TYPES = (np.dtype("<i4"), np.dtype("<i8"))
#: In `Boxes.of`: the tensor is whole.
WHOLE = -1


@dataclass(frozen=True)
class Structure:
    """The tensors of a state that are cut into chunks, in order: the same on every rank."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def axes(self) -> int:
        """The axes of a box."""
        return max((len(shape) for shape in self.shapes), default=1) or 1

    @cached_property
    def first(self) -> Ints:
        """The number of each tensor's first chunk; the count of all chunks at the end."""
        counts = [grid(*one).count for one in zip(self.dtypes, self.shapes, strict=True)]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of types and shapes."""
        return hashlib.sha256(repr((self.dtypes, self.shapes)).encode()).digest()

    def padded(self, lengths: Sequence[int], fill: int) -> list[int]:
        """Return lengths or offsets with the missing axes in front."""
        return [fill] * (self.axes - len(lengths)) + list(lengths)

    def chunk_boxes(self, tensor: int, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the begins and ends of some chunks of a tensor, a row each."""
        shape = self.padded(self.shapes[tensor], 1)
        axis, rows, per_run = self._cut(tensor)
        low = np.zeros((len(numbers), self.axes), np.int64)
        high = np.tile(np.array(shape, np.int64), (len(numbers), 1))
        if axis:
            run = np.unravel_index(numbers // per_run, shape[:axis])
            for number, index in enumerate(run):
                low[:, number], high[:, number] = index, index + 1
        low[:, axis] = numbers % per_run * rows
        high[:, axis] = np.minimum(low[:, axis] + rows, shape[axis])
        return low, high

    def _cut(self, tensor: int) -> tuple[int, int, int]:
        """Return the cut axis of a tensor, the rows of a chunk, and the chunks of a run."""
        shape = self.shapes[tensor]
        cut = grid(self.dtypes[tensor], shape)
        return self.axes - len(shape) + cut.axis, cut.rows, cut.chunks_per_run

    def pieces(self, tensor: int, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut boxes at the chunks of a tensor."""
        shape = self.padded(self.shapes[tensor], 1)
        axis, rows, per_run = self._cut(tensor)
        start, stop = low[:, : axis + 1].copy(), high[:, : axis + 1].copy()
        start[:, axis] //= rows
        stop[:, axis] = (stop[:, axis] - 1) // rows + 1
        counts = (stop - start).prod(axis=1)
        box = np.repeat(np.arange(len(low)), counts)
        inner = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        chunk = np.zeros(len(box), np.int64)
        lengths = [*shape[:axis], per_run]
        scale = np.ones(len(box), np.int64)
        factor = 1
        for number in range(axis, -1, -1):
            width = (stop - start)[box, number]
            chunk += (start[box, number] + inner // scale % width) * factor
            scale *= width
            factor *= lengths[number]
        order = np.lexsort((box, chunk))
        box, chunk = box[order], chunk[order]
        begin, end = self.chunk_boxes(tensor, chunk)
        return box, chunk, np.maximum(begin, low[box]), np.minimum(end, high[box])


@dataclass(frozen=True)
class Boxes:
    """The boxes that one rank has of the tensors of a `Structure`."""

    distinct: Ints  # offset and extent of each distinct box
    of: Ints  # for each tensor the row of its box in `distinct`, or `WHOLE`

    @classmethod
    def from_rows(cls, rows: Ints, tensors: int) -> Self:
        """Return the boxes of a table: tensor, offset and extent of each sharded tensor."""
        of = np.full(tensors, WHOLE, np.int64)
        boxes, first, inverse = np.unique(
            rows[:, 1:], axis=0, return_index=True, return_inverse=True
        )
        # Numbered as they come, so that ranks with other boxes of the same tensors have equal `of`.
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        of[rows[:, 0]] = rank[inverse.reshape(-1)]
        return cls(boxes[order], of)

    def encode(self) -> list[bytes]:
        """Return both tables as bytes."""
        return [pack_table(self.distinct), pack_table(self.of.reshape(-1, 1))]

    @classmethod
    def decode(cls, columns: Sequence[memoryview]) -> Self:
        """Decode the result of `encode`."""
        distinct, of = map(unpack_table, columns)
        return cls(distinct, of.reshape(-1))


def pack_table(table: Ints) -> bytes:
    """Return a table of integers as bytes."""
    is_small = not table.size or (int(table.min()) >= -(2**31) and int(table.max()) < 2**31)
    columns = np.ascontiguousarray(table.T, _TYPES[not is_small])
    head = struct.pack(_TABLE, *table.shape, not is_small)
    return head + zstandard.ZstdCompressor(level=1).compress(columns.tobytes())


def unpack_table(data: Buffer) -> Ints:
    """Decode the result of `pack_table`."""
    view = memoryview(data)
    rows, width, kind = struct.unpack_from(_TABLE, view)
    columns = zstandard.ZstdDecompressor().decompress(view[struct.calcsize(_TABLE) :])
    return np.frombuffer(columns, _TYPES[kind]).reshape(width, rows).T.astype(np.int64)
