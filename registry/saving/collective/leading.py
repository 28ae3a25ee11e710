"""Rank 0's side of a save: it compares, plans, gathers, and commits once for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.errors import IntegrityError, UnsupportedValue
from holdfast.registry.history import PlacedState, WriterToken, new_signature
from holdfast.registry.history.actions import Line
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import (
    INLINE_BYTES,
    Component,
    Manifest,
    Placement,
    TensorEntry,
    grid,
)
from holdfast.registry.objects.codecs import COMPRESSIONS
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState, NamedLeaf
from holdfast.registry.saving.collective import agreement
from holdfast.registry.saving.collective.agreement import RankPart
from holdfast.registry.saving.collective.boxes import Boxes
from holdfast.registry.saving.collective.group import LinksBroken
from holdfast.registry.saving.collective.part import (
    ChunkTable,
    Digests,
    PartOrder,
    PartReport,
    as_digests,
    find_write,
    named_digests,
    write_part,
)
from holdfast.registry.saving.collective.patterns import WrongLayout
from holdfast.registry.saving.collective.plan import Part, Plan, make_plan
from holdfast.registry.saving.collective.shards import (
    Layout,
    ShardLeaf,
    merge_values,
    whole_bytes,
    whole_shape,
)
from holdfast.registry.saving.collective.talk import Calls, Message, Talk
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.save_commit import SaveCommit
from holdfast.registry.saving.save_request import FlatSave, PlannedSave, SaveRequest
from holdfast.registry.values import DIGEST_BYTES, Digest, canonical
from holdfast.registry.writing import (
    NAMED_AT_MOST,
    ChosenKeys,
    Chunk,
    StateWriter,
    Written,
    build_placement,
    check_readable,
    chunked_entry,
    cover,
    is_finite,
    is_watched,
    locations_of,
    place_manifest,
    placed_keys,
    write_packs,
)

# The end of storing one state: what rank 0 alone has, then manifest and placement.


class StateEnd:
    """The end of storing one state: what rank 0 alone has, manifest and placement.

    Attributes:
        nonfinite: Paths of watched tensors with NaN or infinity that only rank 0 stores.
    """

    def __init__(
        self,
        writer: StateWriter,
        part: RankPart,
        small: Sequence[Any],
        state: FlatState,
        skeletons: Sequence[bytes],
        digests: Any,
        bases: Sequence[PlacedState],
        fresh: ChunkTable,
        codec: str,
        watched: Sequence[str],
    ) -> None:
        self._writer, self._said, self._state = writer, small, state
        self._skeletons, self._digests, self._bases = skeletons, digests, bases
        self._fresh, self._codec, self._watched = fresh, codec, watched
        self._layout = part.layout
        self._number = {leaf.path: n for n, leaf in enumerate(part.layout.leaves)}
        self._small = {leaf.path: n for n, leaf in enumerate(part.layout.inline)}
        self._lists: dict[Digest, bytes] = {}
        self._chunks: dict[Digest, Chunk] = {}
        self.nonfinite: set[str] = set()

    def finish(self) -> Written:
        """Put the remaining objects; return the state with its place."""
        components = {
            part.name: self._component(part, skeleton)
            for part, skeleton in zip(self._state.components, self._skeletons, strict=True)
        }
        manifest = Manifest(self._state.kind, components)
        for base in self._bases:
            if base.manifest.digest == manifest.digest and base.placement.components is None:
                keys = placed_keys(base.place, base.placement)
                return Written(base, ChosenKeys(keys, cover(self._bases)), 0)
        store, writer = self._writer.store, self._writer.objects
        own = ChunkTable.of(write_packs(store, writer, self._groups(), self._codec))
        placement, size = self._placement(manifest, ChunkTable.joined([self._fresh, own]))
        return place_manifest(store, writer, manifest, placement, self._lists, self._bases, size)

    @cached_property
    def _stored(self) -> ChunkTable:
        """The chunks of the bases."""
        if self._have_deltas:
            return ChunkTable.of(locations_of(self._bases))
        return ChunkTable.joined([*map(ChunkTable.of_state, self._bases)])

    @property
    def _have_deltas(self) -> bool:
        return any(base.placement.rows.has_deltas for base in self._bases)

    def _placement(self, manifest: Manifest, fresh: ChunkTable) -> tuple[Placement, int]:
        """Return the placement, and the stored bytes of new chunks."""
        wanted, table = named_digests(manifest, self._lists), fresh
        distinct, rows = table.find(wanted)
        if (rows < 0).any():
            table = ChunkTable.joined([fresh, self._stored])
            distinct, rows = table.find(wanted)
        for position in distinct[rows < 0].tolist():
            raise IntegrityError(
                "no rank has stored a chunk of the state",
                where=f"chunk {Digest(wanted[position].tobytes()).short}",
                hint="Nothing was committed; save again.",
            )
        size = int(table.rows["stored_bytes"][rows[rows < len(fresh)]].sum())
        if not self._have_deltas:
            return table.placement(manifest, rows), size
        locations = locations_of(self._bases) | dict(fresh.items())
        return build_placement(manifest, self._lists, locations), size

    def _component(self, part: FlatComponent, skeleton: bytes) -> Component:
        return Component.build(part.skeleton, [*map(self._entry, part.leaves)], skeleton)

    def _entry(self, leaf: ArrayLeaf) -> TensorEntry:
        number = self._number.get(leaf.path)
        if number is not None:
            first = self._layout.structure.first
            rows = self._digests[first[number] : first[number + 1]]
            return chunked_entry(leaf, rows.tobytes(), self._lists)
        if leaf.nbytes <= INLINE_BYTES:
            data = self._inline(leaf)
            self._look(leaf, data)
            return TensorEntry(leaf.dtype, leaf.shape, inline=data)
        return chunked_entry(leaf, b"".join(self._cut(leaf)), self._lists)

    def _inline(self, leaf: ArrayLeaf) -> bytes:
        at = self._small.get(leaf.path)
        if at is None:
            return bytes(leaf.buffer()) if leaf.nbytes else b""
        parts = [one[at] for one in self._said]
        where = self._writer.log.run_id
        return agreement.join_small(self._layout.inline[at], parts, where)

    def _cut(self, leaf: ArrayLeaf) -> Iterator[Digest]:
        """Yield the chunks of a tensor that only rank 0 stores: a `PerRank` value of some rank."""
        start = 0
        view = leaf.buffer()
        self._look(leaf, view)
        for number, size in enumerate(grid(leaf.dtype, leaf.shape).sizes()):
            data = view[start : start + size]
            digest = Digest(hashlib.sha256(data).digest())
            named = NamedLeaf(leaf.dtype, leaf.shape, leaf.nbytes, leaf.path)
            self._chunks.setdefault(digest, Chunk(digest, data, named, number))
            start += size
            yield digest

    def _look(self, leaf: ArrayLeaf, data: Any) -> None:
        if is_watched(leaf, self._watched) and not is_finite(data, leaf.dtype):
            self.nonfinite.add(leaf.path)

    def _groups(self) -> Iterator[list[Chunk]]:
        """Yield the chunks that only rank 0 stores, and the digest lists."""
        for digest, data in self._lists.items():
            self._chunks.setdefault(digest, Chunk(digest, memoryview(data)))
        wanted = as_digests(b"".join(self._chunks))
        known = [table.find(wanted)[1] >= 0 for table in (self._fresh, self._stored)]
        chunks = list(self._chunks.values())
        new = [chunks[n] for n in np.flatnonzero(~(known[0] | known[1])).tolist()]
        if new:
            yield new


def known_digests(layout: Layout, bases: Sequence[PlacedState]) -> Digests:
    """Return the digests of a plan's chunks in stored states; zeros if no state has the chunk."""
    first = layout.structure.first
    found = np.zeros((int(first[-1]), DIGEST_BYTES), np.uint8)
    number = {leaf.path: n for n, leaf in enumerate(layout.leaves)}
    done: set[int] = set()
    for base in bases:
        for component, part in base.manifest.components.items():
            paths = pytree.leaf_paths(component, part.skeleton)
            for index, entry in enumerate(part.tensors):
                at = number.get(paths.get(index, ""))
                if at is None or at in done or entry.inline is not None:
                    continue
                leaf = layout.leaves[at]
                if (entry.dtype, entry.shape) != (str(leaf.dtype), whole_shape(leaf)):
                    continue
                done.add(at)
                found[first[at] : first[at + 1]] = as_digests(entry.digest_bytes(base.lists))
    return found


# The common part of both sides of a save: rank 0's and the other ranks'.


@dataclass
class Plans:
    """The plans that this rank remembers, by the name of the state."""

    #: This rank's part, and the digest of the boxes of all ranks.
    parts: dict[str, tuple[str, str, Part]] = field(default_factory=dict)
    whole: dict[str, Plan] = field(default_factory=dict)  # the plans themselves, only on rank 0

    def keys(self, parts: Mapping[str, RankPart]) -> dict[str, str]:
        """Return the digests of the plans that fit this rank's boxes."""
        return {
            name: known[1]
            for name, part in parts.items()
            if (known := self.parts.get(name)) is not None
            and known[0] == agreement.layout_digest(part.layout)
        }

    def part(self, name: str) -> Part:
        """Return this rank's part of a state's plan."""
        return self.parts[name][2]


@dataclass
class Side:
    """One rank's side of a save."""

    writer: StateWriter  # of this rank's handle
    calls: Calls  # the calls of the ranks
    talk: Talk
    plans: Plans  # the plans that this rank remembers
    parts: Mapping[str, RankPart]  # this rank's share of each state
    request: SaveRequest  # the arguments of the save


@dataclass
class Leading(Side):
    """Rank 0's side of one save.

    Attributes:
        began: The first slot in which the commit can be.
        signature: Signature of the commit, the same in all attempts.
    """

    def __post_init__(self) -> None:
        """Choose the signature of the commit."""
        self._where = f"{self.writer.log.run_id}: step {self.request.step}"
        self._greetings: Sequence[Message] = ()
        self._fresh: set[str] = set()
        self.began = self.writer.log.run.next_slot
        self.signature = new_signature()

    def agree(self) -> FlatSave:
        """Receive the first messages of all ranks, and compare them; return the whole save."""
        own = agreement.greeting(self.request, self.parts, self.plans.keys(self.parts))
        self._greetings = self.talk.gather(own, "beginning a save")
        agreement.check_requests(self._greetings, self._where)
        found = agreement.differing(self._greetings)
        if found is not None:
            raise self._explain(*found)
        values = self._check_copies()
        merged = {name: self._whole(name, values[name]) for name in self.parts}
        return FlatSave(self.request, merged.pop(""), merged)

    def _explain(self, name: str, component: str) -> Exception:
        """Ask every rank for its values, and return the error for the first difference."""
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
        """Compare replicas; return each state's `PerRank` values, by rank."""
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
        """Return a state with whole tensors and the `PerRank` values of all ranks."""
        part = self.parts[name]
        components = []
        for one in part.flat.components:
            leaves = tuple(map(_unsharded, one.leaves))
            components.append(merge_values(replace(one, leaves=leaves), values))
        return FlatState(part.flat.kind, tuple(components))

    # Plans

    def _plan(self, name: str) -> Plan:
        """Return the plan of a state; make it if a rank does not have it."""
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
        self, save: PlannedSave, name: str, bases: Sequence[PlacedState], watched: Sequence[str]
    ) -> Written:
        """Order every rank to store its chunks of a state; put manifest and placement."""
        writer, state = self.writer, save.companions[name] if name else save.state
        skeletons = [canonical.encode(part.skeleton) for part in state.components]
        check_readable(state, skeletons)
        suspect = writer.objects.suspect
        sound = [
            base for base in bases if suspect.isdisjoint(placed_keys(base.place, base.placement))
        ]
        plan = self._plan(name)
        known = known_digests(self.parts[name].layout, sound)
        codec = COMPRESSIONS[
            self.request.storing.compression or writer.store.config.compression or "none"
        ]
        reports = self._have_stored(name, plan, known, codec, watched)
        digests = np.zeros((len(plan.owner), DIGEST_BYTES), np.uint8)
        for rank, report in enumerate(reports):
            digests[plan.owned_by(rank)] = as_digests(report.digests)
        fresh = ChunkTable.joined([report.stored for report in reports])
        said = [header["states"][name]["small"] for header, _ in self._greetings]
        end = StateEnd(
            writer,
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
        written = end.finish()
        if not watched:
            return written
        tensors = {number for report in reports for number in report.nonfinite}
        leaves = self.parts[name].layout.leaves
        wrong = {leaves[number].path for number in tensors} | end.nonfinite
        paths = [leaf.path for part in state.components for leaf in part.leaves]
        return replace(written, nonfinite=tuple(p for p in paths if p in wrong)[:NAMED_AT_MOST])

    def _have_stored(
        self, name: str, plan: Plan, known: Any, codec: str, watched: Sequence[str]
    ) -> list[PartReport]:
        """Order the ranks to store their chunks; return their reports."""
        group, talk = self.calls.group, self.talk
        epoch = self.writer.objects.epoch  # u0, or the mark that refused the attempt before
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
        writer = self.writer
        try:
            report = write_part(writer.store, writer.objects, group, layout, part, order)
        except LinksBroken as error:
            group.break_links(self.calls.links)
            talk.say_why(error, "exchanging parts of tensors")
        said = talk.gather(report.encode(), "storing their parts")
        return [report, *(PartReport.of(*one) for one in said[1:])]


class CollectiveSave(SaveCommit):
    """A running save of all ranks, on rank 0."""

    def __init__(
        self,
        writer: StateWriter,
        writer_token: WriterToken,
        save: PlannedSave,
        earlier: EarlierSteps,
        leading: Leading,
    ) -> None:
        put = partial(leading.write, save)
        super().__init__(writer, writer_token, save, earlier, put=put)
        self._leading = leading
        self._searched = leading.began
        self.signed = leading.signature

    def lines(self, run: RunManifest) -> Sequence[Line] | None:
        """Return the lines of the slot; none if a slot of an earlier attempt has landed (CS5)."""
        log = self._writer.log
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
