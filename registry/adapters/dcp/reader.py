"""`HoldfastReader`: fill the targets of DCP from a stored state."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.registry import pytree
from holdfast.registry.errors import (
    IncompatibleState,
    InvalidInput,
    Malformed,
    RegistryError,
    UnsupportedValue,
)
from holdfast.registry.loading import Destination, Stored, allocate
from holdfast.registry.objects import Component, TensorEntry
from holdfast.registry.pytree import DICTS, pairs_of
from holdfast.registry.pytree.torch_memory import ALL_DTYPES, DTYPES
from holdfast.registry.saving.collective import LOADS, Box, Calls, Filling, Group, Talk, tell_state
from holdfast.registry.values import Digest

# Read all values of a stored state but tensors: plain values, arrays of NumPy, tuples of tensors.
_LOGGER = logging.getLogger("holdfast")
#: Tag of a dict -> the place of its pairs in the payload; `None` if the payload is the pairs.
_DICTS = {**DICTS, "counter": None}
_TENSORS = frozenset({"t", "coo", "csr", "csc", "bsr", "bsc"})

_TWINS = "two values of the state have one name in torch.distributed.checkpoint"

#: A path: keys as text, and indices.
Path = tuple[str | int, ...]


def read_values(stored: Stored, description: Description, keys: Iterable[str]) -> dict[str, Any]:
    """Return some values by DCP's keys; every byte is verified."""
    manifest, wanted = stored.manifest, list(keys)
    parts = {
        key: _component(manifest.components[name], name, node)
        for key in wanted
        if key not in description.given
        for name, node in [description.nodes[key]]
    }
    made = allocate(stored.ref, parts, "stored")
    stored.handle.reader.read(manifest, made.targets)
    values = {
        key: pytree.unflatten_component(part.skeleton, made.arrays[key], name=key)
        for key, part in parts.items()
    }
    return {key: values[key] if key in values else description.given[key] for key in wanted}


def _component(part: Component, name: str, node: Any) -> Component:
    skeleton, numbers = pytree.renumbered(name, node, len(part.tensors))
    return Component.build(skeleton, [part.tensors[number] for number in numbers])


class NoCheckpointId:
    """A reader or writer of DCP that takes no `checkpoint_id`."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return that no `checkpoint_id` names a checkpoint of a run."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load or a save.

        Raises:
            InvalidInput: There is a `checkpoint_id`.
        """
        if checkpoint_id is not None:
            raise InvalidInput(
                "a run names its checkpoints itself, so there is no checkpoint_id",
                where="checkpoint_id",
                found=repr(checkpoint_id),
                hint="Leave it out: HoldfastWriter has a run and a step, HoldfastReader a "
                "checkpoint.",
            )


class HoldfastReader(NoCheckpointId, StorageReader):
    """Loads a checkpoint with `torch.distributed.checkpoint.load`, into any layout.

    ```python
    dcp.load(state, storage_reader=HoldfastReader(run.latest()))
    ```

    The checkpoint may have been saved by any number of ranks, with `dcp.save` or `run.save`. Keys,
    partial loads and conversions of element types are DCP's. No code of the checkpoint is run:
    plain values come from the closed list of what a state can hold.

    Args:
        stored: A checkpoint, or another stored state; the same on every rank.
        group: The ranks, if all of them load: each then fetches about its share of the chunks, and
            sends the others their pieces. Default: each rank fetches all chunks that it needs.

    Raises:
        IntegrityError: The manifest is damaged or missing.
        IncompatibleState: Two values of the state have the same key in DCP.
    """

    def __init__(self, stored: Stored, *, group: Group | None = None) -> None:
        self._stored, self._group = stored, group
        self._description = Description.of(stored)
        self._metadata = self._description.metadata(stored)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the state."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the checkpoint is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell every rank which tensors any rank loads, since all take part in each.

        Raises:
            InvalidInput: Not all ranks of the group load.
        """
        if self._group is None:
            return plans
        if len(plans) != self._group.size:
            raise InvalidInput(
                "not all ranks of the group load",
                where="group",
                expected=f"{self._group.size} ranks",
                found=len(plans),
                hint="Leave `group` out: every rank then reads for itself.",
            )
        tensors = {
            one.storage_index.fqn: None
            for plan in plans
            for one in plan.items
            if one.type == LoadItemType.TENSOR
        }
        return [replace(plan, storage_data=list(tensors)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the target; return when it is filled.

        Raises:
            IntegrityError: An object is damaged; do not use the target then.
            RankFailed: With a group: another rank is dead or late.
        """
        if self._group is None:
            target = _Target(plan.items, planner, self._description)
            Filling(self._stored.handle.reader, target.boxes).alone()
            target.settle()
        else:
            self._read_together(Calls(self._group, LOADS), plan, planner)
        values = [one for one in plan.items if one.type == LoadItemType.BYTE_IO]
        keys = [one.storage_index.fqn for one in values]
        read = read_values(self._stored, self._description, keys)
        for item, key in zip(values, keys, strict=True):
            planner.load_bytes(item, _saved(read[key]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_together(self, calls: Calls, plan: LoadPlan, planner: LoadPlanner) -> None:
        def load(talk: Talk) -> None:
            target = _Target(plan.items, planner, self._description)
            boxes = target.each_once(plan.storage_data)
            reader, keys = self._stored.handle.reader, plan.storage_data
            entries = [self._description.tensors[key] for key in keys]
            subject = Digest.of(repr([self._stored.digest.hex(), keys]).encode()).hex()
            tell_state(calls, talk, reader, subject, lambda _: entries)
            Filling(reader, boxes).together(calls, talk, target.settle)

        calls.make_apart(load)


class _Target:
    """The tensors that a plan fills on this rank."""

    def __init__(
        self, items: Sequence[ReadItem], planner: LoadPlanner, description: Description
    ) -> None:
        self._planner, self._description = planner, description
        self._tensors = [one for one in items if one.type == LoadItemType.TENSOR]
        self._made: list[tuple[ReadItem, torch.Tensor, torch.Tensor, Destination]] = []
        self.boxes = [self._box(item) for item in self._tensors]  # a box for each item of the plan

    def _box(self, item: ReadItem) -> Box:
        key = item.storage_index.fqn
        entry = self._description.tensors[key]
        target = self._planner.resolve_tensor(item).detach()
        dtype = DTYPES[entry.dtype]
        fits = target.dtype == dtype
        filled = target if fits else torch.empty(target.shape, dtype=dtype, device="cpu")
        into = Destination(filled)
        self._made.append((item, target, filled, into))
        shape = tuple(item.lengths)
        return Box(key, entry, tuple(item.storage_offsets), shape, into.view)

    def each_once(self, keys: Sequence[str]) -> list[Box]:
        """Return a box for each key, an empty one for tensors of which this rank has nothing."""
        boxes = {one.path: one for one in self.boxes}
        if len(boxes) < len(self.boxes):
            raise UnsupportedValue(
                "a rank has several parts of one tensor",
                where=next(one.path for one in self.boxes if boxes[one.path] is not one),
                hint="Leave `group` out: every rank then reads for itself.",
            )
        return [boxes.get(key) or _empty(key, self._description.tensors[key]) for key in keys]

    def settle(self) -> None:
        """Copy tensors that were read aside to their targets, and give them to the planner."""
        for item, target, filled, into in self._made:
            into.settle()
            if filled is not target:
                target.copy_(filled)
            self._planner.commit_tensor(item, target)


def _empty(key: str, entry: TensorEntry) -> Box:
    none = (0,) * len(entry.shape)
    return Box(key, entry, none, none, memoryview(bytearray()))


def _saved(value: object) -> io.BytesIO:
    """Return a value as a planner expects it: bytes of torch.save, which were made just now."""
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


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
