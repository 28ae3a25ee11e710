"""Fill the tensors of a sharded model: every rank fetches a share, and sends the others theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.registry.collective import shards
from holdfast.registry.collective.boxes import Boxes
from holdfast.registry.collective.group import Group, LinksBroken
from holdfast.registry.collective.patterns import WrongLayout
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.planning import make_plan
from holdfast.registry.collective.shards import ShardLeaf, whole_shape
from holdfast.registry.collective.spreading import spread_chunks
from holdfast.registry.collective.structure import Ints, Structure
from holdfast.registry.collective.talk import Calls, Talk
from holdfast.registry.collective.wire import broken, join, rebuild, unlinked
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history.state_reader import StateReader
from holdfast.registry.loading.destinations import Destination
from holdfast.registry.loading.fit import (
    LoadReport,
    arrays_in,
    check_component,
    check_components,
    check_fit,
    filled_once,
    settle,
    tensors_by_path,
    widened_paths,
)
from holdfast.registry.loading.selecting import select
from holdfast.registry.loading.stored import Stored, reader_of
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.storage.manifest import TensorEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import item_size


def load_into(
    stored: Stored,
    target: object,
    *,
    group: Group,
    component: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Fill the tensors of a sharded module, or of a nest of dicts and lists, in place.

    Every rank calls it with its part of the target: DTensors of any layout, and plain tensors that
    are whole on every rank. The layout need not be the one of the save. Each rank fetches and
    verifies about its share of the chunks, and sends the other ranks their pieces. Chunks are read
    straight into the target where its memory holds them whole; for the others a rank needs memory
    for about 100 MiB. Otherwise as `Stored.load_into`.

    Args:
        stored: A checkpoint, or another stored state; the same on every rank.
        target: An object with `state_dict()`, or a dict of tensors.
        group: The ranks, such as `holdfast.distributed.TorchGroup`.
        component: The component for the target; by default the target's top-level keys are
            components.
        strict: Whether a path on only one side is an error.

    Returns:
        The paths that were loaded, missing and unexpected.

    Raises:
        InvalidInput: The component is not a name.
        IncompatibleState: Paths, shapes or dtypes differ, the ranks load different states, or
            memory is read-only or shared in part; nothing was read.
        UnsupportedValue: The layout of a tensor is none that can be filled.
        NotFound: There is no such component.
        IntegrityError: An object is damaged; do not use the target's tensors then.
        RankFailed: Another rank is dead or late; do not use the target's tensors then.
    """
    calls = Calls(group)
    talk = calls.begin()
    try:
        filling = _Filling(stored, target, component, strict=strict)
        part = _agree(filling, calls, talk)
        _fill(filling, calls, talk, part)
    except BaseException as error:
        try:
            talk.fail(error)
        finally:
            calls.break_links()
        raise
    calls.break_links()
    return filling.report


@dataclass
class _Whole:
    """A tensor of the target as `check_fit` compares it."""

    dtype: str
    shape: tuple[int, ...]


class _Filling:
    """The tensors of a target on this rank, and where they come from.

    Attributes:
        report: The paths on each side.
        structure: The tensors that are read in chunks, in order.
        boxes: The boxes that this rank has of them.
        items: Bytes of an element of each of those tensors.
    """

    def __init__(
        self, stored: Stored, target: object, component: str | None, *, strict: bool
    ) -> None:
        named = target if check_component(component) is None else {component: target}
        manifest = stored.manifest
        if component is not None:
            check_components(stored.ref, [component], manifest.components)
        parts = select(stored.ref, manifest, None if component is None else [component])
        sources = tensors_by_path(parts)
        leaves = _leaves(named)
        wholes = {path: _Whole(str(one.dtype), whole_shape(one)) for path, one in leaves.items()}
        self.report = LoadReport.of(sources, leaves)
        widened = widened_paths(sources, wholes)
        check_fit(stored.ref, self.report, sources, wholes, strict=strict, widened=widened)
        paths = filled_once(stored.ref, sources, leaves)
        self._stored = stored
        self._reader: StateReader = reader_of(stored)
        self._into = {p: Destination(leaves[p].source, widened.get(p)) for p in paths}
        self._entries: list[TensorEntry] = []
        self._leaves: list[ArrayLeaf] = []
        self._views: list[memoryview] = []
        for path in paths:
            entry = sources[path]
            if entry.inline is None and entry.nbytes:
                self._entries.append(entry)
                self._leaves.append(leaves[path])
                self._views.append(self._into[path].view)
            elif entry.inline:
                self._fill_inline(leaves[path], self._into[path].view, entry)
        self._reader.check_lists(manifest)
        self.structure = Structure(
            tuple(one.dtype for one in self._entries), tuple(one.shape for one in self._entries)
        )
        self.items = [item_size(one.dtype) for one in self._entries]
        rows = [
            [n, *self._padded(leaf.offset, 0), *self._padded(leaf.shape, 1)]
            for n, leaf in enumerate(self._leaves)
            if isinstance(leaf, ShardLeaf)
        ]
        table = np.array(rows, np.int64).reshape(-1, 1 + 2 * self.structure.axes)
        self.boxes = Boxes.from_rows(table, len(self._entries))
        self._memory: dict[int, tuple[Any, Ints]] = {}

    @property
    def digest(self) -> str:
        """The digest of what all ranks must have alike."""
        named = [self._stored.digest.hex(), sorted(self.report.loaded), self.structure.digest.hex()]
        return hashlib.sha256(repr(named).encode()).hexdigest()

    def where(self, tensor: int) -> str:
        """Return the path of a tensor."""
        return self._leaves[tensor].path

    def _padded(self, lengths: tuple[int, ...], fill: int) -> list[int]:
        return self.structure.padded(lengths, fill)

    def _fill_inline(self, leaf: ArrayLeaf, view: memoryview, entry: TensorEntry) -> None:
        item = item_size(entry.dtype)
        whole = np.frombuffer(entry.inline or b"", np.uint8).reshape(*entry.shape, item)
        if isinstance(leaf, ShardLeaf):
            ends = zip(leaf.offset, leaf.shape, strict=True)
            whole = whole[tuple(slice(begin, begin + length) for begin, length in ends)]
        view[:] = np.ascontiguousarray(whole).tobytes()

    def memory(self, tensor: int) -> tuple[Any, Ints]:
        """Return the bytes of this rank's box of a tensor, and the begin of the box."""
        found = self._memory.get(tensor)
        if found is None:
            leaf = self._leaves[tensor]
            offset = leaf.offset if isinstance(leaf, ShardLeaf) else (0,) * len(leaf.shape)
            shape = [*self._padded(leaf.shape, 1), self.items[tensor]]
            box = np.frombuffer(self._views[tensor], np.uint8).reshape(shape)
            found = box, np.array(self._padded(offset, 0), np.int64)
            self._memory[tensor] = found
        return found

    def read(self, part: Part, wanted: Mapping[int, Any]) -> None:
        """Fill memory with owned chunks, every byte verified."""
        first: dict[Digest, Any] = {}
        copies: list[tuple[Any, Any]] = []
        for number, data in wanted.items():
            tensor, at = int(part.chunks[number, 0]), int(part.chunks[number, 1])
            digest = self._reader.chunk_digests(self._entries[tensor])[at]
            if digest in first:
                copies.append((data, first[digest]))
            else:
                first[digest] = data
        self._reader.read_chunks({digest: memoryview(data) for digest, data in first.items()})
        for data, source in copies:
            data[:] = source

    def settle(self) -> None:
        """Widen tensors in place, and copy staged ones to their target."""
        self._memory.clear()
        with ThreadPoolExecutor() as pool:
            settle(self._into, pool)


def _leaves(target: object) -> dict[str, ArrayLeaf]:
    return {
        part.leaves[index].path: part.leaves[index]
        for part in shards.flatten(target).flat.components
        for index in arrays_in(part.skeleton)
    }


def _agree(filling: _Filling, calls: Calls, talk: Talk) -> Part:
    """Compare what the ranks load, and plan; return this rank's part."""
    group = calls.group
    said = join({"digest": filling.digest}, *filling.boxes.encode())
    if group.rank:
        talk.report(said)
        _listen(talk)
        return Part.decode(talk.hear_own("planning a load")[1])
    found = talk.gather(said, "beginning a load")
    for rank, (header, _) in enumerate(found):
        if header["digest"] != filling.digest:
            raise IncompatibleState(
                "the ranks load different checkpoints, or into different tensors",
                where=f"rank {rank}",
                hint="Give every rank the same checkpoint and a target of the same paths.",
            )
    boxes = [Boxes.decode(columns) for _, columns in found]
    try:
        plan = make_plan(filling.structure, boxes, loads=True)
    except WrongLayout as error:
        raise IncompatibleState(
            error.what, where=filling.where(error.tensor), found=error.found
        ) from error
    talk.order({"failure": None})
    for rank in range(1, group.size):
        talk.order_one(rank, {}, *plan.part(rank).encode())
    return plan.part(0)


def _fill(filling: _Filling, calls: Calls, talk: Talk, part: Part) -> None:
    """Carry the plan out, and wait until all ranks have."""
    group = calls.group
    try:
        spread_chunks(
            group,
            calls.links,
            part,
            filling.items,
            filling.memory,
            lambda wanted: filling.read(part, wanted),
        )
    except LinksBroken as error:
        group.break_links(calls.links)
        if not group.rank:
            talk.say_why(error, "exchanging parts of tensors")
        talk.report(broken(error, group.rank))
        _listen(talk)
        raise unlinked([group.rank], str(error)) from error
    filling.settle()
    if group.rank:
        talk.report(join({}))
        _listen(talk)
        return
    talk.gather(join({}), "loading their parts")
    talk.order({"failure": None})


def _listen(talk: Talk) -> None:
    """Wait for rank 0.

    Raises:
        RegistryError: A rank has failed; its error.
    """
    header, _ = talk.hear("leading the load")
    if header["failure"] is not None:
        raise rebuild(header["failure"])
