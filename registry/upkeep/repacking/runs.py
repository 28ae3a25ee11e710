"""Move the states of one run to the new packs of a plan.

A repack is a change of the run without a commit (`holdfast.registry.writing.change`). It replaces a
place only while the run needs the manifest and still gives the place that the new one was planned
from. If two repacks plan different places for a state, the first to place it wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import Line, Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import (
    MAX_DEPTH,
    NO_BASE,
    ChunkRow,
    ObjectKey,
    PackEntry,
    PackRef,
    PackTable,
    Placement,
    Rows,
)
from holdfast.registry.objects.codecs import codec_number
from holdfast.registry.store import Store, in_batches
from holdfast.registry.upkeep.repacking.packs import Packs
from holdfast.registry.upkeep.repacking.repack_plan import RepackPlan, Target
from holdfast.registry.upkeep.repacking.survey import unlike_table
from holdfast.registry.values import Digest, Digests
from holdfast.registry.writing import Change, ChosenKeys, ObjectWriter, StateWriter, placed_keys


@dataclass(frozen=True, slots=True)
class _NewLocation:
    """The location of a chunk after the repack."""

    pack: Target | PackRef  # a target of the plan, or the pack that holds the chunk now
    entry: PackEntry  # its entry there


class NewPlacement:
    """The placement of one state after the repack."""

    def __init__(
        self, before: Placement, plan: RepackPlan, table_of: Callable[[PackRef], PackTable]
    ) -> None:
        self._before = before
        self._plan = plan
        self._table_of = table_of
        self._own = len(before.rows) - len(before.extra)
        locations = dict(self._locations())
        own, bases = list(locations)[: self._own], list(locations)[self._own :]
        needed = (
            self._needed(own, locations) if self._is_changed(locations) else dict.fromkeys(bases)
        )
        order = [
            *own,
            *(d for d in bases if d in needed),
            *(d for d in needed if d not in locations),
        ]
        found = {digest: locations.get(digest) or self._elsewhere(digest) for digest in order}
        self._order = {
            digest: location for digest, location in found.items() if location is not None
        }
        used = [location.pack for location in self._order.values()]
        #: The packs of the plan that it needs.
        self.targets = {id(one): one for one in used if isinstance(one, Target)}

    def placement(self, packs: Mapping[int, PackRef]) -> Placement:
        """Return the placement."""
        numbers = {digest: number for number, digest in enumerate(self._order)}
        known: dict[PackRef, int] = {}
        rows = []
        for location in self._order.values():
            pack, entry = location.pack, location.entry
            if isinstance(pack, Target):
                pack = packs[id(pack)]
            number = known.setdefault(pack, len(known))
            base = NO_BASE if entry.base is None else numbers[entry.base]
            codec = codec_number(entry.codec, where=str(pack.key))
            rows.append(ChunkRow(number, entry.offset, entry.stored_bytes, codec, base))
        extra = Digests(list(self._order)[self._own :])
        return replace(self._before, packs=tuple(known), rows=Rows(rows), extra=extra)

    @property
    def is_sound(self) -> bool:
        """Whether every chain of deltas ends at a chunk that is no delta.

        This holds where one plan has moved the whole chain. If others have stored chunks of it in
        another encoding since, the two may not fit together; then the state keeps its place.
        """
        for digest in self._order:
            links, below = 0, self._order[digest].entry.base
            while below is not None:
                if below not in self._order or links == MAX_DEPTH:
                    return False
                links, below = links + 1, self._order[below].entry.base
        return True

    def _locations(self) -> Iterator[tuple[Digest, _NewLocation]]:
        """Yield the chunks of all rows with their new locations."""
        before, plan = self._before, self._plan
        moves = [plan.moves.get(pack.key, {}) for pack in before.packs]
        for row in before.rows:
            pack = before.packs[row.pack]
            if row.offset in moves[row.pack]:
                target, entry = moves[row.pack][row.offset]
                yield entry.digest, _NewLocation(target, entry)
            else:
                entry = self._entry(pack, row.offset)
                yield entry.digest, _NewLocation(pack, entry)

    def _entry(self, pack: PackRef, offset: int) -> PackEntry:
        table = self._plan.tables.get(pack.key)
        entry = self._table_of(pack).at(offset) if table is None else table.get(offset)
        if entry is None:
            raise unlike_table(pack)
        return entry

    def _is_changed(self, locations: Mapping[Digest, _NewLocation]) -> bool:
        """Return whether a chunk gets another base than it has now."""
        digests = list(locations)
        for row, location in zip(self._before.rows, locations.values(), strict=True):
            base = None if row.base == NO_BASE else digests[row.base]
            if location.entry.base != base:
                return True
        return False

    def _needed(
        self, own: list[Digest], locations: Mapping[Digest, _NewLocation]
    ) -> dict[Digest, None]:
        """Return the bases of the state's chunks, and the bases of these, and so on."""
        needed: dict[Digest, None] = {}
        named, waiting = set(own), list(own)
        while waiting:
            digest = waiting.pop()
            location = locations.get(digest) or self._elsewhere(digest)
            base = None if location is None else location.entry.base
            if base is not None and base not in needed:
                needed[base] = None
                waiting.append(base)
        return {digest: None for digest in needed if digest not in named}

    def _elsewhere(self, digest: Digest) -> _NewLocation | None:
        """Return the new location of a base that the state does not name yet."""
        found = self._plan.locations.get(digest)
        return None if found is None else _NewLocation(*found)


#: Place lines in one slot at most, and placements held in memory at once.
_PLACES_PER_SLOT = 256
#: Rows of these placements; a state may have more, and then has a slot for itself.
_ROWS_PER_SLOT = 2**17
#: Times that sweeps or other writers may make a plan useless.
PLANS = 5


@dataclass(frozen=True, slots=True)
class _Move:
    """A new place of a state, its packs, and the keys that a slot with it names."""

    before: Place
    after: Place
    packs: frozenset[ObjectKey]  # those that count in the report
    chosen: ChosenKeys


class RunRepack(Change):
    """The new places of one run, committed a slot at a time."""

    noun = "repack"
    given_up = "The places written until now are sound"

    def __init__(
        self,
        packs: Packs,
        store: Store,
        plan: RepackPlan,
        run_id: str,
        places: Mapping[Place, frozenset[ObjectKey]],
        left: set[ObjectKey],
    ) -> None:
        self._packs = packs
        self._store = store
        self._plan = plan
        self._log = RunLog(store, run_id)
        self.writer = StateWriter(store, self._log)  # puts the objects of the new places
        self._moves: list[_Move] = []
        self._moved: list[_Move] = []
        self._touched = dict(places)
        self._pending = {place for place, rewritten in places.items() if rewritten}
        self._left = left
        self.relocated: set[Digest] = set()  # states that this repack has moved
        self.lost: set[Digest] = set()  # states of the plan that somebody else moved first
        self.named: set[ObjectKey] = set()  # new and rewritten packs that the run needs in the end

    def carry_out(self, commit: Callable[[Change], RunManifest]) -> None:
        """Move states out of rewritten packs, until none is left or others are faster."""
        # W1: the log exists and is read before its writer observes the epoch.
        self._log.open()
        slots_left = len(self._pending) + PLANS
        while waiting := self._waiting(self._log.run):
            if slots_left <= 0:
                break
            self._note(commit(self))
            slots_left -= 1
        run = self._log.run
        self.lost &= run.held
        # States that others moved may be in packs that were written here.
        places = [*waiting, *(run.by_manifest[manifest] for manifest in self.lost)]
        for placement in in_batches(self._store.pools.small, self._read, places):
            self.named |= self._counted(placement)

    def check(self, run: RunManifest) -> None:
        """Allow it: a repack commits nothing, and a dropped run needs no state."""

    def write(self) -> ChosenKeys:
        """Put the objects of the run's next places on the store."""
        writer = self.writer.objects
        writer.observe()  # before any key is chosen
        places = self._waiting(self._log.run)[:_PLACES_PER_SLOT]
        placements = self._some(places)
        planned = [NewPlacement(one, self._plan, self._store.table) for one in placements]
        targets = {at: one for new in planned if new.is_sound for at, one in new.targets.items()}
        made = self._packs.provide(writer, list(targets.values()))
        packs = dict(zip(targets, made, strict=True))
        moves = []
        for place, before, new in zip(places, placements, planned, strict=False):
            after = new.placement(packs) if new.is_sound else before
            if after == before:
                # Its chunks were unneeded when the plan was made, or no longer fit the plan.
                self._touched[place] = frozenset()
                self._pending.discard(place)
                self.named |= self._counted(after)
            else:
                moves.append((place, before, after))
        put = partial(self._put, writer)
        self._moves = list(in_batches(self._store.pools.small, put, moves))
        return reduce(ChosenKeys.__or__, [move.chosen for move in self._moves], ChosenKeys())

    def lines(self, run: RunManifest) -> Sequence[Line] | None:
        """Return the new places of states that are still needed and were not moved meanwhile."""
        self._moved = [move for move in self._moves if run.is_placed(move.before)]
        return [move.after for move in self._moved] or None

    def _note(self, run: RunManifest) -> None:
        """Note the states that a slot has moved, and the states moved before it by others."""
        self._pending -= {move.before for move in self._moved}
        self._note_lost(run)  # before ours: they were there first
        for move in self._moved:
            self.lost.discard(move.before.manifest)
            self._left |= self._touched[move.before]
            self.named |= move.packs
            self.relocated.add(move.before.manifest)
            self._plan.moved[self._log.run_id, move.before] = move.after

    def _waiting(self, run: RunManifest) -> list[Place]:
        """Return the places that name rewritten packs."""
        self._note_lost(run)
        held = [place for place in run.places if place.manifest in run.held]
        unknown = [place for place in held if place not in self._touched]
        for place, placement in zip(
            unknown, in_batches(self._store.pools.small, self._read, unknown), strict=True
        ):
            rewritten = self._plan.rewritten.keys()
            self._touched[place] = frozenset(p.key for p in placement.packs if p.key in rewritten)
            if self._touched[place]:
                self._pending.add(place)
        return [place for place in held if self._touched[place]]

    def _note_lost(self, run: RunManifest) -> None:
        """Note which places somebody else has replaced; an evicted state is no loss."""
        for place in [one for one in self._pending if not run.is_placed(one)]:
            self._pending.remove(place)
            if place.manifest in run.held:
                self.lost.add(place.manifest)
                self._left -= self._touched[place]

    def _some(self, places: Iterable[Place]) -> list[Placement]:
        """Return the first placements, not too many rows of them."""
        found = list[Placement]()
        for placement in in_batches(self._store.pools.small, self._read, places):
            found.append(placement)
            if sum(len(one.rows) for one in found) >= _ROWS_PER_SLOT:
                break
        return found

    def _counted(self, placement: Placement) -> frozenset[ObjectKey]:
        """Return the packs of a placement that this repack made or rewrites."""
        packs = (pack.key for pack in placement.packs)
        return frozenset(k for k in packs if k in self._plan.rewritten or k in self._packs.made)

    def _read(self, place: Place) -> Placement:
        return self._store.placement(place.placement_key)

    def _put(self, writer: ObjectWriter, move: tuple[Place, Placement, Placement]) -> _Move:
        place, before, after = move
        key = writer.put_small("placements", after.digest, after.encode(), Placement)
        self._store.remember(key, after)
        moved = place.changed(placement=after.digest, placement_generation=key.generation)
        # W2a: the manifest and the packs that stay are named by the place that this one replaces.
        covered = {key: [place] for key in placed_keys(place, before)}
        self._touched[moved] = frozenset()
        chosen = ChosenKeys(placed_keys(moved, after), covered)
        return _Move(place, moved, self._counted(after), chosen)
