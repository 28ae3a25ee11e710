"""Walk, rebuild and copy the live values of a state.

Paths are spelled as in `ArrayLeaf.path`, for arrays and plain values alike. The walk goes into
dicts, lists and tuples; everything else is a leaf, and so is an empty container.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.pytree import containers, libraries, refusals, scalars, tensor_bytes  # noqa: F401 - they register codecs
from holdfast.registry.pytree.arrays import describe
from holdfast.registry.pytree.encoding import Encoder, has_state_dict, state_dict_of
from holdfast.registry.pytree.paths import OddKey, Trail, component_path, segment
from holdfast.registry.values import FLOATING

#: `visit` returns this for a leaf to drop.
DROP = object()

_DICTS = (dict, OrderedDict, defaultdict)


def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a component with its path; objects are replaced by `state_dict()`."""
    yield from _walk(Trail(component_path(name)), value)


def rebuild(name: str, value: Any, visit: Callable[[str, Any], Any]) -> Any:
    """Return a component with each leaf replaced by the result of `visit(path, leaf)`.

    Containers are new and of the same types. A container that becomes empty is dropped too. Returns
    `DROP` if nothing is left.
    """
    return _rebuild(Trail(component_path(name)), value, visit)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or an array."""
    return refusals.is_tensor_like(leaf) or refusals.is_numpy_array(leaf)


def is_zero(leaf: Any) -> bool:
    """Return whether a leaf is the number zero or an array of zeros; NaN is not zero."""
    if refusals.is_tensor_like(leaf):
        plain = leaf.detach()
        # The smallest types have no comparison; float32 rounds none of their values to 0.
        small = plain.is_floating_point() and plain.element_size() < 4
        return not bool(((plain.float() if small else plain) != 0).any())
    if refusals.is_numpy_array(leaf):
        return not bool((leaf != 0).any())
    return isinstance(leaf, Number) and not leaf  # NaN is truthy, -0.0 is not


def frozen(leaf: Any, dtype: str | None = None) -> Any:
    """Return a copy of a leaf that shares no memory with it and is part of no autograd graph."""
    if not is_array(leaf):
        return copy.deepcopy(leaf)
    name = describe(leaf)[0]
    wanted = dtype if dtype is not None and name in FLOATING else name
    if refusals.is_tensor_like(leaf):
        torch_dtype = libraries.torch_wrapper().ALL_DTYPES[wanted]
        return leaf.detach().to(dtype=torch_dtype, copy=True)
    if wanted == name:  # dates have a dtype of their own
        return leaf.copy()
    return leaf.astype(libraries.numpy_wrapper().dtype_named(wanted))


def _walk(path: Trail, value: Any) -> Iterator[tuple[str, Any]]:
    if has_state_dict(value):
        value = state_dict_of(value, str(path))
    children = _children(value)
    if not children:
        yield str(path), value
    for _, step, child in children:
        yield from _walk(path / step, child)


def _rebuild(path: Trail, value: Any, visit: Callable[[str, Any], Any]) -> Any:
    children = _children(value)
    if not children:
        return visit(str(path), value)
    made = [(key, _rebuild(path / step, child, visit)) for key, step, child in children]
    kept = [(key, child) for key, child in made if child is not DROP]
    if not kept:
        return DROP
    if type(value) in _DICTS:
        # A copy keeps the factory of a defaultdict and the metadata of a state_dict.
        rebuilt = copy.copy(value)
        rebuilt.clear()
        rebuilt.update(kept)
        return rebuilt
    if len(kept) < len(made):
        raise IncompatibleState(
            "some items of a list would be dropped and some kept",
            where=path,
            expected="a pattern that matches all of them or none",
            hint="Keep the items that change in a dict of their own.",
        )
    return type(value)(child for _, child in kept)


def _children(value: Any) -> list[tuple[Any, str, Any]]:
    """Return key, step of the path and value of each item of a container; none for a leaf."""
    if type(value) in _DICTS:
        return [(key, _step(key), child) for key, child in value.items()]
    if type(value) in (list, tuple):
        return [(index, str(index), child) for index, child in enumerate(value)]
    return []


def _step(key: Any) -> str:
    if type(key) is str or type(key) is int:
        return segment(key)
    _, step = Encoder().key(key, (None, ""), 0)
    return step.text if type(step) is OddKey else segment(step)
