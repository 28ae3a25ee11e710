"""One rank's state, flattened: a sharded tensor becomes a leaf with its box.

Values of single ranks, such as their random generators, are stored under the rank's number.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.objects import INLINE_BYTES
from holdfast.registry.pytree import (
    ARRAY_TAGS,
    ArrayLeaf,
    Encoder,
    FlatComponent,
    FlatState,
    Handler,
    Link,
)
from holdfast.registry.saving.collective.boxes import Ints, Structure
from holdfast.registry.saving.collective.talk import join, split
from holdfast.registry.values import Json, item_size

#: The module that needs torch; by module and class of the library, the function that encodes it.
_TORCH_SHARDS = "holdfast.registry.saving.collective.torch_shards"
_SHARDED = {
    "torch.distributed.tensor": ("DTensor", "encode_dtensor"),
    "torch.distributed._shard.sharded_tensor.api": ("ShardedTensor", "encode_sharded_tensor"),
}
#: Encoders of the types of sharded tensors seen so far.
_ENCODERS: dict[type, Handler] = {}


#: The tag of a `PerRank` value in a rank's skeleton; it is never stored.
TAG = "per-rank"
_VALUE = "value"


class PerRank:
    """A value that differs between ranks; stored as `{rank: value}`.

    ```python
    state = {"model": model.state_dict(), "rng": PerRank(holdfast.rng.capture())}
    run.save(state, step=step)
    ...
    holdfast.rng.restore(checkpoint.load(only="rng")["rng"][rank])
    ```

    Args:
        value: Any value that a state can hold, except sharded tensors.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


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
            self._own.append(encode_value(value))
            return {TAG: len(self._own) - 1}
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


def encode_value(value: PerRank) -> bytes:
    """Return a copy of a value as a message."""
    [part] = pytree.flatten({_VALUE: value.value}).components
    leaves = [{"dtype": leaf.dtype, "shape": leaf.shape} for leaf in part.leaves]
    return join(
        {"skeleton": part.skeleton, "leaves": leaves},
        *(bytes(leaf.buffer()) for leaf in part.leaves),
    )


def merge_values(part: FlatComponent, values: Sequence[Sequence[bytes]]) -> FlatComponent:
    """Return a component whose `PerRank` values are replaced by those of all ranks."""
    if f'"{TAG}"'.encode() not in json.dumps(part.skeleton).encode():
        return part
    merging = _Merging(part, values)
    skeleton = merging.node(part.skeleton)
    return FlatComponent(part.name, skeleton, tuple(merging.leaves), part.is_bare)


class _Merging:
    """The merging of one component: arrays are numbered in the order of the new skeleton."""

    def __init__(self, part: FlatComponent, values: Sequence[Sequence[bytes]]) -> None:
        self._values = values
        self._leaves: Sequence[ArrayLeaf] = part.leaves
        self._where = part.name
        self.leaves: list[ArrayLeaf] = []

    def node(self, node: Any) -> Json:
        if type(node) is list:
            return [self.node(item) for item in node]
        if type(node) is not dict or len(node) != 1:
            return node  # type: ignore[no-any-return]
        [(tag, payload)] = node.items()
        if tag == TAG:
            return {"d": [[rank, self._value(rank, payload)] for rank in range(len(self._values))]}
        if tag not in ARRAY_TAGS:
            return {tag: self.node(payload)}
        number = payload[0] if tag == "nt" else payload
        self.leaves.append(self._leaves[number])
        new = len(self.leaves) - 1
        return {tag: [new, *payload[1:]] if tag == "nt" else new}

    def _value(self, rank: int, number: int) -> Json:
        header, columns = split(self._values[rank][number])
        outer = self._leaves
        self._leaves = [
            _leaf(f"{self._where}/{rank}/{index}", one, column)
            for index, (one, column) in enumerate(zip(header["leaves"], columns, strict=True))
        ]
        try:
            return self.node(header["skeleton"])
        finally:
            self._leaves = outer


def _leaf(path: str, form: dict[str, Any], data: memoryview) -> ArrayLeaf:
    shape = tuple(form["shape"])
    return ArrayLeaf(
        form["dtype"], shape, len(data), data, lambda view, _: view, (None, path), is_ours=True
    )
