"""The saver of a run whose ranks save together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, LoadReport, Stored
from holdfast.registry.saving.collective import shards
from holdfast.registry.saving.collective.agreement import Share
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.loading import load_into
from holdfast.registry.saving.collective.sides import CollectiveSave, Following, Leading, Plans
from holdfast.registry.saving.collective.talk import Calls, Talk
from holdfast.registry.saving.collective.telling import tell_slot
from holdfast.registry.saving.ownership import Ownership
from holdfast.registry.saving.pipeline import Pipeline
from holdfast.registry.saving.save_request import FlatSave, SaveRequest, plan_save
from holdfast.registry.values import collector_paused
from holdfast.registry.writing import Committer, NewCommit


class CollectiveSaver:
    """A saver of which every rank has one, and whose saves all ranks make together.

    A collective save, from the call to the last byte; CS1 to CS5 are rules of docs/spec.md:

    1. `prepare` on each rank flattens its part of the state (`FlatSave`): a sharded tensor becomes
       a leaf with its box.
    2. `make` on each rank reports to rank 0: arguments, a digest of each component, checksums of
       replicas, and the bytes of `PerRank` values and of shards that are too small to be cut.
    3. Rank 0 compares the reports. At a difference all ranks raise, and nothing is written.
    4. Rank 0 plans the save of the whole state (`PlannedSave`), makes `CollectiveSave` and gives it
       to its committer, which checks it. It calls `Leading.write` for each state: steps 5 to 8.
    5. If the layout is new, rank 0 gathers the boxes, and plans which rank stores which chunk
       (`Plan`).
    6. Rank 0 orders the ranks to store; the order has the rank's part of a new plan. The ranks send
       pieces of chunks to the owners of the chunks.
    7. Each rank hashes the chunks that it owns, puts those that the base lacks as packs, and
       reports digests and locations once its puts are acknowledged (CS2).
    8. Rank 0 puts its own chunks, then the manifest and the placement of the whole state: a
       `WrittenSave`.
    9. Rank 0 alone puts the slot. After a sweep it repeats steps 6 to 8 with a new epoch.
    10. Rank 0 sends the outcome, and all ranks return the checkpoint. A rank that hears nothing
        looks for the slot in the log itself (CS5).

    Rank 0 owns the run. Saves in the background use a thread of each rank, and no process group of
    the training.
    """

    def __init__(self, committer: Committer, group: Group) -> None:
        store = committer.store
        self.ownership = Ownership(committer)
        self.pipeline = Pipeline(
            self.ownership, self.prepare, self.make, guard=self.telling_ranks, only_waits=True
        )
        self._writer, self._pools = committer.writer, store.pools
        self._calls = Calls(group, f"{store.config.id}/{committer.log.run_id}")
        self._plans = Plans()
        self._shards: dict[str, list[Any]] = {}

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._calls.group

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which owns the run."""
        return self._calls.group.rank == 0

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change of the run's owner, on rank 0; it takes the run over."""
        if not self.leads:
            raise Conflict(
                f"only rank 0 may make this {change.noun}",
                where=f"rank {self._calls.group.rank}",
                hint="Guard the call: `if rank == 0:`. All ranks call `save`.",
            )
        self.pipeline.settle()
        return self.ownership.commit(change)

    def fill(
        self, stored: Stored, target: object, component: str | None, *, strict: bool
    ) -> LoadReport:
        """Load a stored state into this rank's part of a target."""
        return load_into(
            stored, target, group=self._calls.group, component=component, strict=strict
        )

    @contextmanager
    def telling_ranks(self, step: int | None = None) -> Iterator[None]:
        """Tell the other ranks, which start a save, if this rank fails before it."""
        try:
            yield
        except BaseException as error:
            with suppress(Exception):  # `settle` raises it
                self.pipeline.wait(None)
            self._calls.end(self._calls.begin(step), error)
            raise

    def set_status(self, status: RunStatus) -> None:
        """Set the run's status; any rank may."""
        self.pipeline.settle()
        self.ownership.set_status(status)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, on rank 0 only."""
        if self.leads:
            self.ownership.leave(status, error)

    def close(self) -> None:
        """Finish the running saves, and end the connections."""
        try:
            self.pipeline.close()
        finally:
            self._calls.break_links()

    def prepare(self, state: object, request: SaveRequest) -> FlatSave:
        """Take this rank's part of a state apart."""
        if request.storing.precision is not None:
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
        return FlatSave(
            request,
            flats[""].flat,
            {name: flats[name].flat for name in request.companions},
            {name: one.own for name, one in flats.items()},
        )

    def make(self, save: FlatSave, failed: Sequence[SaveRequest]) -> Checkpoint:
        """Make a save together with the other ranks; only what rank 0 logged is in `failed`."""
        act = partial(self._lead, save, failed) if self.leads else partial(self._follow, save)
        with self.ownership.lock:
            return self._calls.make(act, save.request.step)

    def _shares(self, save: FlatSave) -> dict[str, Share]:
        pool = None if self._calls.group.size == 1 else self._pools.hashing
        return {
            name: Share.of(flat, save.per_rank[name], pool) for name, flat in save.states.items()
        }

    def _lead(self, save: FlatSave, failed: Sequence[SaveRequest], talk: Talk) -> Checkpoint:
        shares, writer = self._shares(save), self._writer
        leading = Leading(writer, self._calls, talk, self._plans, shares, save.request)
        planned = plan_save(leading.agree(), self.ownership.run)
        commit = CollectiveSave(
            writer, self.ownership.token, planned, self.ownership.earlier, leading, failed
        )
        made = self.ownership.carry_through(commit, planned)
        names, slot = tell_slot(self.ownership.log)
        talk.order({"kind": "outcome", "failure": None, "n": commit.checkpoint_n, **names}, slot)
        return made

    def _follow(self, save: FlatSave, talk: Talk) -> Checkpoint:
        shares = self._shares(save)
        following = Following(self._writer, self._calls, talk, self._plans, shares, save.request)
        return self.ownership.checkpoint(following.follow())
