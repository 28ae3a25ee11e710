"""Find the arrays that a stored skeleton names, and check it against the tensors beside it.

Both may be hostile, and each can be valid alone: a skeleton may name an array that does not exist,
or a string made of floats. This module makes no array and imports no library, so a machine that
cannot load the states of a store can still verify them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

from holdfast.registry.errors import Malformed
from holdfast.registry.pytree.encoding import MAX_DEPTH
from holdfast.registry.pytree.paths import Trail, clip, component_path, segment
from holdfast.registry.values import ITEM_SIZES, Budget, Json

#: Tag of an array -> the type that it is rebuilt as.
_KINDS = {"t": "torch", "n": "numpy", "nt": "numpy", "B": "bytes", "BA": "bytes", "S": "str"}

#: Tags of arrays: the payload is the number of one, or begins with it.
ARRAY_TAGS = frozenset(_KINDS)

_TENSORS = frozenset({"t", "n", "nt"})

#: Tags of sparse tensors, whose parts are tensors.
_SPARSE = frozenset({"coo", "csr", "csc", "bsr", "bsc"})

Children = Iterable[tuple[Json, Any]]


def leaf_kinds(skeleton: Json) -> dict[int, str]:
    """Return, by number, the type of each array: `torch`, `numpy`, `bytes` or `str`."""
    return {index: _KINDS[tag] for index, tag, _, _ in walk("", skeleton)}


def array_paths(name: str, skeleton: Json) -> dict[int, tuple[str, str]]:
    """Return, by number, path and type of the tensors and arrays of component `name`."""
    return {
        index: (_text(above, step), _KINDS[tag])
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
    return {index: _text(above, step) for index, _, above, step in walk(name, skeleton, budget)}


def walk(
    name: str, skeleton: Json, budget: Budget | None = None
) -> Iterator[tuple[int, str, Trail, Json]]:
    """Yield number and tag of every array of component `name`, in order, and where it is.

    Its path is that of a container and the key in it, or `_SAME`. It is spelled, and counted, when
    somebody asks for its text.
    """
    expected = 0
    path, tag, payload = Trail(component_path(name), None, budget), "", skeleton
    # The nodes of each container around the present one that are still to come.
    levels = [(path, tag, payload, iter([(_SAME, skeleton)]))]
    while levels:
        path, tag, payload, nodes = levels[-1]
        try:
            for key, node in nodes:
                if type(node) is list:
                    within, inner = "", node
                elif type(node) is not dict:
                    continue
                elif len(node) == 1:
                    [(within, inner)] = node.items()
                else:
                    raise _malformed(_at(path, key), "one key", f"{len(node)} keys")
                if within in _KINDS:
                    has_unit = within == "nt" and type(inner) is list and inner
                    index = inner[0] if has_unit else inner
                    if type(index) is not int or index != expected:
                        raise _malformed(_at(path, key), f"array {expected}", clip(index))
                    expected += 1
                    yield index, within, path, key
                elif within in _CHILDREN:
                    path, tag, payload = _at(path, key), within, inner
                    if len(levels) >= MAX_DEPTH:
                        raise _malformed(path, f"at most {MAX_DEPTH} levels", "more")
                    levels.append((path, tag, payload, iter(_CHILDREN[tag](payload))))
                    break
            else:
                levels.pop()
        except (TypeError, ValueError, LookupError) as error:
            raise _malformed(path, f"the payload of tag {tag!r}", clip(payload)) from error


#: Stands for the key of a node that has the path of its container.
_SAME: Any = object()


def _at(above: Trail, key: Json) -> Trail:
    return above if key is _SAME else above / segment(key)


def _text(above: Trail, key: Json) -> str:
    return str(above) if key is _SAME else above.item(segment(key))


def _malformed(path: Trail, expected: str, found: str) -> Malformed:
    return Malformed("bad node in a skeleton", where=path, expected=expected, found=found)


def _pairs(payload: Children) -> Children:
    return payload


def _items(payload: Any) -> Children:
    if type(payload) is not list:
        raise TypeError("not a list")
    return enumerate(payload)


def _parts(*names: str) -> Callable[[Any], Children]:
    # The parts are the last nodes of the payload, after shape and flags.
    return lambda payload: zip(names, payload[-len(names) :], strict=True)


#: Tag -> the nodes in a payload that may hold arrays, with their keys.
_CHILDREN: dict[str, Callable[[Any], Children]] = {
    "": _items,
    "d": _pairs,
    "od": _pairs,
    "counter": _pairs,
    "sd": lambda payload: _pairs(payload[0]),
    "dd": lambda payload: _pairs(payload[1]),
    "tu": _items,
    "deque": lambda payload: _items(payload[1]),
    "ad": lambda payload: [(_SAME, payload[1])],
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
