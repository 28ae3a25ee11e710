"""The tensors of a state that are cut into chunks, and the boxes of those chunks.

All boxes have as many axes as the tensor with the most axes; added axes, of length 1, come first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.objects import grid

Ints = NDArray[np.int64]


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
