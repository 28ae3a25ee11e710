"""Find the arrays that a stored skeleton names, and check it against the tensors beside it.

Both may be hostile, and each can be valid alone: a skeleton may name an array that does not exist,
or a string made of floats. This module makes no array and imports no library, so a machine that
cannot load the states of a store can still verify them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

from holdfast.registry.errors import Malformed
from holdfast.registry.pytree.encoding import MAX_DEPTH
from holdfast.registry.pytree.paths import Trail, clip, component, segment
from holdfast.registry.values import ITEM_SIZES, Budget, Json

#: Tag of an array -> the type that it is rebuilt as.
_KINDS = {"t": "torch", "n": "numpy", "nt": "numpy", "B": "bytes", "BA": "bytes", "S": "str"}

#: Tags of arrays: the payload is the number of one, or begins with it.
ARRAY_TAGS = frozenset(_KINDS)

_TENSORS = frozenset({"t", "n", "nt"})

#: Tags of sparse tensors, whose parts are tensors.
_SPARSE = frozenset({"coo", "csr", "csc", "bsr", "bsc"})

Children = Sequence[tuple[str, Any]]


def leaf_kinds(skeleton: Json) -> dict[int, str]:
    """Return, by number, the type of each array: `torch`, `numpy`, `bytes` or `str`."""
    return {index: _KINDS[tag] for index, tag, _, _ in walk("", skeleton)}


def array_paths(name: str, skeleton: Json) -> dict[int, tuple[str, str]]:
    """Return, by number, path and type of the tensors and arrays of component `name`."""
    return {
        index: (above.item(step) if step else str(above), _KINDS[tag])
        for index, tag, above, step in walk(name, skeleton)
        if tag in _TENSORS
    }


def portable_kinds(skeleton: Json) -> dict[int, str]:
    """Return the kinds like `leaf_kinds`, but `tensor` where a tensor's bytes can do without torch.

    Only torch can put sparse tensors together: a component with one keeps `torch`.
    """
    kinds = leaf_kinds(skeleton)
    if has_tags(skeleton, _SPARSE):
        return kinds
    return {index: "tensor" if kind == "torch" else kind for index, kind in kinds.items()}


def has_tags(skeleton: Json, tags: AbstractSet[str]) -> bool:
    """Return whether a skeleton has a node with one of these tags."""
    stack: list[Json] = [skeleton]
    while stack:
        node = stack.pop()
        if type(node) is dict:
            if not tags.isdisjoint(node):
                return True
            stack += node.values()
        elif type(node) is list:
            stack += node
    return False


def leaf_paths(name: str, skeleton: Json, budget: Budget | None = None) -> dict[int, str]:
    """Return, by number, the path of each array of component `name`, as `ArrayLeaf.path` does.

    The budget counts their characters; without it they are within the bound of a record.
    """
    return {
        index: above.item(step) if step else str(above)
        for index, _, above, step in walk(name, skeleton, budget)
    }


def walk(
    name: str, skeleton: Json, budget: Budget | None = None
) -> Iterator[tuple[int, str, Trail, str]]:
    """Yield number and tag of every array of component `name`, in order, and where it is.

    Its path is that of a container and a step from there, which is empty for the same path. It is
    spelled, and counted, when somebody asks for its text.
    """
    expected = 0
    top = Trail(component(name), None, budget)
    # Children are pushed in reverse, so that arrays come in the order of their numbers.
    stack: list[tuple[Trail, str, Any, int]] = [(top, "", skeleton, 1)]
    while stack:
        above, step, node, depth = stack.pop()
        if type(node) is list:
            tag, payload = "", node
        elif type(node) is not dict:
            continue
        elif len(node) == 1:
            [(tag, payload)] = node.items()
        else:
            raise _malformed(_at(above, step), "one key", f"{len(node)} keys")
        if tag in _KINDS:
            index = payload[0] if tag == "nt" and type(payload) is list and payload else payload
            if type(index) is not int or index != expected:
                raise _malformed(_at(above, step), f"array {expected}", clip(index))
            expected += 1
            yield index, tag, above, step
            continue
        children = _CHILDREN.get(tag)
        if children is None:
            continue
        path = _at(above, step)
        if depth >= MAX_DEPTH:
            raise _malformed(path, f"at most {MAX_DEPTH} levels", "more")
        depth += 1
        try:
            stack += [(path, step, child, depth) for step, child in reversed(children(payload))]
        except (TypeError, ValueError, LookupError) as error:
            raise _malformed(path, f"the payload of tag {tag!r}", clip(payload)) from error


def _at(above: Trail, step: str) -> Trail:
    return above / step if step else above


def _malformed(path: Trail, expected: str, found: str) -> Malformed:
    return Malformed("bad node in a skeleton", where=path, expected=expected, found=found)


def _pairs(payload: Any) -> Children:
    return [(segment(key), child) for key, child in payload]


def _items(payload: Any) -> Children:
    if type(payload) is not list:
        raise TypeError("not a list")
    return [(str(index), child) for index, child in enumerate(payload)]


def _parts(*names: str) -> Callable[[Any], Children]:
    # The parts are the last nodes of the payload, after shape and flags.
    return lambda payload: list(zip(names, payload[-len(names) :], strict=True))


#: Tag -> the nodes in a payload that may hold arrays, with their steps (empty: the same path).
_CHILDREN: dict[str, Callable[[Any], Children]] = {
    "": _items,
    "d": _pairs,
    "od": _pairs,
    "counter": _pairs,
    "sd": lambda payload: _pairs(payload[0]),
    "dd": lambda payload: _pairs(payload[1]),
    "tu": _items,
    "deque": lambda payload: _items(payload[1]),
    "ad": lambda payload: [("", payload[1])],
    "coo": _parts("indices", "values"),
    "csr": _parts("crow_indices", "col_indices", "values"),
    "csc": _parts("ccol_indices", "row_indices", "values"),
    "bsr": _parts("crow_indices", "col_indices", "values"),
    "bsc": _parts("ccol_indices", "row_indices", "values"),
}


_LIMIT = 2**63


class _Stored(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_arrays(name: str, skeleton: Json, tensors: Sequence[_Stored]) -> None:
    """Check that a skeleton fits the tensors that are stored with it."""
    count = 0
    for index, tag, above, step in walk(name, skeleton):
        count += 1
        if index < len(tensors) and (tag != "t" or 0 in tensors[index].shape):
            _check(_at(above, step), tag, tensors[index].dtype, tensors[index].shape)
    if count != len(tensors):
        raise Malformed(
            "the skeleton does not fit the tensors of its component",
            where=name,
            expected=f"{len(tensors)} tensors",
            found=count,
        )


def _check(path: Trail, tag: str, dtype: str, shape: tuple[int, ...]) -> None:
    fits = {"t": True, "n": True, "nt": dtype == "int64"}.get(tag)
    if fits is None:
        fits = dtype == "uint8" and len(shape) == 1
    if not fits or (0 in shape and not _is_possible(tag, dtype, shape)):
        raise Malformed(
            "a tensor does not fit its type in the skeleton",
            where=path,
            expected=_EXPECTED[tag],
            found=f"{dtype}{list(shape)}",
        )


def _is_possible(tag: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a library can make an empty array of a shape: some lengths overflow.

    The manifest bounds the bytes of arrays that are not empty.
    """
    if tag != "t":
        return prod(filter(None, shape)) * ITEM_SIZES[dtype] < _LIMIT
    strides = accumulate((max(length, 1) for length in reversed(shape[1:])), mul, initial=1)
    # torch counts elements in unsigned integers, and strides in signed ones.
    return max(accumulate(shape, mul)) < 2 * _LIMIT and max(strides) < _LIMIT


_LENGTHS = "and of lengths that do not overflow"
_EXPECTED = {
    "t": f"a tensor {_LENGTHS}",
    "n": f"an array {_LENGTHS}",
    "nt": f"an array of int64 {_LENGTHS}",
    **dict.fromkeys(("B", "BA", "S"), "uint8 with one axis"),
}
