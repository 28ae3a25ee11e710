"""Values of single ranks, such as their random generators, stored under the rank's number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.pytree import ARRAY_TAGS, ArrayLeaf, FlatComponent
from holdfast.registry.saving.collective.talk import join, split
from holdfast.registry.values import Json

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


def encode(value: PerRank) -> bytes:
    """Return a copy of a value as a message."""
    [part] = pytree.flatten({_VALUE: value.value}).components
    leaves = [{"dtype": leaf.dtype, "shape": leaf.shape} for leaf in part.leaves]
    return join(
        {"skeleton": part.skeleton, "leaves": leaves},
        *(bytes(leaf.buffer()) for leaf in part.leaves),
    )


def merge(part: FlatComponent, values: Sequence[Sequence[bytes]]) -> FlatComponent:
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
