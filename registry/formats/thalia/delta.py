"""A delta: the changes of a state since a base file, which may be a delta itself.

Its content is a pickle; it is read by `holdfast.registry.formats.pickles`, with five names. Deltas
are lossy by design: a difference below a threshold, and what is in a region without changed
weights, was not written. The state that comes out is what Thalia's own program makes of the file.
"""

from __future__ import annotations

import copy
import math
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats.pickles import Keys, Known, read_pickle
from holdfast.registry.formats.source import beside, json_object, sha256_of, stable
from holdfast.registry.formats.state_file import FileReport, FileState, TensorHeader
from holdfast.registry.formats.thalia import container, framing
from holdfast.registry.formats.thalia.framing import DELTA_MAGIC, Body
from holdfast.registry.formats.thalia.tensors import as_array
from holdfast.registry.pytree import TensorBytes, Trail
from holdfast.registry.pytree import allocate_bytes as allocate
from holdfast.registry.values import Budget, max_record_bytes

_FORM: Final = struct.Struct("<5sI32sQQ7s")
#: The longest chain of deltas.
_MAX_CHAIN: Final = 1000
_STORAGES: Final = {
    "torch.FloatStorage": "<f4",
    "torch.DoubleStorage": "<f8",
    "torch.HalfStorage": "<f2",
    "torch.IntStorage": "<i4",
    "torch.LongStorage": "<i8",
    "torch.BoolStorage": "?",
}
_STORAGE_MAGIC: Final = 0x1950A86A20F9469CFC6C
_STORAGE_VERSION: Final = 1001
#: Bytes of memory for a value where a shared one is taken apart.
_VALUE_BYTES: Final = 100
#: Parts of a region that a delta replaces as a whole.
_REGION_STATES: Final = (
    "neuron_state",
    "learning_state",
    "oscillator_state",
    "neuromodulator_state",
)
_PATHWAY_STATES: Final = ("neuron_state", "learning_state")


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of a file."""

    base_digest: bytes  # SHA-256 of the base file, all its bytes
    base_step: int  # step of the base, 0 if that is a full file
    step: int  # step of the state
    changes: dict[str, Any]  # the changed regions and pathways
    metadata: dict[str, Any]


def read(body: Body, path: Path) -> FileState:
    """Read a delta and the files that it builds upon."""
    size, chain = body.file_bytes, [parse(body)]
    at = path
    while True:
        at = _base_path(chain[-1], at)
        # The file stays open while it is read: nobody can exchange it behind the comparison.
        with _compared_base(chain[-1], at), framing.opened(at) as base:
            if not base.is_delta:
                found = container.read(base)
                break
            chain.append(parse(base))
        if len(chain) > _MAX_CHAIN:
            raise InvalidInput(
                "the chain of deltas is too long", where=path, expected=f"at most {_MAX_CHAIN}"
            )
    state: Any = found.state
    for delta in reversed(chain):
        _apply(state, delta, path)
    state["metadata"] = chain[0].metadata
    return FileState(state, container.FORMAT, size, chain[0].metadata)


def inspect(body: Body) -> FileReport:
    """Describe a delta alone: the tensors that it holds."""
    delta = parse(body)
    tensors = {
        str(path): TensorHeader(value.dtype, value.shape)
        for path, value in _tensors(delta.changes, Trail("", None, body.budget))
    }
    header = {
        "base_hash": delta.base_digest.hex(),
        "base_step": delta.base_step,
        "current_step": delta.step,
    }
    return FileReport(container.FORMAT, body.file_bytes, tensors, delta.metadata, header)


def step_of(body: Body) -> int:
    """Return the step of a delta."""
    return parse(body).step


def problems(delta: Delta, path: Path) -> list[str]:
    """Return where the header of a delta and its metadata differ; the programs do not compare."""
    info = delta.metadata.get("delta_info")
    if not isinstance(info, dict):
        return []
    written = {
        "base_hash": delta.base_digest.hex(),
        "base_step": delta.base_step,
        "current_step": delta.step,
    }
    return [
        f"{path}: header and metadata have different values of {key}: "
        f"{value} and {str(info.get(key))[:64]}"
        for key, value in written.items()
        if info.get(key) != value
    ]


def _tensors(value: Any, path: Trail) -> Iterator[tuple[Trail, TensorBytes]]:
    """Yield the tensors in a value; a shared list counts everywhere it is used."""
    path.budget.take(_VALUE_BYTES)
    if isinstance(value, TensorBytes):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, path / key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, path / index)


# The file


def parse(body: Body) -> Delta:
    """Read the content of a delta alone."""
    # Three copies of its tensors are in memory: the file, the storages of the pickle, the tensors.
    most = max_record_bytes() + 3 * body.file_bytes
    keys = Keys(Budget(body.where, "reading the delta", InvalidInput, most))
    keys.budget.take(body.length)
    data = body.read(0, body.length, "the delta")
    if len(data) < _FORM.size:
        raise InvalidInput("the delta breaks off", where=body.where, found=f"{len(data)} bytes")
    magic, version, digest, base_step, step, _ = _FORM.unpack_from(data)
    if magic != DELTA_MAGIC or version != 1:
        raise InvalidInput(
            "not a delta of a known version", where=body.where, expected=1, found=version
        )
    view = memoryview(data)
    changes, length = read_pickle(view[64:], _names(keys), where=body.where, keys=keys)
    at = 64 + length
    if len(data) - at < 4:
        raise InvalidInput("the delta has no metadata", where=body.where)
    (size,) = struct.unpack_from("<I", data, at)
    if at + 4 + size != len(data):
        raise InvalidInput(
            "the metadata of the delta has another length",
            where=body.where,
            expected=f"{size} bytes",
            found=f"{len(data) - at - 4} bytes",
        )
    return Delta(
        digest,
        base_step,
        step,
        _checked(changes, keys.budget),
        json_object(data[at + 4 :], body.where),
    )


def _checked(changes: Any, budget: Budget) -> dict[str, Any]:
    where = budget.where
    try:
        deque(_tensors(changes, Trail("", None, budget)), 0)
    except RecursionError as error:
        raise InvalidInput(
            "the delta is nested too deeply, or within itself", where=where
        ) from error
    if not isinstance(changes, dict):
        raise InvalidInput("the delta holds no dict", where=where, found=type(changes).__name__)
    aside = changes.get("metadata_changes", {})
    if not isinstance(aside, dict) or not set(aside) <= set(container.ASIDE):
        raise InvalidInput("the delta changes more than metadata of a brain", where=where)
    for kind in ("regions", "pathways"):
        parts = changes.get(kind, {})
        if not isinstance(parts, dict) or not all(
            isinstance(part, dict) for part in parts.values()
        ):
            raise InvalidInput(f"the {kind} of the delta are not dicts by name", where=where)
    return changes


# Its base


def _base_path(delta: Delta, path: Path) -> Path:
    info = delta.metadata.get("delta_info")
    name = info.get("base_checkpoint") if isinstance(info, dict) else None
    if name is None:
        raise InvalidInput("the delta names no base", where=path)
    return beside(path, name)


@contextmanager
def _compared_base(delta: Delta, path: Path) -> Iterator[None]:
    """Compare the base with its digest in the delta; fail at the end if it changed meanwhile."""
    if not path.is_symlink() and not path.exists():
        raise InvalidInput(
            "the base of the delta is missing",
            where=path,
            hint="Put the file of this name beside the delta.",
        )
    info: Any = delta.metadata["delta_info"]
    wanted = info.get("base_hash")
    with stable(path) as file:
        framing.check_size(os.fstat(file.fileno()).st_size, path)
        digest = sha256_of(file).hex()
        if digest != wanted:
            raise InvalidInput(
                "the base is another file than the delta was made from",
                where=path,
                expected=f"SHA-256 {str(wanted)[:64]}",
                found=digest,
            )
        yield


# Applying


def _apply(state: dict[str, Any], delta: Delta, path: Path) -> None:
    for kind, states in (("regions", _REGION_STATES), ("pathways", _PATHWAY_STATES)):
        for name, change in delta.changes.get(kind, {}).items():
            if change.get("type") == "new":
                state[kind][name] = copy.copy(change.get("state"))
                continue
            part = state[kind].get(name)
            if not isinstance(part, dict):
                raise InvalidInput(
                    "the delta changes a part that its base does not have",
                    where=f"{path}: {kind}/{name}",
                )
            _apply_weights(part, change.get("weights"), f"{path}: {kind}/{name}")
            part |= {key: change.get(key) for key in states}
    state |= delta.changes.get("metadata_changes", {})
    if "training_steps" in delta.changes:
        state["training_steps"] = delta.changes["training_steps"]


def _apply_weights(part: dict[str, Any], changes: Any, where: str) -> None:
    if not isinstance(changes, dict | None):
        raise InvalidInput("the weights are not a dict", where=where)
    weights = part.setdefault("weights", {})
    for name, change in (changes or {}).items():
        place = f"{where}/weights/{name}"
        match change:
            case {"type": "full", "tensor": TensorBytes() as tensor}:
                weights[name] = tensor
            case {
                "type": "sparse",
                "indices": TensorBytes(dtype="int64") as indices,
                "values": TensorBytes() as values,
            }:
                weights[name] = _added(weights.get(name), as_array(indices), values, place)
            case _:
                raise InvalidInput("not a change of a weight", where=place)


def _added(base: Any, indices: NDArray[Any], values: TensorBytes, place: str) -> TensorBytes:
    """Return a tensor with differences added at some coordinates."""
    if (
        not isinstance(base, TensorBytes)
        or indices.shape != (math.prod(values.shape), len(base.shape))
        or np.any(indices < 0)
        or np.any(indices >= np.array(base.shape, np.int64))
        or base.dtype == "bool"
    ):
        raise InvalidInput("the differences do not fit the tensor of the base", where=place)
    made, data = allocate(base.dtype, base.shape)
    data[:] = base.data
    array = as_array(made)
    where = tuple(indices.T)
    array[where] = array[where] + as_array(values).reshape(-1).astype(array.dtype)
    return made


# The names of the pickle


def _names(keys: Keys) -> dict[str, Known]:
    return {
        "collections.OrderedDict": Known(call=keys.ordered_dict),
        "torch._utils._rebuild_tensor_v2": Known(call=partial(_tensor, keys.budget)),
        "torch.storage._load_from_bytes": Known(call=partial(_storage, keys)),
    }


def _tensor(
    budget: Budget, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any
) -> TensorBytes:
    """Make a tensor from its storage."""
    del grad, hooks
    if not isinstance(storage, np.ndarray) or not _are_sizes((offset, *shape, *stride)):
        raise TypeError("not a tensor")
    if len(shape) != len(stride):
        raise ValueError("shape and strides differ in length")
    elements = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if elements and last >= len(storage):
        raise ValueError("a tensor is not within its storage")
    nbytes = elements * storage.itemsize
    budget.take(nbytes)
    dtype = _DTYPES[storage.dtype.str]
    made, data = allocate(dtype, tuple(shape))
    if elements:
        steps = tuple(step * storage.itemsize for step in stride)
        view = np.lib.stride_tricks.as_strided(storage[offset:], tuple(shape), steps)
        data[:] = memoryview(np.ascontiguousarray(view).tobytes())
    return made


_DTYPES: Final = {
    np.dtype(form).str: name
    for form, name in (
        ("<f4", "float32"),
        ("<f8", "float64"),
        ("<f2", "float16"),
        ("<i4", "int32"),
        ("<i8", "int64"),
        ("?", "bool"),
    )
}


def _are_sizes(numbers: tuple[Any, ...]) -> bool:
    return all(type(number) is int and 0 <= number < 2**62 for number in numbers)


def _storage(keys: Keys, data: Any) -> NDArray[Any]:
    """Read a storage: five pickles, then the number of its elements, and the elements.

    It is torch's file format before its version 1.6.
    """
    if type(data) is not bytes:
        raise TypeError("not the bytes of a storage")
    names = {name: Known(value=form) for name, form in _STORAGES.items()}
    rest, found = memoryview(data), []
    for _ in range(5):
        value, length = read_pickle(
            rest, names, where=str(keys.budget.where), persistent=_persistent, keys=keys
        )
        found.append(value)
        rest = rest[length:]
    magic, version, system, storage, listed = found
    if magic != _STORAGE_MAGIC or version != _STORAGE_VERSION or len(listed) != 1:
        raise ValueError("not a storage of torch")
    if not isinstance(system, Mapping) or system.get("little_endian") is not True:
        raise ValueError("a storage of a big-endian machine")
    form, count = storage
    (written,) = struct.unpack_from("<q", rest)
    kind = np.dtype(form)
    if written != count or len(rest) - 8 != count * kind.itemsize:
        raise ValueError("a storage of another length")
    return np.frombuffer(rest[8:], kind)


def _persistent(key: Any) -> tuple[str, int]:
    """Return type and number of elements of a storage."""
    tag, form, _, device, count, view = key
    if tag != "storage" or device != "cpu" or view is not None or not _are_sizes((count,)):
        raise ValueError("not the id of a storage")
    if form not in _STORAGES.values():
        raise ValueError("an unknown type of storage")
    return form, count
