"""A delta: the changes of a state since a base file, which may be a delta itself.

Its content is a pickle; it is read by `holdfast.registry.formats.pickles`, with three names. Any
other name can only be that of a dataclass, which is kept as a text. The deltas of the programs are
lossy by design: a difference below a threshold, and what is in a region without changed weights,
was not written. The state that comes out is what Thalia's own program makes of the file; but a
state of a region that neither the base nor the delta has does not become null.
"""

from __future__ import annotations

import copy
import math
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.formats.pickles import Keys, Known, read_pickle
from holdfast.registry.formats.source import beside, json_object, sha256_of, stable
from holdfast.registry.formats.state_file import FileReport, FileState, TensorHeader
from holdfast.registry.formats.thalia import container, framing
from holdfast.registry.formats.thalia.framing import DELTA_MAGIC, Body
from holdfast.registry.formats.thalia.tensors import DTYPES, as_array
from holdfast.registry.formats.torch import names_of_parts
from holdfast.registry.pytree import Adapted, TensorBytes, Trail
from holdfast.registry.pytree import allocate_bytes as allocate
from holdfast.registry.values import Budget, max_record_bytes

_FORM: Final = struct.Struct("<5sI32sQQ7s")
#: The longest chain of deltas.
_MAX_CHAIN: Final = 1000
#: The key of `metadata_changes` for paths that the state has no more; only Holdfast writes it.
REMOVED: Final = "removed"
#: Bytes of memory for a value where a shared one is taken apart.
_VALUE_BYTES: Final = 100
#: Bytes of memory for the name of a class, besides its text.
_NAME_BYTES: Final = 500
#: Parts of a region, and of a pathway, that a delta replaces as a whole.
STATES: Final = {
    "regions": ("neuron_state", "learning_state", "oscillator_state", "neuromodulator_state"),
    "pathways": ("neuron_state", "learning_state"),
}


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of a file."""

    base_digest: bytes  # SHA-256 of the base file, all its bytes
    base_step: int  # step of the base, 0 if that is a full file
    step: int  # step of the state
    changes: dict[str, Any]  # the changed regions and pathways
    metadata: dict[str, Any]

    @property
    def header(self) -> dict[str, Any]:
        """The fields of the header, under their names in the metadata."""
        steps = {"base_step": self.base_step, "current_step": self.step}
        return {"base_hash": self.base_digest.hex(), **steps}


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
    return FileReport(container.FORMAT, body.file_bytes, tensors, delta.metadata, delta.header)


def problems(delta: Delta, path: Path) -> list[str]:
    """Return where the header of a delta and its metadata differ; the programs do not compare."""
    info = delta.metadata.get("delta_info")
    if not isinstance(info, dict):
        return []
    return [
        f"{path}: header and metadata have different values of {key}: "
        f"{value} and {str(info.get(key))[:64]}"
        for key, value in delta.header.items()
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
    elif isinstance(value, Adapted):
        if not isinstance(value.plain, dict):
            _no_class(value.name, f"{path.budget.where}: {path}")
        yield from _tensors(value.plain, path)


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
    changes, length = read_pickle(view[64:], _Names(keys, body), where=body.where, keys=keys)
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
    known = {*container.ASIDE, REMOVED}
    if not isinstance(aside, dict) or not set(aside) <= known or not _are_names(aside):
        raise InvalidInput("the delta changes more than metadata of a brain", where=where)
    for kind in ("regions", "pathways"):
        parts = changes.get(kind, {})
        if not isinstance(parts, dict) or not all(
            isinstance(part, dict) for part in parts.values()
        ):
            raise InvalidInput(f"the {kind} of the delta are not dicts by name", where=where)
    return changes


def _are_names(aside: dict[str, Any]) -> bool:
    removed = aside.get(REMOVED, [])
    return isinstance(removed, list) and all(
        isinstance(path, list) and path and all(isinstance(name, str) for name in path)
        for path in removed
    )


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
    for kind, states in STATES.items():
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
            given = {key: change.get(key) for key in states}
            part |= {key: one for key, one in given.items() if key in part or one is not None}
    aside = dict(delta.changes.get("metadata_changes", {}))
    for *above, name in aside.pop(REMOVED, ()):
        here: Any = state
        for key in above:
            here = here.get(key) if isinstance(here, dict) else None
        if isinstance(here, dict):
            here.pop(name, None)
    state |= aside
    if "training_steps" in delta.changes:
        state["training_steps"] = delta.changes["training_steps"]


def _apply_weights(part: dict[str, Any], changes: Any, where: str) -> None:
    if not isinstance(changes, dict | None):
        raise InvalidInput("the weights are not a dict", where=where)
    weights = part.setdefault("weights", {}) if changes else {}
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


class _Names(dict[str, Known]):
    """The closed list; any other name can be that of a dataclass, and is a text."""

    def __init__(self, keys: Keys, body: Body) -> None:
        super().__init__(names_of_parts(keys, body.where, body.file_bytes, DTYPES))
        self._budget = keys.budget

    def __missing__(self, name: str) -> Known:
        """Return a name that makes an object of nothing, whose fields follow."""
        self._budget.take(_NAME_BYTES + 4 * len(name))
        return Known(partial(_object, name), _with_fields, Adapted(name, None))


def _object(name: str, *arguments: Any) -> Adapted:
    return _no_class(name, "a call of it") if arguments else Adapted(name, None)


def _with_fields(made: Adapted, fields: Any) -> Adapted:
    return Adapted(made.name, fields)


def _no_class(name: str, where: object) -> NoReturn:
    raise UnsupportedValue(
        f"the file names {name[:200]}, which is not there as the class of a dataclass",
        where=where,
        expected="tensors, plain values, and dataclasses with their fields",
        hint="Nothing in the file was run.",
    )
