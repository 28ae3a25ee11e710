"""A stored state as DCP describes one: a key for each tensor, and for each other value.

DCP names a value by its path, joined with dots. Dicts are walked, and so are lists that hold
tensors, dicts or such lists; everything else is one value.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, Malformed, RegistryError
from holdfast.registry.loading import Stored
from holdfast.registry.objects import TensorEntry
from holdfast.registry.pytree import DICTS, pairs_of
from holdfast.registry.pytree.torch_memory import ALL_DTYPES

_LOGGER = logging.getLogger("holdfast")
#: Tag of a dict -> the place of its pairs in the payload; `None` if the payload is the pairs.
_DICTS = {**DICTS, "counter": None}
_TENSORS = frozenset({"t", "coo", "csr", "csc", "bsr", "bsc"})

_TWINS = "two values of the state have one name in torch.distributed.checkpoint"

#: A path: keys as text, and indices.
Path = tuple[str | int, ...]


@dataclass
class Description:
    """The values of a stored state by DCP's keys."""

    paths: dict[str, Path] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    #: The other values: their component, and their node in its skeleton.
    nodes: dict[str, tuple[str, Any]] = field(default_factory=dict)
    #: Plain values that the commit holds, and not the manifest.
    given: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Stored) -> Description:
        """Describe a stored state; its manifest is read, and no tensor."""
        made = cls()
        for name, part in stored.manifest.components.items():
            for path, node in _walk((name,), part.skeleton):
                key = made._name(path, stored.ref)
                if type(node) is dict and node.keys() == {"t"}:
                    made.tensors[key] = part.tensors[node["t"]]
                else:
                    made.nodes[key] = name, node
        values, paths = flatten_state_dict(stored.handle.kept_by_commit(stored.manifest))
        for key, path in paths.items():
            made.given[made._name(path, stored.ref)] = values[key]
        return made

    def _name(self, path: Path, ref: str) -> str:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise IncompatibleState(
                _TWINS,
                where=f"{ref}: {key}",
                hint="Load it with `load_into` or `load`, which tell them apart.",
            )
        self.paths[key] = path
        return key

    def metadata(self, stored: Stored) -> Metadata:
        """Return it as DCP's: every tensor is one box."""
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: _tensor(entry) for key, entry in self.tensors.items()
        }
        described |= {key: BytesStorageMetadata() for key in [*self.nodes, *self.given]}
        return Metadata(described, planner_data=self.paths, storage_meta=_meta(stored))


def _tensor(entry: TensorEntry) -> TensorStorageMetadata:
    dtype, size = ALL_DTYPES.get(entry.dtype), torch.Size(entry.shape)
    if dtype is None:
        raise IncompatibleState(
            "this torch has no such element type",
            found=entry.dtype,
            hint="Install a newer one: pip install -U torch.",
        )
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


def _walk(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values of a node with their paths."""
    pairs = pairs_of(node, _DICTS)
    if pairs is not None:
        for key, child in pairs:
            yield from _walk((*path, _text(key, path)), child)
    elif type(node) is list and not _is_one_value(node):
        for index, child in enumerate(node):
            yield from _walk((*path, index), child)
    else:
        yield path, node


def _is_one_value(items: list[Any]) -> bool:
    """Return whether a list holds no tensors, no dicts, and no list that does."""
    for item in items:
        if type(item) is list:
            if not _is_one_value(item):
                return False
        elif type(item) is dict and (
            pairs_of(item, _DICTS) is not None or not _TENSORS.isdisjoint(item)
        ):
            return False
    return True


def _text(key: Any, path: Path) -> str:
    if type(key) is str:
        return key
    try:
        return str(pytree.unflatten_component(key, []))
    except Malformed as error:
        where = ".".join(map(str, path))
        raise Malformed(error.what, where=where, found=error.found) from error


def refuse_twins(state: object) -> None:
    """Refuse a state that could be saved, but not loaded by DCP."""
    if not isinstance(state, dict):
        return
    try:
        flatten_state_dict(state)
    except ValueError as error:
        raise IncompatibleState(
            _TWINS,
            where="state",
            found=error,
            hint="Rename one of them, or save with `run.save`, which tells them apart.",
        ) from error


def complete(metadata: Metadata, stored: Stored) -> None:
    """Let the result of a save describe the stored state.

    The checkpoint is durable and visible, so a failure here is no error of the save: DCP is then
    told the ref and the id alone.
    """
    metadata.storage_meta = _meta(stored)
    try:
        made = Description.of(stored).metadata(stored)
    except RegistryError as error:
        _LOGGER.warning("%s is saved, but could not be described: %s", stored.ref, error)
        return
    fields: Mapping[str, Any] = vars(made)
    for name, value in fields.items():
        setattr(metadata, name, value)


def _meta(stored: Stored) -> StorageMeta:
    return StorageMeta(checkpoint_id=stored.ref, save_id=stored.digest.hex())
