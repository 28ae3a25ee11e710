"""The trainer of a run whose ranks save together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.collective import shards
from holdfast.registry.collective.agreement import RankPart
from holdfast.registry.collective.following import Following
from holdfast.registry.collective.group import Group
from holdfast.registry.collective.leading import CollectiveSave, Leading
from holdfast.registry.collective.loading import load_into
from holdfast.registry.collective.side import Plans
from holdfast.registry.collective.talk import Calls, Talk
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.fit import LoadReport
from holdfast.registry.loading.stored import Stored
from holdfast.registry.training.pending import Busy, PendingSave
from holdfast.registry.training.save_request import PreparedSave, SaveRequest, prepare_save
from holdfast.registry.training.trainer import Trainer
from holdfast.registry.values.gc_pause import collector_paused
from holdfast.registry.writing.change import NewCommit
from holdfast.registry.writing.committer import Committer


@dataclass(frozen=True)
class RankSave(PreparedSave):
    """What a rank gives to a save; rank 0 prepares the whole of it, once it has heard all.

    Attributes:
        own: The values that the rank has for itself, by the name of the state.
    """

    own: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)


class CollectiveTrainer(Trainer):
    """A trainer of which every rank has one, and whose saves all ranks make together.

    Rank 0 owns the run. Saves in the background use a thread of each rank, and no process group of
    the training.

    Args:
        committer: The committer of this rank's handle.
        group: The ranks.
    """

    is_collective = True

    def __init__(self, committer: Committer, group: Group) -> None:
        super().__init__(committer)
        store = committer.store
        self._calls = Calls(group, f"{store.config.id}/{committer.log.run_id}")
        self._plans = Plans()
        self._shards: dict[str, list[Any]] = {}

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._calls.group

    @property
    def _leads(self) -> bool:
        return self._calls.group.rank == 0

    def save_async(self, state: object, request: SaveRequest, busy: Busy = "wait") -> PendingSave:
        """Copy this rank's part of a state, then save it in the background."""
        if busy != "wait":
            raise InvalidInput(
                "ranks that save together cannot leave a save out each for itself",
                where="busy",
                expected="wait",
                found=repr(busy),
            )
        return super().save_async(state, request, busy)

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the trainer of a run may make; it takes the run over."""
        if not self._leads:
            raise Conflict(
                f"only rank 0 may make this {change.noun}",
                where=f"rank {self._calls.group.rank}",
                hint="Guard the call: `if rank == 0:`. All ranks call `save`.",
            )
        return super().commit(change)

    def fill(
        self, stored: Stored, target: object, component: str | None, *, strict: bool
    ) -> LoadReport:
        """Load a stored state into this rank's part of a target."""
        return load_into(
            stored, target, group=self._calls.group, component=component, strict=strict
        )

    def abstain(self, error: BaseException, step: int | None) -> None:
        """Tell the other ranks, which begin a save, that this one has failed before it."""
        with suppress(Exception):  # `settle` raises it
            self._background.wait(None)
        self._calls.end(self._calls.begin(step), error)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status; the other ranks leave it to rank 0."""
        if self._leads:
            super().leave(status, error)

    def close(self) -> None:
        """Finish the running saves, and end the connections."""
        try:
            super().close()
        finally:
            self._calls.break_links()

    def _prepare(self, state: object, request: SaveRequest) -> PreparedSave:
        with self.abstaining(request.step):
            return self._flattened(state, request)

    def _flattened(self, state: object, request: SaveRequest) -> PreparedSave:
        if request.precision is not None:
            raise InvalidInput(
                "ranks that save together store tensors unchanged",
                where="precision",
                expected="None",
                hint="Cast the tensors before the save.",
            )
        states = {"": state, **request.companions}
        with collector_paused():
            flats = {
                name: shards.flatten(one, self._shards.setdefault(name, []))
                for name, one in states.items()
            }
        for one in flats.values():
            pytree.await_devices(one.flat)
        return RankSave(
            request=request,
            phase="",
            given=flats[""].flat,
            narrowing=None,
            commit_keys=None,
            companions={name: flats[name].flat for name in request.companions},
            metrics={},
            counters={},
            own={name: one.own for name, one in flats.items()},
        )

    def _store_and_commit(self, save: PreparedSave) -> Checkpoint:
        assert isinstance(save, RankSave)
        take_part = self._lead if self._leads else self._follow
        with self._lock:
            return self._calls.make(partial(take_part, save), save.request.step)

    def _parts(self, save: RankSave) -> dict[str, RankPart]:
        is_alone = self._calls.group.size == 1
        pool = None if is_alone else self._committer.store.pools.hashing
        flats = {"": save.given, **save.companions}
        return {name: RankPart.of(flat, save.own[name], pool) for name, flat in flats.items()}

    def _lead(self, save: RankSave, talk: Talk) -> Checkpoint:
        request = save.request
        parts = self._parts(save)
        leading = Leading(self._committer, self._calls, talk, self._plans, parts, request)
        state, companions = leading.agree()
        request.companions = {**companions}
        prepared = prepare_save(state, request, self.run)
        commit = CollectiveSave(
            self._committer, self._writer_token, prepared, self._earlier, leading
        )
        made = self._carry_through(commit, prepared)
        talk.order({"kind": "outcome", "failure": None, "n": commit.outcome})
        return made

    def _follow(self, save: RankSave, talk: Talk) -> Checkpoint:
        parts = self._parts(save)
        following = Following(self._committer, self._calls, talk, self._plans, parts, save.request)
        n = following.follow()
        self._log.refresh()
        record = self._log.knowing(n).by_n[n]
        return Checkpoint(self._committer.store, self._log, record)
