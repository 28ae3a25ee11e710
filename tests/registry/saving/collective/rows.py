"""States whose arrays are cut into rows, a part for each rank, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.distributed import PerRank
from holdfast.registry.pytree import numpy_arrays
from holdfast.registry.pytree.encoding import HANDLERS
from holdfast.registry.saving.collective import plan as planning
from holdfast.registry.saving.collective.shards import ShardLeaf

WHOLE = np.random.default_rng(0).standard_normal((1500, 1000)).astype(np.float32)


class Rows:
    """An array of which a rank has some rows: what a DTensor is, without torch."""

    def __init__(self, whole: Any, rank: int, size: int, *, is_copied: bool = False) -> None:
        rows = -(-len(whole) // size)
        self.begin = min(rank * rows, len(whole))
        self.part = np.ascontiguousarray(whole[self.begin : self.begin + rows])
        self.whole, self.is_copied = whole, is_copied


def shard_rows(patch: pytest.MonkeyPatch, round_bytes: int = 2**20) -> None:
    """Let `Rows` be sharded tensors, and exchanges have several rounds."""

    def encode(encoder: Any, value: Rows, link: Any, depth: int) -> Any:
        node = numpy_arrays.encode_array(encoder, value.part, link, depth)
        offset = (value.begin, *(0 for _ in value.whole.shape[1:]))
        leaf = encoder.leaves[-1]
        made = ShardLeaf.of(leaf, value.whole.shape, offset, is_copied=value.is_copied)
        encoder.leaves[-1] = made
        return node

    patch.setitem(HANDLERS, Rows, encode)
    patch.setattr(planning, "ROUND_BYTES", round_bytes)


def state(rank: int, size: int, seed: float = 0) -> dict[str, Any]:
    """Return a rank's part of a state."""
    whole = {"w": Rows(WHOLE + np.float32(seed), rank, size), "b": np.arange(100) + seed}
    return {"model": whole, "rng": PerRank(rank)}
