"""The copy of a state that `async_save` saves later, here or in another process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary

import torch

from holdfast.registry.adapters.dcp.reader import refuse_twins
from holdfast.registry.errors import Conflict
from holdfast.registry.face import Run
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import ArrayLeaf, FlatState
from holdfast.registry.pytree.torch_memory import memory_of
from holdfast.registry.saving import FlatSave, PlannedSave, RunHandle, SaveRequest
from holdfast.registry.saving.collective import DEADLINE_S, ShardLeaf
from holdfast.registry.values import collector_paused
from holdfast.registry.writing import Staging, places

_kept: WeakKeyDictionary[Run, KeptMemory] = WeakKeyDictionary()


class StandIn(dict[str, Any]):
    """Stands in for a staged state at DCP, until its save has ended."""


class KeptMemory:
    """Memory for one staged state of a run; the next one waits until the save has ended."""

    def __init__(self) -> None:
        self._ended = Event()
        self._ended.set()
        self._is_shared = False
        self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._staging = Staging(self._allocate)

    @classmethod
    def of(cls, run: Run) -> KeptMemory:
        """Return the kept memory of a run's handle."""
        return _kept.setdefault(run, cls())

    def _allocate(self, nbytes: int) -> memoryview:
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._is_shared:
            made.untyped_storage().share_memory_()
        self._tensor = made
        return memory_of(self._tensor, nbytes)

    def take(self, name: str, deadline_s: float) -> StandIn:
        """Wait until the memory is free, and take it."""
        if not self._ended.wait(deadline_s):
            raise Conflict(
                "an earlier async_save of this run has not ended",
                where=name,
                found=f"after {deadline_s:g} s",
                hint="Wait for its future before the next save.",
            )
        held = StandIn()
        self._ended = ended = Event()
        weakref.finalize(held, ended.set)
        return held

    def free(self) -> None:
        """Free the memory for the next save."""
        self._ended.set()

    def copy(self, state: FlatState, run: Run) -> FlatState:
        """Copy a state to the memory."""
        return self._staging.copy(state, run.handle.store.pools.copying)

    def shared(self) -> torch.Tensor:
        """Return the memory as a tensor that other processes map.

        From now on all of it is shared; what is in it already is copied once.
        """
        if not self._is_shared:
            self._is_shared = True
            before = self._tensor
            self._staging = Staging(self._allocate)
            self._staging.reserve(before.nbytes)
            self._tensor.copy_(before)
        return self._tensor


@dataclass
class Staged:
    """A staged save, or the error that prevented it."""

    save: FlatSave | PlannedSave | None  # the save, whose state is in kept memory
    failure: BaseException | None  # the error; the other ranks hear of it when the save would begin
    memory: KeptMemory | None  # the kept memory; `None` in another process

    @classmethod
    def of(cls, run: Run, state: object, request: SaveRequest, memory: KeptMemory) -> Staged:
        """Copy a state into the staging buffer, which the caller has taken."""
        try:
            refuse_twins(state)
            with collector_paused():
                save = run.handle.saver.pipeline.stage(
                    state, request, lambda _, flat: memory.copy(flat, run)
                )
        except Exception as error:
            return cls(None, error, memory)
        return cls(save, None, memory)

    def finish(self, handle: RunHandle) -> Checkpoint:
        """Make the save, and free the memory."""
        try:
            if self.save is None:
                assert self.failure is not None
                with handle.telling_ranks():
                    raise self.failure
            # The saver that has staged it.
            return handle.saver.pipeline.save_staged(self.save)  # type: ignore[arg-type]
        finally:
            if self.memory is not None:
                self.memory.free()

    def __getstate__(self) -> dict[str, Any]:
        if self.save is None:
            return {"failure": self.failure}
        assert self.memory is not None
        given = self.save.state
        rows = [[_row(leaf) for leaf in part.leaves] for part in given.components]
        bare = tuple(replace(part, leaves=()) for part in given.components)
        save = replace(self.save, state=FlatState(given.kind, bare))
        return {"save": save, "rows": rows, "bytes": self.memory.shared()}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self.memory = None
        self.failure, self.save = sent.get("failure"), sent.get("save")
        if self.save is None:
            return
        tensor: torch.Tensor = sent["bytes"]
        leaves = [[_bare_leaf(row) for row in rows] for rows in sent["rows"]]
        starts = iter(places([leaf for some in leaves for leaf in some])[0])
        view = memory_of(tensor, tensor.nbytes)
        parts = tuple(
            replace(part, leaves=tuple(_moved(leaf, view, next(starts)) for leaf in some))
            for part, some in zip(self.save.state.components, leaves, strict=True)
        )
        self.save = replace(self.save, state=FlatState(self.save.state.kind, parts))


def deadline_of(run: Run) -> float:
    """Return the seconds after which waiting for the saves of a run is an error."""
    ranks = run.handle.ranks
    return DEADLINE_S if ranks is None else ranks.group.deadline_s


def _row(leaf: ArrayLeaf) -> list[Any]:
    row = [str(leaf.dtype), leaf.shape, leaf.nbytes, leaf._link]
    if isinstance(leaf, ShardLeaf):
        row += [leaf.whole, leaf.offset, leaf.is_copied]
    return row


def _bare_leaf(row: Sequence[Any]) -> ArrayLeaf:
    dtype, shape, nbytes, link, *shard = row
    leaf = ArrayLeaf(dtype, shape, nbytes, None, _absent, link, is_ours=True)
    if shard:
        whole, offset, is_copied = shard
        return ShardLeaf.of(leaf, whole, offset, is_copied=is_copied)
    return leaf


def _moved(leaf: ArrayLeaf, view: memoryview, start: int) -> ArrayLeaf:
    leaf.hold(view[start : start + leaf.nbytes])
    return leaf


def _absent(source: None, nbytes: int) -> memoryview:  # noqa: ARG001
    raise LookupError("these bytes have not arrived")
