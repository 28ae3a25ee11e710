"""One rank's state, flattened: a sharded tensor becomes a leaf with its box."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.objects import INLINE_BYTES
from holdfast.registry.pytree import ArrayLeaf, Encoder, FlatState, Handler, Link
from holdfast.registry.saving.collective import per_rank
from holdfast.registry.saving.collective.per_rank import PerRank
from holdfast.registry.saving.collective.structure import Ints, Structure
from holdfast.registry.values import Json, item_size

#: The module that needs torch; by module and class of the library, the function that encodes it.
_TORCH_SHARDS = "holdfast.registry.saving.collective.torch_shards"
_SHARDED = {
    "torch.distributed.tensor": ("DTensor", "encode_dtensor"),
    "torch.distributed._shard.sharded_tensor.api": ("ShardedTensor", "encode_sharded_tensor"),
}
#: Encoders of the types of sharded tensors seen so far.
_ENCODERS: dict[type, Handler] = {}


class ShardLeaf(ArrayLeaf):
    """A rank's part of a sharded tensor; `shape` and `nbytes` describe the part."""

    __slots__ = ("is_copied", "offset", "whole")
    whole: tuple[int, ...]  # the shape of the tensor
    offset: tuple[int, ...]  # the begin of the part in the tensor, on each axis
    is_copied: bool  # whether other ranks have the same part

    @classmethod
    def of(
        cls, leaf: ArrayLeaf, whole: tuple[int, ...], offset: tuple[int, ...], *, is_copied: bool
    ) -> ShardLeaf:
        """Return the leaf of a part."""
        made = cls(
            leaf.dtype, leaf.shape, leaf.nbytes, leaf._source, leaf._open, leaf._link, leaf.is_ours
        )
        made.whole, made.offset, made.is_copied = whole, offset, is_copied
        return made


@dataclass(frozen=True)
class RankState:
    """One rank's state, flattened."""

    flat: FlatState  # its components; sharded tensors are `ShardLeaf`s
    own: tuple[bytes, ...]  # the rank's `PerRank` values, as messages


def flatten(state: object, known: list[Any] | None = None) -> RankState:
    """Split a state of one rank, as `pytree.flatten` does."""
    own: list[bytes] = []
    before, now = iter(known or ()), list[Any]()
    flat = pytree.flatten(state, lambda: ShardEncoder(own, before, now))
    if known is not None:
        known[:] = now
    return RankState(flat, tuple(own))


class ShardEncoder(Encoder):
    """An encoder that also takes sharded tensors and `PerRank` values.

    Attributes:
        before: The shards of an earlier state that were not reached yet.
        shards: The shards of this state so far.
    """

    __slots__ = ("_own", "before", "shards")

    def __init__(self, own: list[bytes], before: Iterator[Any], shards: list[Any]) -> None:
        super().__init__()
        self._own, self.before, self.shards = own, before, shards

    def other(self, value: Any, link: Link, depth: int) -> Json:
        """Encode a value of none of the known types."""
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, link, depth)
        if type(value) is PerRank:
            if self.role:
                self.refuse(link, f"a PerRank cannot be part of {self.role}", "Move it to a dict.")
            self._own.append(per_rank.encode(value))
            return {per_rank.TAG: len(self._own) - 1}
        for module, (kind, encoder) in _SHARDED.items():
            library = sys.modules.get(module)
            if library is not None and isinstance(value, getattr(library, kind)):
                found: Handler = getattr(importlib.import_module(_TORCH_SHARDS), encoder)
                _ENCODERS[type(value)] = found
                return found(self, value, link, depth)
        return super().other(value, link, depth)


def whole_shape(leaf: ArrayLeaf) -> tuple[int, ...]:
    """Return the shape of a leaf's whole tensor."""
    return leaf.whole if isinstance(leaf, ShardLeaf) else leaf.shape


def whole_bytes(leaf: ArrayLeaf) -> int:
    """Return the size of a leaf's whole tensor, in bytes."""
    return int(np.prod(whole_shape(leaf), dtype=np.int64)) * item_size(leaf.dtype)


class Layout:
    """The tensors of a rank's state that are cut into chunks, and its boxes of them.

    Attributes:
        leaves: The leaves of those tensors, in order.
        inline: The sharded leaves whose tensors are too small to be cut.
        structure: Their types and shapes.
        rows: Tensor, offset and extent of each sharded leaf.
    """

    def __init__(self, flat: FlatState) -> None:
        leaves = [leaf for part in flat.components for leaf in part.leaves]
        cut = [leaf for leaf in leaves if whole_bytes(leaf) > INLINE_BYTES]
        self.leaves: list[ArrayLeaf] = cut
        self.inline = [
            leaf
            for leaf in leaves
            if isinstance(leaf, ShardLeaf) and 0 < whole_bytes(leaf) <= INLINE_BYTES
        ]
        self.structure = Structure(
            tuple(str(leaf.dtype) for leaf in cut), tuple(whole_shape(leaf) for leaf in cut)
        )
        rows = [
            [number, *self._padded(leaf.offset, 0), *self._padded(leaf.shape, 1)]
            for number, leaf in enumerate(cut)
            if isinstance(leaf, ShardLeaf)
        ]
        self.rows: Ints = np.array(rows, np.int64).reshape(-1, 1 + 2 * self.structure.axes)

    def _padded(self, lengths: tuple[int, ...], fill: int) -> list[int]:
        return self.structure.padded(lengths, fill)

    def memory(self, tensor: int) -> tuple[Any, Ints]:
        """Return the bytes of this rank's box of a tensor, and the begin of the box.

        The bytes have the axes of the box, and one more for the bytes of an element.
        """
        leaf = self.leaves[tensor]
        offset = leaf.offset if isinstance(leaf, ShardLeaf) else (0,) * len(leaf.shape)
        flat = np.frombuffer(leaf.buffer(), np.uint8)
        shape = [*self._padded(leaf.shape, 1), item_size(leaf.dtype)]
        return flat.reshape(shape), np.array(self._padded(offset, 0), np.int64)
