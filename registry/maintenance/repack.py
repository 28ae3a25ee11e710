"""Rewriting packs while others read and write: dead bytes dropped, small packs put together.

Ids never change: a repack writes new packs and placements, and in each run's log `place` lines and
nothing else. It deletes nothing; what nobody names any more is left to collection. It is a writer
like every other (W1 to W4, `registry.writer`), and one that says nothing new: a place is replaced
only while the run still needs the manifest and still has it where the new place was planned from.

Stored bytes are moved as they are, codec, delta base and all, each chunk held against its digest
before it is written. A new pack is on the store before any placement names it, and a placement
before any slot does, so a crash at any point costs space until the next repack and collection, and
nothing else. What to rewrite is the business of `registry.maintenance.repack_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice

from registry.actions import Line, Place
from registry.errors import Conflict, InvalidInput, MissingObject
from registry.keys import ObjectKey
from registry.log import RunLog
from registry.maintenance.repack_packs import Packs, Progress
from registry.maintenance.repack_plan import RepackPlan, RewrittenPack, Target, plan_repack
from registry.maintenance.repack_survey import in_batches
from registry.pack import PackEntry
from registry.placement import PackRef, Placement
from registry.pools import results
from registry.state import RunManifest
from registry.store import Store
from registry.writer import Choice, Condemned, Writer, placed_keys

#: New packs held in memory at once.
_PACKS_IN_FLIGHT = 4
#: Place lines in one slot at most, and placements held in memory at once.
_PLACES_PER_SLOT = 256
#: Times that sweeps, or writers that move on, may spoil what was planned.
_PLANS = 5


@dataclass(frozen=True, slots=True)
class RepackReport:
    """What a repack did, or in a dry run would do.

    Attributes:
        dry_run: Nothing was written.
        rewritten: The packs that were read, each with why it was chosen.
        packs_written: Packs that were put.
        bytes_moved: Bytes of chunks in them.
        freed_bytes: Bytes of packs that no run names any more, as far as the runs were read:
            collection can remove them.
        runs: Runs whose places changed.
        checkpoints: Stored states that were placed anew.
    """

    dry_run: bool
    rewritten: tuple[RewrittenPack, ...] = ()
    packs_written: int = 0
    bytes_moved: int = 0
    freed_bytes: int = 0
    runs: tuple[str, ...] = ()
    checkpoints: int = 0

    @property
    def packs_read(self) -> int:
        """Packs that chunks were moved out of."""
        return len(self.rewritten)


def repack(
    store: Store,
    runs: Iterable[str] | None = None,
    *,
    min_dead: float = 0.25,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepackReport:
    """Rewrite packs that are dead in part, and put small ones together.

    Others may read, save, sync, collect and repack meanwhile. What a repack that broke off has
    done is used by the next one.

    Args:
        store: The registry's objects.
        runs: Only packs that these runs need; other runs that share one are placed anew with them.
        min_dead: Share of the bytes of a pack's chunks, above 0 and up to 1, from which on it is
            rewritten.
        dry_run: Only plan.
        progress: Told of bytes written.

    Raises:
        NotFound: There is no such run.
        IntegrityError: Something is damaged or gone. What was placed anew until then is sound, and
            nothing is deleted.
        Conflict: Sweeps came between too often.
    """
    if not 0 < min_dead <= 1:
        raise InvalidInput(
            "not a share of dead bytes", expected="above 0 and up to 1", found=min_dead
        )
    chosen = None if runs is None else list(runs)
    if dry_run:
        return _preview(plan_repack(store, chosen, min_dead=min_dead))
    repacker = _Repacker(store, progress)
    for attempt in range(_PLANS):
        try:
            repacker.carry_out(plan_repack(store, chosen, min_dead=min_dead))
            break
        except MissingObject:
            # Let go and swept while this looked, or moved by another repack: look again.
            if attempt == _PLANS - 1:
                raise
    return repacker.report()


def _preview(plan: RepackPlan) -> RepackReport:
    return RepackReport(
        dry_run=True,
        rewritten=tuple(plan.rewritten.values()),
        packs_written=len(plan.new),
        bytes_moved=sum(target.chunk_bytes for target in plan.new),
        freed_bytes=sum(one.size_bytes for one in plan.rewritten.values()),
        runs=tuple(plan.places),
        checkpoints=sum(sum(places.values()) for places in plan.places.values()),
    )


@dataclass(frozen=True, slots=True)
class _Move:
    """A manifest that is to lie elsewhere, and everything that naming it there names."""

    before: Place
    after: Place
    choice: Choice


class _Repacker:
    """One repack, through as many plans as it takes."""

    def __init__(self, store: Store, progress: Progress | None) -> None:
        self._store = store
        self._rewritten: dict[ObjectKey, RewrittenPack] = {}
        self._named: set[ObjectKey] = set()
        self._relocated: dict[str, int] = {}
        self._packs = Packs(store, progress)

    def carry_out(self, plan: RepackPlan) -> None:
        self._rewritten |= plan.rewritten
        self._named = set(plan.named - plan.rewritten.keys())
        for run_id, places in plan.places.items():
            moved = _RunRepack(self._packs, self._store, plan, run_id, places)
            try:
                moved.carry_out()
            finally:
                if moved.relocated:
                    before = self._relocated.get(run_id, 0)
                    self._relocated[run_id] = before + moved.relocated
            self._named |= moved.still_named

    def report(self) -> RepackReport:
        gone = [one for key, one in self._rewritten.items() if key not in self._named]
        return RepackReport(
            dry_run=False,
            rewritten=tuple(self._rewritten.values()),
            packs_written=self._packs.written,
            bytes_moved=self._packs.bytes_moved,
            freed_bytes=sum(one.size_bytes for one in gone),
            runs=tuple(self._relocated),
            checkpoints=sum(self._relocated.values()),
        )


class _RunRepack:
    """The places of one run.

    Attributes:
        relocated: States that were placed anew.
        still_named: Packs that were to go and that the run was seen to need in the end.
    """

    def __init__(
        self,
        packs: Packs,
        store: Store,
        plan: RepackPlan,
        run_id: str,
        places: Mapping[Place, bool],
    ) -> None:
        self._packs = packs
        self._store = store
        self._plan = plan
        self._log = RunLog(store, run_id)
        self._touched = dict(places)
        self.relocated = 0
        self.still_named: set[ObjectKey] = set()

    def carry_out(self) -> None:
        """Place anew what lies in packs that go, until nothing is left or others are faster."""
        # W1: the log is there and read before its writer observes the epoch.
        self._log.open()
        writer = Writer(self._store, self._log)
        condemned = 0
        slots_left = sum(self._touched.values()) // _PLACES_PER_SLOT + _PLANS
        while waiting := self._waiting(self._log.state):
            if slots_left <= 0:
                break
            try:
                self._move(writer, waiting[:_PLACES_PER_SLOT])
                slots_left -= 1
            except Condemned:
                condemned += 1
                if condemned == _PLANS:
                    raise Conflict(
                        f"sweeps overtook this repack {_PLANS} times in a row",
                        where=self._log.run_id,
                        hint="Try again, and let collectors run less often. What was placed anew "
                        "until now is sound.",
                    ) from None
        for place in waiting:
            named = {pack.key for pack in self._read(place).packs}
            self.still_named |= named & self._plan.rewritten.keys()

    def _waiting(self, state: RunManifest) -> list[Place]:
        """Return the places that name packs which are to go."""
        held = [place for place in state.places if place.manifest in state.held]
        unknown = [place for place in held if place not in self._touched]
        for place, placement in zip(
            unknown, in_batches(self._store.pools.small, self._read, unknown), strict=True
        ):
            going = self._plan.rewritten.keys()
            self._touched[place] = any(pack.key in going for pack in placement.packs)
        return [place for place in held if self._touched[place]]

    def _read(self, place: Place) -> Placement:
        return self._store.placement(place.placement_key)

    def _move(self, writer: Writer, places: Sequence[Place]) -> None:
        moves = self._prepare(writer, places)

        def compose(state: RunManifest) -> Sequence[Line] | None:
            # What was let go, or placed by somebody else, meanwhile is none of ours any more.
            return [move.after for move in moves if state.is_placed(move.before)] or None

        choice = reduce(Choice.__or__, [move.choice for move in moves], Choice())
        state = writer.commit(compose, choice)
        self.relocated += sum(state.is_placed(move.after) for move in moves)

    def _prepare(self, writer: Writer, places: Sequence[Place]) -> list[_Move]:
        """Put everything that the new places name on the store."""
        _ = writer.epoch  # observed before any key is chosen
        placements = list(in_batches(self._store.pools.small, self._read, places))
        packs = self._provide(writer, placements)
        moves = []
        for place, before in zip(places, placements, strict=True):
            after = self._relocate(before, packs)
            going = {pack.key for pack in after.packs} & self._plan.rewritten.keys()
            self.still_named |= going
            if after == before:
                self._touched[place] = False  # names chunks that nothing needed at planning
            else:
                moves.append((place, before, after))
        put = partial(self._put, writer)
        return list(in_batches(self._store.pools.small, put, moves))

    def _provide(self, writer: Writer, placements: Iterable[Placement]) -> dict[int, PackRef]:
        """Make sure that the packs are there that chunks of placements move to."""
        targets: dict[int, Target] = {}
        for placement in placements:
            for target, _ in self._moved_rows(placement).values():
                targets.setdefault(id(target), target)
        packs: dict[int, PackRef] = {}
        waiting = iter(targets.items())
        while batch := list(islice(waiting, _PACKS_IN_FLIGHT)):
            jobs = [
                self._store.pools.bulk.submit(self._packs.provide, writer, target)
                for _, target in batch
            ]
            for (key, _), pack in zip(batch, results(jobs), strict=True):
                packs[key] = pack
        return packs

    def _moved_rows(self, placement: Placement) -> dict[int, tuple[Target, PackEntry]]:
        """Return where rows of a placement move to, by row."""
        moves = [self._plan.moves.get(pack.key, {}) for pack in placement.packs]
        return {
            number: moves[row.pack][row.offset]
            for number, row in enumerate(placement.rows)
            if row.offset in moves[row.pack]
        }

    def _relocate(self, before: Placement, found: Mapping[int, PackRef]) -> Placement:
        """Return a placement in which the rows that move are where they move to."""
        moved = self._moved_rows(before)
        packs: dict[PackRef, int] = {}
        rows = []
        for number, row in enumerate(before.rows):
            pack = before.packs[row.pack]
            if number in moved:
                target, entry = moved[number]
                pack = found[id(target)]
                row = replace(row, offset=entry.offset, stored_bytes=entry.stored_bytes)
            rows.append(replace(row, pack=packs.setdefault(pack, len(packs))))
        return replace(before, packs=tuple(packs), rows=tuple(rows))

    def _put(self, writer: Writer, move: tuple[Place, Placement, Placement]) -> _Move:
        place, before, after = move
        key = writer.put_small("placements", after.digest, after.encode(), Placement)
        self._store.remember(key, after)
        moved = place.model_copy(
            update={"placement": after.digest, "placement_generation": key.generation}
        )
        # W2a: the manifest and the packs that stay are named by the place that this one replaces.
        covered = {key: [place] for key in placed_keys(place, before)}
        self._touched[moved] = False
        return _Move(place, moved, Choice(placed_keys(moved, after), covered))
