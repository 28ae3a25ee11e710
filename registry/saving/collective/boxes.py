"""One rank's boxes, compact: a model has many tensors and few distinct boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from holdfast.registry.saving.collective.structure import Ints
from holdfast.registry.saving.collective.talk import pack_table, unpack_table

#: In `Boxes.of`: the tensor is whole.
WHOLE = -1


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
