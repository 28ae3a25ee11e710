"""Write a delta: the weights that changed since a base file, and the other state of their regions.

Its content is a pickle that torch can load, written opcode by opcode: nothing is pickled. Nothing
is lost in silence: a region that changed in anything but weights and states is written whole, and
other changes of a brain are in `metadata_changes`, which only Holdfast reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.formats.content import check_dtype
from holdfast.registry.formats.thalia.container import ASIDE
from holdfast.registry.formats.thalia.delta import REMOVED, STATES
from holdfast.registry.formats.thalia.framing import DELTA_MAGIC
from holdfast.registry.formats.thalia.precision import cast
from holdfast.registry.formats.thalia.tensors import as_array, dump
from holdfast.registry.pytree import Adapted, TensorBytes, Trail

#: Up to this share of changed elements a weight is stored as coordinates and differences.
_SPARSE_SHARE: Final = 0.05
_STORAGES: Final = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
}


def changes(
    state: Mapping[str, Any], narrowed: Mapping[str, Any], base: Mapping[str, Any], threshold: float
) -> dict[str, Any]:
    """Return the content of a delta."""
    found: dict[str, Any] = {}
    removed: list[list[str]] = []
    for kind, states in STATES.items():
        parts, old = state.get(kind, {}), base.get(kind, {})
        removed += [[kind, name] for name in old if name not in parts]
        made = {
            name: _change(
                part, narrowed[kind][name], old.get(name), states, threshold, f"{kind}/{name}"
            )
            for name, part in parts.items()
        }
        found[kind] = {name: change for name, change in made.items() if change is not None}
        for name, change in found[kind].items():
            if change.get("type") != "new":
                gone = [key for key in old[name] if key not in parts[name]]
                removed += [[kind, name, key] for key in gone]
    aside: dict[str, Any] = {}
    for key in ASIDE[:-1]:
        value, before = state.get(key), base.get(key)
        if value is None and before:
            removed.append([key])
        if value is not None and not same(value, before):
            aside[key] = value
    found["metadata_changes"] = {**aside, REMOVED: removed} if removed else aside
    found["training_steps"] = state.get("training_steps", 0)
    return found


def _change(
    part: Any, slim: Any, old: Any, states: tuple[str, ...], threshold: float, where: str
) -> dict[str, Any] | None:
    """Return the change of a region: of its weights and states, or the whole of it."""
    if _is_old(part, slim, old):
        return None
    if not _is_change(part, slim, old, states):
        return {"type": "new", "state": slim}
    given, olds = part.get("weights") or {}, old.get("weights") or {}
    weights = {}
    for name, tensor in given.items():
        if tensor is None:
            continue
        change = _difference(
            tensor, slim["weights"][name], olds.get(name), threshold, f"{where}/weights/{name}"
        )
        if change is not None:
            weights[name] = change
    is_old = all(_is_old(part.get(key), slim.get(key), old.get(key)) for key in states)
    if not weights and is_old and part.keys() == old.keys():
        return None
    return {
        "weights": weights,
        "config": slim.get("config"),
        **{key: slim.get(key) for key in states},
    }


def _is_change(part: Any, slim: Any, old: Any, states: tuple[str, ...]) -> bool:
    """Return whether two regions differ in nothing but states, and weights that both have."""
    if not isinstance(part, dict) or not isinstance(old, dict):
        return False
    for key in {**old, **part}:
        if key not in old and (part[key] is None or part[key] == {}):
            return False  # in a delta it is like one that is absent
        if key not in ("weights", *states):
            is_old = _is_old(part.get(key), slim.get(key), old.get(key))
            if not is_old or (key in part) != (key in old):
                return False
    order = [key for key in dict.fromkeys((*old, "weights", *states)) if key in part]
    weights, olds = part.get("weights") or {}, old.get("weights") or {}
    if not isinstance(weights, dict) or not isinstance(olds, dict):
        return False
    nulls, old_nulls = ({name for name in one if one[name] is None} for one in (weights, olds))
    return (
        [*part] == order
        and [*weights][: len(olds)] == [*olds]
        and nulls == old_nulls
        and all(isinstance(one, TensorBytes) for one in weights.values() if one is not None)
    )


def _is_old(value: Any, slim: Any, old: Any) -> bool:
    """Return whether a value, or what is left of it in the narrower precision, is the old one."""
    return same(value, old) or same(slim, old)


def _difference(
    tensor: TensorBytes, slim: TensorBytes, old: Any, threshold: float, where: str
) -> dict[str, Any] | None:
    """Return how a weight changed, or nothing; what is stored has the precision of `slim`.

    A number that became NaN, or was one, has no difference; then the whole tensor is stored.
    """
    shape = list(tensor.shape)
    full = {"type": "full", "tensor": slim, "shape": shape}
    if isinstance(old, TensorBytes) and old.dtype == slim.dtype:
        tensor = slim
    if (
        not isinstance(old, TensorBytes)
        or (old.shape, old.dtype) != (tensor.shape, tensor.dtype)
        or tensor.dtype == "bool"
    ):
        return None if same(tensor, old) else full
    if bytes(tensor.data) == bytes(old.data):
        return None
    new, before = as_array(tensor), as_array(old)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = new - before
    if not np.all(np.isfinite(difference)):
        return full
    changed = np.abs(difference) > threshold
    count = int(np.count_nonzero(changed))
    if not count:
        return None if threshold else full  # only signs of zeros differ
    indices = np.argwhere(changed)
    values = difference[changed]
    is_exact = threshold > 0 or np.array_equal(before[changed] + values, new[changed])
    if not tensor.shape or count / new.size >= _SPARSE_SHARE or not is_exact:
        return full
    return {
        "type": "sparse",
        "indices": TensorBytes("int64", indices.shape, _bytes(indices.astype("<i8"))),
        "values": cast(TensorBytes(tensor.dtype, values.shape, _bytes(values)), slim.dtype, where),
        "shape": shape,
    }


def _bytes(array: Any) -> memoryview:
    return memoryview(np.ascontiguousarray(array).tobytes())


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type and in every bit."""
    if isinstance(one, TensorBytes) and isinstance(other, TensorBytes):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.data == other.data
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Adapted) and isinstance(other, Adapted):
        return one.name == other.name and same(one.plain, other.plain)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other)  # NaN is itself, and -0.0 is not 0.0
    return type(one) is type(other) and one == other


# Bytes


def encode(
    content: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    base_digest: bytes,
    base_step: int,
    step: int,
) -> bytes:
    """Return the bytes of a delta."""
    head = struct.pack("<5sI32sQQ7x", DELTA_MAGIC, 1, base_digest, base_step, step)
    pickle = bytearray(b"\x80\x04")
    _put(content, pickle, Trail(""))
    pickle += b"."
    text = dump(dict(metadata))
    return head + bytes(pickle) + struct.pack("<I", len(text)) + text


def _put(value: Any, out: bytearray, path: Trail) -> None:
    """Append the opcodes that build a value."""
    put = _WRITERS.get(type(value))
    if put is None:
        raise IncompatibleState(
            "a delta of Thalia has no form for this value", where=path, found=type(value).__name__
        )
    put(value, out, path)


def _text(value: str, out: bytearray, path: Trail) -> None:
    del path
    data = value.encode(errors="surrogatepass")
    out += b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int, out: bytearray, path: Trail) -> None:
    del path
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    out += b"\x8b" + struct.pack("<I", len(data)) + data


def _dict(value: Mapping[Any, Any], out: bytearray, path: Trail) -> None:
    out += b"}("
    for key, item in value.items():
        _put(key, out, path)
        _put(item, out, path / key)
    out += b"u"


def _items(kind: bytes, end: bytes) -> Callable[[Any, bytearray, Trail], None]:
    def put(value: Any, out: bytearray, path: Trail) -> None:
        out += kind
        for index, item in enumerate(value):
            _put(item, out, path / index)
        out += end

    return put


def _tensor(value: TensorBytes, out: bytearray, path: Trail) -> None:
    """Append a call of torch's function that rebuilds a tensor from the bytes of its storage."""
    check_dtype("a .thalia file", value.dtype, _STORAGES, path)
    strides, step = [], 1
    for length in reversed(value.shape):
        strides.append(step)
        step *= length
    storage = _storage(value)
    out += b"ctorch._utils\n_rebuild_tensor_v2\n("
    out += b"ctorch.storage\n_load_from_bytes\n" + b"B" + struct.pack("<I", len(storage)) + storage
    out += b"\x85R"
    _integer(0, out, path)
    _put(tuple(value.shape), out, path)
    _put(tuple(reversed(strides)), out, path)
    out += b"\x89ccollections\nOrderedDict\n)RtR"


def _adapted(value: Adapted, out: bytearray, path: Trail) -> None:
    """Append a class, an object of it, and its fields; nothing is looked up, here or by `delta`."""
    module, _, name = value.name.rpartition(".")
    if not module or "\n" in value.name or not isinstance(value.plain, dict):
        raise IncompatibleState(
            "a delta of Thalia keeps dataclasses under the names of their classes",
            where=path,
            expected="module.Class",
            found=repr(value.name)[:100],
        )
    out += f"c{module}\n{name}\n)".encode() + b"\x81"
    _put(value.plain, out, path)
    out += b"b"


def _storage(value: TensorBytes) -> bytes:
    """Return a storage as torch wrote it before its version 1.6: five pickles, then its bytes."""
    count = value.data.nbytes // as_array(value).itemsize
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}
    kind = _Opcodes(f"ctorch\n{_STORAGES[value.dtype]}Storage\n".encode())
    named = ("storage", kind, "0", "cpu", count, None)
    out = bytearray()
    for part in (0x1950A86A20F9469CFC6C, 1001, system, named, ["0"]):
        out += b"\x80\x02"
        _put(part, out, Trail(""))
        out += b"Q." if part is named else b"."
    return bytes(out) + struct.pack("<q", count) + bytes(value.data)


class _Opcodes(bytes):
    """Opcodes that are written as they are; no state holds such a value."""

    __slots__ = ()


_WRITERS: Final[Mapping[type, Callable[[Any, bytearray, Trail], None]]] = {
    type(None): lambda value, out, path: out.extend(b"N"),  # noqa: ARG005
    bool: lambda value, out, path: out.extend(b"\x88" if value else b"\x89"),  # noqa: ARG005
    int: _integer,
    float: lambda value, out, path: out.extend(b"G" + struct.pack(">d", value)),  # noqa: ARG005
    str: _text,
    dict: _dict,
    list: _items(b"](", b"e"),
    tuple: _items(b"(", b"t"),
    _Opcodes: lambda value, out, path: out.extend(value),  # noqa: ARG005
    TensorBytes: _tensor,
    Adapted: _adapted,
}
