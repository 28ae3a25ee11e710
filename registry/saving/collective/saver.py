"""The saver of a run whose ranks save together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.errors import Conflict, InvalidInput, RankFailed
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, LoadReport, Stored
from holdfast.registry.saving.collective import agreement, shards
from holdfast.registry.saving.collective.agreement import RankPart
from holdfast.registry.saving.collective.group import Group, LinksBroken
from holdfast.registry.saving.collective.leading import CollectiveSave, Leading, Plans, Side
from holdfast.registry.saving.collective.loading import load_into
from holdfast.registry.saving.collective.part import PartOrder, find_write, write_part
from holdfast.registry.saving.collective.plan import Part
from holdfast.registry.saving.collective.talk import Calls, Talk, broken
from holdfast.registry.saving.ownership import Ownership
from holdfast.registry.saving.pipeline import Pipeline
from holdfast.registry.saving.save_request import FlatSave, SaveRequest, plan_save
from holdfast.registry.values import collector_paused
from holdfast.registry.writing import Committer, NewCommit


class Following(Side):
    """A save on a rank above 0: carry out rank 0's orders; commit nothing."""

    #: The write and the first slot that can hold it, once this rank has reported its chunks.
    _reported: tuple[str, int] | None = None

    def follow(self) -> int:
        """Take part until the save has ended; return the number of its checkpoint."""
        plans = self.plans.keys(self.parts)
        self.talk.report(agreement.greeting(self.request, self.parts, plans))
        while True:
            try:
                header, _ = self.talk.hear("leading the save")
            except RankFailed as error:
                return self._look_for_it(error)
            if header["kind"] == "outcome":
                if header["failure"] is not None:
                    raise self.talk.failed(header)
                return int(header["n"])
            self._obey(header)

    def _obey(self, order: Mapping[str, Any]) -> None:
        name, talk = order["state"], self.talk
        if order["kind"] == "explain":
            talk.report(agreement.explanation(self.parts, name, order["component"]))
        elif order["kind"] == "layout":
            talk.report(agreement.layout_of(self.parts, name))
        else:
            _, columns = talk.hear_own("leading the save")
            self.calls.links = order["links"]
            try:
                talk.report(self._store(name, order, columns))
            except LinksBroken as error:
                self.calls.group.break_links(self.calls.links)
                talk.report(broken(error, self.calls.group.rank))
                return
            self._reported = order["write"], order["began"]

    def _store(self, name: str, order: Mapping[str, Any], columns: Sequence[memoryview]) -> bytes:
        known, *tables = columns
        layout = self.parts[name].layout
        if tables:
            key = agreement.layout_digest(layout), order["plan"]
            self.plans.parts[name] = (*key, Part.decode(tables))
        told = PartOrder(order["links"], order["codec"], order["watched"], order["epoch"], known)
        writer, group = self.writer, self.calls.group
        part = self.plans.part(name)
        return write_part(writer.store, writer.objects, group, layout, part, told).encode()

    def _look_for_it(self, error: RankFailed) -> int:
        """Look into the log for the outcome (CS5)."""
        if self._reported is None:
            raise error
        log = self.writer.log
        write, began = self._reported
        run = log.refresh()
        found = find_write(log.fetch(range(began, run.next_slot)), write)
        if found is not None:
            return found
        unknown = RankFailed(
            "rank 0 stopped answering during the commit: the outcome is unknown",
            where="rank 0",
            found=error.found,
            hint="The save may still become visible. Saving the same state again is safe.",
        )
        unknown.rank = 0
        raise unknown from error


class CollectiveSaver:
    """A saver of which every rank has one, and whose saves all ranks make together.

    A collective save, from the call to the last byte; CS1 to CS5 are rules of docs/spec.md:

    1. `prepare` on each rank flattens its part of the state (`FlatSave`): a sharded tensor becomes
       a leaf with its box.
    2. `make` on each rank reports to rank 0: arguments, a digest of each component, checksums of
       replicas.
    3. Rank 0 compares the reports. At a difference all ranks raise, and nothing is written.
    4. Rank 0 plans the save of the whole state (`PlannedSave`), makes `CollectiveSave` and gives it
       to its committer, which checks it.
    5. If the layout is new, rank 0 gathers the boxes, makes the plan and sends each rank its part.
    6. Rank 0 orders the ranks to store. They send pieces of chunks to the owners of the chunks.
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
        self.line = Ownership(committer)
        self.pipeline = Pipeline(
            self.line, self.prepare, self.make, guard=self.abstaining, only_waits=True
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
    def _leads(self) -> bool:
        return self._calls.group.rank == 0

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change of the run's owner, on rank 0; it takes the run over."""
        if not self._leads:
            raise Conflict(
                f"only rank 0 may make this {change.noun}",
                where=f"rank {self._calls.group.rank}",
                hint="Guard the call: `if rank == 0:`. All ranks call `save`.",
            )
        self.pipeline.settle()
        return self.line.commit(change)

    def fill(
        self, stored: Stored, target: object, component: str | None, *, strict: bool
    ) -> LoadReport:
        """Load a stored state into this rank's part of a target."""
        return load_into(
            stored, target, group=self._calls.group, component=component, strict=strict
        )

    @contextmanager
    def abstaining(self, step: int | None = None) -> Iterator[None]:
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
        self.line.set_status(status)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, on rank 0 only."""
        if self._leads:
            self.line.leave(status, error)

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

    def make(self, save: FlatSave, carries: Sequence[SaveRequest]) -> Checkpoint:  # noqa: ARG002
        """Make a save together with the other ranks. `carries` is empty, since `may_fail` is 0."""
        take_part = self._lead if self._leads else self._follow
        with self.line.lock:
            return self._calls.make(partial(take_part, save), save.request.step)

    def _parts(self, save: FlatSave) -> dict[str, RankPart]:
        pool = None if self._calls.group.size == 1 else self._pools.hashing
        return {
            name: RankPart.of(flat, save.per_rank[name], pool) for name, flat in save.states.items()
        }

    def _lead(self, save: FlatSave, talk: Talk) -> Checkpoint:
        parts, writer = self._parts(save), self._writer
        leading = Leading(writer, self._calls, talk, self._plans, parts, save.request)
        planned = plan_save(leading.agree(), self.line.run)
        commit = CollectiveSave(writer, self.line.token, planned, self.line.earlier, leading)
        made = self.line.carry_through(commit, planned)
        talk.order({"kind": "outcome", "failure": None, "n": commit.outcome})
        return made

    def _follow(self, save: FlatSave, talk: Talk) -> Checkpoint:
        parts = self._parts(save)
        following = Following(self._writer, self._calls, talk, self._plans, parts, save.request)
        n = following.follow()
        self.line.refresh()
        return self.line.checkpoint(n)
