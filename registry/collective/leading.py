"""Rank 0's side of a save: it compares, plans, gathers, and commits once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from holdfast.registry.collective import agreement
from holdfast.registry.collective.boxes import Boxes
from holdfast.registry.collective.chunk_table import ChunkTable, as_digests
from holdfast.registry.collective.group import LinksBroken
from holdfast.registry.collective.outcome import find_write
from holdfast.registry.collective.part import PartOrder, PartReport, write_part
from holdfast.registry.collective.patterns import WrongLayout
from holdfast.registry.collective.per_rank import merge
from holdfast.registry.collective.plan import Plan
from holdfast.registry.collective.planning import make_plan
from holdfast.registry.collective.shards import ShardLeaf, whole_bytes
from holdfast.registry.collective.side import Side
from holdfast.registry.collective.storing import Storing, known_digests
from holdfast.registry.collective.talk import Message
from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.history.actions import Line
from holdfast.registry.history.log import new_signature
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.history.writer_token import WriterToken
from holdfast.registry.pytree import ArrayLeaf, FlatState
from holdfast.registry.pytree.leaves import NamedLeaf
from holdfast.registry.storage.codecs import COMPRESSIONS
from holdfast.registry.training.earlier_steps import EarlierSteps
from holdfast.registry.training.save_commit import SaveCommit
from holdfast.registry.training.save_request import PreparedSave
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import DIGEST_BYTES
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.finite import NAMED_AT_MOST
from holdfast.registry.writing.object_writer import placed_keys
from holdfast.registry.writing.placing import Written
from holdfast.registry.writing.readable import check_readable


@dataclass
class Leading(Side):
    """One save as rank 0 leads it.

    Attributes:
        began: The first slot in which the commit can be.
        signature: Of the commit, the same for all attempts.
    """

    def __post_init__(self) -> None:
        """Choose the signature of the commit."""
        self._where = f"{self.committer.log.run_id}: step {self.request.step}"
        self._greetings: Sequence[Message] = ()
        self._fresh: set[str] = set()
        self.began = self.committer.log.run.next_slot
        self.signature = new_signature()

    def agree(self) -> tuple[FlatState, dict[str, FlatState]]:
        """Hear all ranks, and compare what they have.

        Returns:
            The state and the companions, whole: a sharded tensor has no bytes here.

        Raises:
            IncompatibleState: The ranks have different values under one name.
            RankFailed: A rank was not heard of in time.
        """
        own = agreement.greeting(self.request, self.parts, self.plans.keys(self.parts))
        self._greetings = self.talk.gather(own, "beginning a save")
        agreement.check_requests(self._greetings, self._where)
        found = agreement.differing(self._greetings)
        if found is not None:
            raise self._explain(*found)
        values = self._check_copies()
        merged = {name: self._whole(name, values[name]) for name in self.parts}
        return merged.pop(""), merged

    def _explain(self, name: str, component: str) -> Exception:
        """Ask every rank what it has, and return the error for the first difference."""
        self.talk.order({"kind": "explain", "state": name, "component": component})
        own = agreement.explanation(self.parts, name, component)
        said = [one["value"] for one, _ in self.talk.gather(own, "comparing their states")]
        paths = [
            leaf.path
            for part in self.parts[name].flat.components
            if part.name == component
            for leaf in part.leaves
        ]
        return agreement.difference(self._where, component, said, paths)

    def _check_copies(self) -> dict[str, list[list[bytes]]]:
        """Compare copies of parts; return for each state the own values of each rank."""
        values: dict[str, list[list[bytes]]] = {name: [] for name in self.parts}
        copies: dict[str, list[Any]] = {name: [] for name in self.parts}
        for header, columns in self._greetings:
            left = iter(columns)
            for name, part in self.parts.items():
                width = part.copies.shape[1]
                copies[name].append(np.frombuffer(next(left), np.int64).reshape(-1, width))
                own = islice(left, header["states"][name]["own"])
                values[name].append([bytes(one) for one in own])
        for name, tables in copies.items():
            agreement.check_copies(tables, self.parts[name].layout.leaves, self._where)
        return values

    def _whole(self, name: str, values: Sequence[Sequence[bytes]]) -> FlatState:
        """Return a state with whole tensors, and the own values of all ranks."""
        part = self.parts[name]
        components = []
        for one in part.flat.components:
            leaves = tuple(map(_unsharded, one.leaves))
            components.append(merge(replace(one, leaves=leaves), values))
        return FlatState(part.flat.kind, tuple(components))

    # Plans

    def _plan(self, name: str) -> Plan:
        """Return the plan of a state, and make it if the ranks do not have it."""
        said = [header["states"][name] for header, _ in self._greetings]
        key = agreement.plan_key([one["layout"] for one in said])
        part = self.parts[name]
        if name in self._fresh:
            return self.plans.whole[name]
        if any(one["plan"] != key for one in said):
            self.talk.order({"kind": "layout", "state": name})
            found = self.talk.gather(
                agreement.layout_of(self.parts, name), "describing their layouts"
            )
            boxes = [Boxes.decode(columns) for _, columns in found]
            try:
                plan = make_plan(part.layout.structure, boxes)
            except WrongLayout as error:
                raise UnsupportedValue(
                    error.what,
                    where=part.layout.leaves[error.tensor].path,
                    found=error.found,
                    hint="Gather the tensor with .full_tensor(), or redistribute it.",
                ) from error
            self.plans.whole[name] = plan
            self.plans.parts[name] = (said[0]["layout"], key, plan.part(0))
            self._fresh.add(name)
        return self.plans.whole[name]

    # Storing

    def write(
        self, name: str, state: FlatState, bases: Sequence[PlacedState], watched: Sequence[str]
    ) -> Written:
        """Have every rank store its chunks of a state; put manifest and placement.

        Args:
            name: The companion; empty for the state.
            state: The state, whole.
            bases: Stored states of the run.
            watched: Patterns of the paths of tensors that are checked for NaN and infinity.
        """
        committer = self.committer
        skeletons = [canonical.encode(part.skeleton) for part in state.components]
        check_readable(state, skeletons)
        suspect = committer.writer.suspect
        sound = [
            base for base in bases if suspect.isdisjoint(placed_keys(base.place, base.placement))
        ]
        plan = self._plan(name)
        known = known_digests(self.parts[name].layout, sound)
        codec = COMPRESSIONS[
            self.request.compression or committer.store.config.compression or "none"
        ]
        reports = self._have_stored(name, plan, known, codec, watched)
        digests = np.zeros((len(plan.owner), DIGEST_BYTES), np.uint8)
        for rank, report in enumerate(reports):
            digests[plan.owned_by(rank)] = as_digests(report.digests)
        fresh = ChunkTable.joined([report.stored for report in reports])
        said = [header["states"][name]["small"] for header, _ in self._greetings]
        storing = Storing(
            committer,
            self.parts[name],
            said,
            state,
            skeletons,
            digests,
            sound,
            fresh,
            codec,
            watched,
        )
        written = storing.finish()
        if not watched:
            return written
        tensors = {number for report in reports for number in report.nonfinite}
        leaves = self.parts[name].layout.leaves
        wrong = {leaves[number].path for number in tensors} | storing.nonfinite
        paths = [leaf.path for part in state.components for leaf in part.leaves]
        return replace(written, nonfinite=tuple(p for p in paths if p in wrong)[:NAMED_AT_MOST])

    def _have_stored(
        self, name: str, plan: Plan, known: Any, codec: str, watched: Sequence[str]
    ) -> list[PartReport]:
        """Tell the ranks to store their chunks; return what they have stored."""
        group, talk = self.calls.group, self.talk
        epoch = self.committer.writer.epoch  # u0, or the mark that refused the attempt before
        talk.order(
            {
                "kind": "write",
                "state": name,
                "codec": codec,
                "watched": list(watched),
                "epoch": epoch,
                "links": self.calls.links,
                "write": self.signature.write,
                "began": self.began,
                "plan": self.plans.parts[name][1],
            }
        )
        is_new = name in self._fresh
        for rank in range(1, group.size):
            bytes_known = known[plan.owned_by(rank)].tobytes()
            columns = plan.part(rank).encode() if is_new else []
            talk.order_one(rank, {}, bytes_known, *columns)
        mine = memoryview(known[plan.owned_by(0)].tobytes())
        order = PartOrder(self.calls.links, codec, watched, epoch, mine)
        layout, part = self.parts[name].layout, self.plans.part(name)
        committer = self.committer
        try:
            report = write_part(committer.store, committer.writer, group, layout, part, order)
        except LinksBroken as error:
            group.break_links(self.calls.links)
            talk.say_why(error, "exchanging parts of tensors")
        said = talk.gather(report.encode(), "storing their parts")
        return [report, *(PartReport.of(*one) for one in said[1:])]


class CollectiveSave(SaveCommit):
    """A running save of all ranks, on rank 0."""

    def __init__(
        self,
        committer: Committer,
        writer_token: WriterToken,
        save: PreparedSave,
        earlier: EarlierSteps,
        leading: Leading,
    ) -> None:
        super().__init__(committer, writer_token, save, earlier)
        self._leading = leading
        self._searched = leading.began
        self.signed = leading.signature

    def _write(
        self, state: FlatState, bases: Sequence[PlacedState], watched: Sequence[str] = ()
    ) -> Written:
        companions = self._save.companions.items()
        name = next((name for name, flat in companions if flat is state), "")
        return self._leading.write(name, state, bases, watched)

    def lines(self, run: RunManifest) -> Sequence[Line] | None:
        """Return the lines of the slot; none if a slot of an earlier attempt has landed (CS5)."""
        log = self._committer.log
        if run.next_slot > self._searched:
            found = find_write(
                log.fetch(range(self._searched, run.next_slot)), self._leading.signature.write
            )
            self._searched = run.next_slot
            if found is not None:
                self.outcome = found
                return None
        return super().lines(run)


def _unsharded(leaf: ArrayLeaf) -> ArrayLeaf:
    if not isinstance(leaf, ShardLeaf):
        return leaf
    return NamedLeaf(leaf.dtype, leaf.whole, whole_bytes(leaf), leaf.path)
