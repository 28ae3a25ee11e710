"""One rank's state, flattened: a sharded tensor becomes a leaf with its box.

Values of single ranks, such as their random generators, are stored under the rank's number.
Tensors, chunks and parts of ranks are boxes. All boxes have as many axes as the tensor with the
most axes; added axes, of length 1, come first.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdfast.backends import Buffer
from holdfast.registry import pytree
from holdfast.registry.objects import INLINE_BYTES, grid
from holdfast.registry.pytree import (
    ARRAY_TAGS,
    ArrayLeaf,
    Encoder,
    FlatComponent,
    FlatState,
    Handler,
    Link,
    NamedLeaf,
)
from holdfast.registry.saving.collective.talk import join, split
from holdfast.registry.values import Json, item_size

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

    def table(self, boxes: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> Ints:
        """Return boxes as rows: tensor, offset and extent; each box is given by these three."""
        rows = [
            [tensor, *self.padded(offset, 0), *self.padded(extent, 1)]
            for tensor, offset, extent in boxes
        ]
        return np.array(rows, np.int64).reshape(-1, 1 + 2 * self.axes)

    def memory(
        self, tensor: int, data: Buffer, offset: Sequence[int], extent: Sequence[int]
    ) -> tuple[Any, Ints]:
        """Return the bytes of a box of a tensor as an array, and the begin of the box.

        The array has the axes of the box, and one more for the bytes of an element.
        """
        shape = [*self.padded(extent, 1), item_size(self.dtypes[tensor])]
        box = np.frombuffer(data, np.uint8).reshape(shape)
        return box, np.array(self.padded(offset, 0), np.int64)

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
    """An encoder that also takes sharded tensors and `PerRank` values."""

    __slots__ = ("_own", "before", "shards")

    def __init__(self, own: list[bytes], before: Iterator[Any], shards: list[Any]) -> None:
        super().__init__()
        self._own = own
        self.before = before  # the shards of an earlier state that were not reached yet
        self.shards = shards  # the shards of this state so far

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
    return prod(whole_shape(leaf)) * item_size(leaf.dtype)


def whole_leaf(leaf: ArrayLeaf) -> NamedLeaf:
    """Return a leaf's whole tensor, without its bytes."""
    return NamedLeaf(str(leaf.dtype), whole_shape(leaf), whole_bytes(leaf), leaf.path)


def box_begin(leaf: ArrayLeaf) -> tuple[int, ...]:
    """Return the begin of this rank's part in a leaf's tensor, on each axis."""
    return leaf.offset if isinstance(leaf, ShardLeaf) else (0,) * len(leaf.shape)


class Layout:
    """The tensors of a rank's state that are cut into chunks, and its boxes of them."""

    def __init__(self, flat: FlatState) -> None:
        cut = [leaf for leaf in flat.leaves if whole_bytes(leaf) > INLINE_BYTES]
        self.leaves: list[ArrayLeaf] = cut  # the leaves of those tensors, in order
        #: The sharded leaves whose tensors are too small to be cut.
        self.inline = [
            leaf
            for leaf in flat.leaves
            if isinstance(leaf, ShardLeaf) and 0 < whole_bytes(leaf) <= INLINE_BYTES
        ]
        #: Their types and shapes.
        self.structure = Structure(
            tuple(str(leaf.dtype) for leaf in cut), tuple(whole_shape(leaf) for leaf in cut)
        )
        #: Tensor, offset and extent of each sharded leaf.
        self.rows = self.structure.table(
            (number, leaf.offset, leaf.shape)
            for number, leaf in enumerate(cut)
            if isinstance(leaf, ShardLeaf)
        )

    def memory(self, tensor: int) -> tuple[Any, Ints]:
        """Return the bytes of this rank's box of a tensor, and the begin of the box."""
        leaf = self.leaves[tensor]
        return self.structure.memory(tensor, leaf.buffer(), box_begin(leaf), leaf.shape)


def encode_value(value: PerRank) -> bytes:
    """Return a copy of a value as a message."""
    [component] = pytree.flatten({_VALUE: value.value}).components
    leaves = [{"dtype": leaf.dtype, "shape": leaf.shape} for leaf in component.leaves]
    return join(
        {"skeleton": component.skeleton, "leaves": leaves},
        *(bytes(leaf.buffer()) for leaf in component.leaves),
    )


def merge_values(component: FlatComponent, values: Sequence[Sequence[bytes]]) -> FlatComponent:
    """Return a component whose `PerRank` values are replaced by those of all ranks."""
    if f'"{TAG}"'.encode() not in json.dumps(component.skeleton).encode():
        return component
    merging = _Merging(component, values)
    skeleton = merging.node(component.skeleton)
    return FlatComponent(component.name, skeleton, tuple(merging.leaves))


class _Merging:
    """The merging of one component: arrays are numbered in the order of the new skeleton."""

    def __init__(self, component: FlatComponent, values: Sequence[Sequence[bytes]]) -> None:
        self._values = values
        self._leaves: Sequence[ArrayLeaf] = component.leaves
        self._where = component.name
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
