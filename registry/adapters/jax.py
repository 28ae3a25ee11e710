"""Pytrees of jax as plain states: named tuples, dataclasses, optax, flax, equinox, typed keys.

No type is stored by its name, so loading imports nothing: `pack` stores the data of a pytree as
dicts, lists and arrays, and `restore` takes everything else from a pytree of the same structure.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import numpy as np

from holdfast.registry.errors import IncompatibleState

__all__ = ["pack", "restore"]

#: Integers of fewer than 8 bits -> the type that stores them.
_NARROW = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
#: Type of Python -> the types of elements that may stand for it.
_NUMBERS = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
_HINT = "Restore into a pytree that was made as the saved one was."


def pack(tree: Any) -> Any:
    """Return the data of a pytree as plain values, which `Run.save` stores.

    Dicts, lists and tuples stay. Named tuples, dataclasses and every type that is registered with
    jax become dicts by field or key. A typed key of `jax.random` becomes its data and the name of
    its algorithm. Functions and static fields are skipped: `restore` takes them from its target.
    Arrays are not copied.
    """
    node = _node_of(tree)
    if node is None:
        return _packed_leaf(tree)
    children, _ = node
    if type(tree) in (list, tuple):
        return type(tree)(None if _is_function(child) else pack(child) for child in tree)
    return {name: pack(child) for name, child in children.items() if not _is_function(child)}


def restore(target: Any, stored: Any) -> Any:
    """Return a pytree with the structure of a target and the data that was stored.

    Arrays of jax are placed as those of the target are; `jax.ShapeDtypeStruct`, as `jax.eval_shape`
    returns it, stands for an array. Neither argument is changed.
    """
    return _restored(target, stored, "")


def _node_of(value: Any) -> tuple[dict[Any, Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a container by field, key or index, and how to make it of new ones.

    None for a leaf. Only one level is taken apart.
    """
    if value is None:
        return None
    if type(value) in (list, tuple):
        return dict(enumerate(value)), type(value)
    if type(value) is dict:  # jax would sort its keys
        return value, lambda made: dict(zip(value, made, strict=True))
    pairs, form = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)
    if [path for path, _ in pairs] != [()]:
        names = [_name_of(path[0]) for path, _ in pairs]
        keys = names if len(set(names)) == len(names) else range(len(names))
        return dict(zip(keys, (child for _, child in pairs), strict=True)), form.unflatten
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_array(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return fields, lambda made: _with_fields(value, zip(fields, made, strict=True))
    return None


def _name_of(key: Any) -> Any:
    """Return the field, key or index that jax names a child by."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _with_fields(value: Any, fields: Iterable[tuple[str, Any]]) -> Any:
    """Return a copy of a dataclass that is not registered, with other values."""
    made = copy.copy(value)
    for name, one in fields:
        object.__setattr__(made, name, one)
    return made


def _is_function(value: Any) -> bool:
    """Return whether a value is a function of Python or of jax that holds no data."""
    made_by_jax = callable(value) and type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
    return inspect.isroutine(value) or (made_by_jax and jax.tree_util.all_leaves([value]))


def _is_key(value: Any) -> bool:
    return _is_array(value) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _packed_leaf(value: Any) -> Any:
    if _is_key(value):
        impl = str(jax.random.key_impl(value))
        return {"prng_key": impl, "data": jax.random.key_data(value)}
    if _is_array(value) and str(value.dtype) in _NARROW:
        return value.astype(_NARROW[str(value.dtype)])
    return value


def _restored(target: Any, stored: Any, path: str) -> Any:
    node = _node_of(target)
    if node is None:
        return _restored_leaf(target, stored, path)
    kind = type(target) if type(target) in (list, tuple) else dict
    if not isinstance(stored, kind):
        _refuse(path, "a part of another type", _shown(target), _shown(stored))
    found = stored if kind is dict else dict(enumerate(stored))
    children, rebuild = node
    for name in found:
        if name not in children:
            _refuse(f"{path}/{name}", "the target has no such part", "nothing", _shown(found[name]))
    made = []
    for name, child in children.items():
        if _is_function(child):
            made.append(child)
        elif name in found:
            made.append(_restored(child, found[name], f"{path}/{name}"))
        else:
            _refuse(f"{path}/{name}", "the stored state has no such part", _shown(child), "nothing")
    return rebuild(made)


def _restored_leaf(target: Any, stored: Any, path: str) -> Any:
    if _is_key(target):
        return _placed(target, _key_of(target, stored, path))
    if not _is_array(target):
        return _restored_value(target, stored, path)
    wanted = target.dtype
    is_widened = _is_array(stored) and str(stored.dtype) == _NARROW.get(str(wanted))
    if is_widened or _is_number_of(type(stored), wanted):
        stored = _cast(np.asarray(stored), wanted)
    if not _is_array(stored) or (stored.shape, stored.dtype) != (target.shape, wanted):
        _refuse(path, "an array of another shape or type", _shown(target), _shown(stored))
    made = stored if isinstance(target, np.ndarray) else _placed(target, stored)
    if made.dtype != wanted:
        _refuse(path, "jax makes no arrays of 64 bits: set jax_enable_x64", wanted, made.dtype)
    return made


def _is_number_of(kind: type, dtype: Any) -> bool:
    return kind in _NUMBERS and bool(jax.dtypes.issubdtype(dtype, _NUMBERS[kind]))


def _cast(array: Any, dtype: Any) -> Any:
    """Return an array as one of another type; integers that do not fit stay as they are."""
    if array.dtype.kind == "O":  # beyond 64 bits
        return array
    cast = array.astype(dtype)
    is_exact = array.dtype.kind not in "iu" or (cast.astype(array.dtype) == array).all()
    return cast if is_exact else array


def _restored_value(target: Any, stored: Any, path: str) -> Any:
    """Return a value that is no array; a jitted step has made arrays of counters."""
    if _is_array(stored) and stored.shape == () and _is_number_of(type(target), stored.dtype):
        return stored.item()
    if type(stored) is not type(target):
        _refuse(path, "a value of another type", _shown(target), _shown(stored))
    return stored


def _key_of(target: Any, stored: Any, path: str) -> Any:
    if not isinstance(stored, dict) or stored.keys() != {"prng_key", "data"}:
        _refuse(path, "not a key of jax.random", _shown(target), _shown(stored))
    try:
        key = jax.random.wrap_key_data(stored["data"], impl=stored["prng_key"])
    except (TypeError, ValueError) as error:
        _refuse(path, "not a key of jax.random", _shown(target), str(error))
    if (key.shape, key.dtype) != (target.shape, target.dtype):
        _refuse(path, "a key of another shape or algorithm", _shown(target), _shown(key))
    return key


def _placed(target: Any, array: Any) -> Any:
    """Return an array on the devices of the target, weakly typed if that is."""
    if getattr(target, "weak_type", False):
        # Only a number of Python begins a weak type; setting elements keeps it.
        weak = jax.numpy.asarray(target.dtype.type(0).item())
        array = jax.numpy.broadcast_to(weak, target.shape).at[...].set(array)
    is_placed = getattr(target, "committed", target.sharding is not None)
    return jax.device_put(array, target.sharding if is_placed else None)


def _shown(value: Any) -> str:
    if _is_array(value):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse(path: str, what: str, expected: str, found: str) -> NoReturn:
    where = path.removeprefix("/") or "the stored state"
    raise IncompatibleState(what, where=where, expected=expected, found=found, hint=_HINT)
