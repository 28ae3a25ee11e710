"""The two sides of a collective save: rank 0 leads and commits once for all, the others follow.

`Side` is their common part. The saver, `holdfast.registry.saving.collective.saver`, makes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from holdfast.registry.errors import RankFailed, UnsupportedValue
from holdfast.registry.history import PlacedState, RunLog, WriterToken, new_authorship
from holdfast.registry.history.actions import AddCheckpoint, Line
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving.collective import agreement
from holdfast.registry.saving.collective.agreement import Share
from holdfast.registry.saving.collective.exchange import ChunkOrder, ChunkReport, ChunkStoring
from holdfast.registry.saving.collective.group import LinksBroken
from holdfast.registry.saving.collective.patterns import WrongLayout
from holdfast.registry.saving.collective.plan import Plan, PlanPart, make_plan
from holdfast.registry.saving.collective.shards import Boxes, ShardLeaf, merge_values, whole_leaf
from holdfast.registry.saving.collective.state_end import (
    ChunkTable,
    StateEnd,
    as_digests,
    known_digests,
)
from holdfast.registry.saving.collective.talk import Calls, Message, Talk, broken_report
from holdfast.registry.saving.collective.telling import hear_slot
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.save_commit import SaveCommit
from holdfast.registry.saving.save_request import FlatSave, PlannedSave, SaveRequest
from holdfast.registry.values import DIGEST_BYTES, Digest, canonical
from holdfast.registry.writing import (
    NAMED_AT_MOST,
    StateWriter,
    Written,
    check_readable,
    codec_and_distance,
)


@dataclass
class Plans:
    """The plans that this rank remembers, by the name of the state."""

    #: The digest of this rank's boxes, that of the boxes of all ranks, and this rank's part.
    mine: dict[str, tuple[str, str, PlanPart]] = field(default_factory=dict)
    whole: dict[str, Plan] = field(default_factory=dict)  # the plans themselves, only on rank 0

    def keys(self, shares: Mapping[str, Share]) -> dict[str, str]:
        """Return the digests of the plans that fit this rank's boxes."""
        return {
            name: known[1]
            for name, share in shares.items()
            if (known := self.mine.get(name)) is not None
            and known[0] == agreement.layout_digest(share.layout)
        }

    def part(self, name: str) -> PlanPart:
        """Return this rank's part of a state's plan."""
        return self.mine[name][2]


@dataclass
class Side:
    """One rank's side of a save."""

    writer: StateWriter  # of this rank's handle
    calls: Calls  # the calls of the ranks
    talk: Talk
    plans: Plans  # the plans that this rank remembers
    shares: Mapping[str, Share]  # this rank's share of each state
    request: SaveRequest  # the arguments of the save


@dataclass
class Leading(Side):
    """Rank 0's side of one save."""

    def __post_init__(self) -> None:
        """Choose the authorship of the commit."""
        self._where = f"{self.writer.log.run_id}: step {self.request.step}"
        self._greetings: Sequence[Message] = ()
        self._newly_planned: set[str] = set()  # states whose plan the other ranks lack
        self.first_slot = self.writer.log.run.next_slot  # the first that can have the commit
        self.authorship = new_authorship()  # of the commit, the same in all attempts

    def agree(self) -> FlatSave:
        """Receive the first messages of all ranks, and compare them; return the whole save."""
        own = agreement.greeting(self.request, self.shares, self.plans.keys(self.shares))
        self._greetings = self.talk.gather(own, "beginning a save")
        agreement.check_requests(self._greetings, self._where)
        found = agreement.differing(self._greetings)
        if found is not None:
            raise self._explain(*found)
        values = self._check_copies()
        merged = {name: self._whole(name, values[name]) for name in self.shares}
        return FlatSave(self.request, merged.pop(""), merged)

    def _explain(self, name: str, component: str) -> Exception:
        """Ask every rank for its values, and return the error for the first difference."""
        self.talk.order({"kind": "explain", "state": name, "component": component})
        own = agreement.explanation(self.shares, name, component)
        said = [one["value"] for one, _ in self.talk.gather(own, "comparing their states")]
        paths = [
            leaf.path
            for one in self.shares[name].flat.components
            if one.name == component
            for leaf in one.leaves
        ]
        return agreement.difference(self._where, component, said, paths)

    def _check_copies(self) -> dict[str, list[list[bytes]]]:
        """Compare replicas; return each state's `PerRank` values, by rank."""
        values: dict[str, list[list[bytes]]] = {name: [] for name in self.shares}
        copies: dict[str, list[Any]] = {name: [] for name in self.shares}
        for header, columns in self._greetings:
            left = iter(columns)
            for name, share in self.shares.items():
                width = share.layout.rows.shape[1] + 1
                copies[name].append(np.frombuffer(next(left), np.int64).reshape(-1, width))
                own = islice(left, header["states"][name]["own"])
                values[name].append([bytes(one) for one in own])
        for name, tables in copies.items():
            agreement.check_copies(tables, self.shares[name].layout.leaves, self._where)
        return values

    def _whole(self, name: str, values: Sequence[Sequence[bytes]]) -> FlatState:
        """Return a state with whole tensors and the `PerRank` values of all ranks."""
        flat = self.shares[name].flat
        components = []
        for one in flat.components:
            leaves = (
                whole_leaf(leaf) if isinstance(leaf, ShardLeaf) else leaf for leaf in one.leaves
            )
            components.append(merge_values(replace(one, leaves=tuple(leaves)), values))
        return FlatState(flat.kind, tuple(components))

    # Plans

    def _plan(self, name: str) -> Plan:
        """Return the plan of a state; make it if a rank does not have it."""
        said = [header["states"][name] for header, _ in self._greetings]
        key = Digest.of("\n".join(one["layout"] for one in said).encode()).hex()
        layout = self.shares[name].layout
        if name in self._newly_planned:
            return self.plans.whole[name]
        if any(one["plan"] != key for one in said):
            self.talk.order({"kind": "layout", "state": name})
            found = self.talk.gather(
                agreement.layout_of(self.shares, name), "describing their layouts"
            )
            boxes = [Boxes.decode(columns) for _, columns in found]
            try:
                plan = make_plan(layout.structure, boxes)
            except WrongLayout as error:
                raise UnsupportedValue(
                    error.what,
                    where=layout.leaves[error.tensor].path,
                    found=error.found,
                    hint="Gather the tensor with .full_tensor(), or redistribute it.",
                ) from error
            self.plans.whole[name] = plan
            self.plans.mine[name] = (said[0]["layout"], key, plan.part(0))
            self._newly_planned.add(name)
        return self.plans.whole[name]

    # Storing

    def write(
        self, save: PlannedSave, name: str, bases: Sequence[PlacedState], watched: Sequence[str]
    ) -> Written:
        """Order every rank to store its chunks of a state; put manifest and placement."""
        writer, state = self.writer, save.companions[name] if name else save.state
        skeletons = [canonical.encode(one.skeleton) for one in state.components]
        check_readable(state, skeletons)
        sound = writer.objects.sound(bases)
        plan, share = self._plan(name), self.shares[name]
        known = known_digests(share.layout, sound)
        codec, _ = codec_and_distance(self.request.storing, writer.store.config)
        reports = self._have_stored(save, name, known, codec, watched)
        digests = np.zeros((len(plan.owner), DIGEST_BYTES), np.uint8)
        for rank, report in enumerate(reports):
            digests[plan.owned_by(rank)] = as_digests(report.digests)
        end = StateEnd(
            writer=writer,
            layout=share.layout,
            small=[header["states"][name]["small"] for header, _ in self._greetings],
            state=state,
            skeletons=skeletons,
            digests=digests,
            bases=sound,
            stored=ChunkTable.joined([report.stored for report in reports]),
            codec=codec,
            watched=watched,
        )
        written = end.finish()
        if not watched:
            return written
        tensors = {number for report in reports for number in report.nonfinite}
        wrong = {share.layout.leaves[number].path for number in tensors} | end.nonfinite
        paths = [leaf.path for leaf in state.leaves]
        return replace(written, nonfinite=tuple(p for p in paths if p in wrong)[:NAMED_AT_MOST])

    def _have_stored(
        self, save: PlannedSave, name: str, known: Any, codec: str, watched: Sequence[str]
    ) -> list[ChunkReport]:
        """Order the ranks to store their chunks; return their reports."""
        writer, group, talk = self.writer, self.calls.group, self.talk
        epoch = writer.objects.observe()  # u0 of CS1, or the mark that refused the last attempt
        plan = self.plans.whole[name]
        talk.order(
            {
                "kind": "store",
                "state": name,
                "codec": codec,
                "watched": list(watched),
                "epoch": epoch,
                "links": self.calls.links,
                "write": self.authorship.write,
                "first_slot": self.first_slot,
                "phase": save.phase,
                "plan": self.plans.mine[name][1],
            }
        )
        for rank in range(1, group.size):
            bytes_known = known[plan.owned_by(rank)].tobytes()
            columns = plan.part(rank).encode() if name in self._newly_planned else []
            talk.order_one(rank, {}, bytes_known, *columns)
        mine = memoryview(known[plan.owned_by(0)].tobytes())
        order = ChunkOrder(self.calls.links, codec, watched, epoch, mine)
        layout, part = self.shares[name].layout, self.plans.part(name)
        try:
            report = ChunkStoring(writer, layout, part, order).write(group)
        except LinksBroken as error:
            group.break_links(self.calls.links)
            talk.say_why(error, "exchanging parts of tensors")
        said = talk.gather(report.encode(), "storing their parts")
        return [report, *(ChunkReport.of(*one) for one in said[1:])]


class Following(Side):
    """A save on a rank above 0: carry out rank 0's orders; commit nothing."""

    #: The order that it carried out, once it has reported its chunks.
    _reported: Mapping[str, Any] | None = None

    def follow(self) -> int:
        """Take part until the save has ended; return the number of its checkpoint."""
        plans = self.plans.keys(self.shares)
        self.talk.report(agreement.greeting(self.request, self.shares, plans))
        while True:
            try:
                header, columns = self.talk.hear("leading the save")
            except RankFailed as error:
                return self._look_for_it(error)
            if header["kind"] == "outcome":
                if header["failure"] is not None:
                    raise self.talk.hear_failure(header)
                hear_slot(self.writer.log, header, columns)
                return int(header["n"])
            self._obey(header)

    def _obey(self, order: Mapping[str, Any]) -> None:
        name, talk = order["state"], self.talk
        if order["kind"] == "explain":
            talk.report(agreement.explanation(self.shares, name, order["component"]))
        elif order["kind"] == "layout":
            talk.report(agreement.layout_of(self.shares, name))
        elif order["kind"] != "store":
            raise AssertionError(f"an order of an unknown kind: {order['kind']}")
        else:
            _, columns = talk.hear_own("leading the save")
            self.calls.links = order["links"]
            try:
                talk.report(self._store(name, order, columns))
            except LinksBroken as error:
                self.calls.group.break_links(self.calls.links)
                talk.report(broken_report(error, self.calls.group.rank))
                return
            self._reported = order

    def _store(self, name: str, order: Mapping[str, Any], columns: Sequence[memoryview]) -> bytes:
        known, *tables = columns
        layout = self.shares[name].layout
        if tables:
            key = agreement.layout_digest(layout), order["plan"]
            self.plans.mine[name] = (*key, PlanPart.decode(tables))
        told = ChunkOrder(order["links"], order["codec"], order["watched"], order["epoch"], known)
        storing = ChunkStoring(self.writer, layout, self.plans.part(name), told)
        return storing.write(self.calls.group).encode()

    def _look_for_it(self, error: RankFailed) -> int:
        """Look into the log for the outcome (CS5)."""
        if self._reported is None:
            raise error
        self.writer.log.refresh()
        first_slot, write, phase = (
            self._reported[name] for name in ("first_slot", "write", "phase")
        )
        found = find_save(self.writer, first_slot, write, phase, self.request.step)
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


class CollectiveSave(SaveCommit):
    """A running save of all ranks, on rank 0: it has `Leading.write` write each state."""

    def __init__(
        self,
        writer: StateWriter,
        writer_token: WriterToken,
        save: PlannedSave,
        earlier: EarlierSteps,
        leading: Leading,
        failed: Sequence[SaveRequest],
    ) -> None:
        write = partial(leading.write, save)
        super().__init__(writer, writer_token, save, earlier, write_state=write, failed=failed)
        self._leading = leading
        self._searched = leading.first_slot
        self.authorship = leading.authorship

    def lines(self, run: RunManifest) -> Sequence[Line] | None:
        """Return the lines of the slot; none if a slot of an earlier attempt has landed (CS5)."""
        if run.next_slot > self._searched:
            write, save = self._leading.authorship.write, self._save
            found = find_save(self._writer, self._searched, write, save.phase, save.request.step)
            self._searched = run.next_slot
            if found is not None:
                self.checkpoint_n = found
                return None
        return super().lines(run)


def find_save(writer: StateWriter, first: int, write: str, phase: str, step: int) -> int | None:
    """Return the checkpoint that a write added or repeated, by the slots from the first one on."""
    log = writer.log
    for slot in log.fetch(range(first, log.run.next_slot)):
        for _, commit in slot.commits:
            if commit.write == write:
                if any(isinstance(one, AddCheckpoint) for one in commit.actions):
                    return commit.n
                # A repeat names its checkpoint only if it has new metrics for it.
                then = RunLog(writer.store, log.run_id)
                return then.read_to(slot.number + 1).at_step(phase, step)[0].n
    return None
