"""Rewriting packs while others read and write: dead bytes dropped, small packs put together.

Ids never change: a repack writes new packs and placements, and in each run's log `place` lines and
nothing else. It deletes nothing; what nobody names any more is left to collection. It is a writer
like every other (W1 to W4, `registry.writer`), and one that says nothing new: a place is replaced
only while the run still needs the manifest and still has it where the new place was planned from.

Stored bytes are moved as they are, codec, delta base and all, each chunk held against its digest
before it is written; where compression is asked for, and where bases of deltas are dead weight,
chunks are decoded, verified and encoded anew. A new pack is on the store before any placement names
it, and a placement before any slot does, so a crash at any point costs space until the next repack
and collection, and nothing else. What to rewrite is the business of
`registry.maintenance.repacking.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from typing import TypedDict

from registry.actions import Line, Place
from registry.codecs import COMPRESSIONS, Compression, check_compression
from registry.errors import Conflict, InvalidInput, MissingObject
from registry.log import RunLog
from registry.maintenance.repacking.packs import Packs, Progress
from registry.maintenance.repacking.places import Layout
from registry.maintenance.repacking.plan import RepackPlan, RewrittenPack, plan_repack
from registry.maintenance.repacking.survey import Chunk, in_batches
from registry.maintenance.repacking.targets import Target
from registry.objects.keys import ObjectKey
from registry.objects.placement import PackRef, Placement
from registry.pools import results
from registry.state import RunManifest
from registry.store import Store
from registry.writer import Choice, Condemned, Writer, placed_keys
from registry.writing.deltas import check_keyframe_every

#: New packs held in memory at once ...
_PACKS_IN_FLIGHT = 4
#: ... and where chunks of them are decoded and encoded, which takes memory too.
_ENCODED_IN_FLIGHT = 2
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
        recoded: Chunks that were stored in another encoding.
        recoded_before: Bytes that they took ...
        recoded_after: ... and take now.
        bases: Bases of deltas that nothing needs any more, so that they were left behind.
        bases_bytes: What they took.
    """

    dry_run: bool
    rewritten: tuple[RewrittenPack, ...] = ()
    packs_written: int = 0
    bytes_moved: int = 0
    freed_bytes: int = 0
    runs: tuple[str, ...] = ()
    checkpoints: int = 0
    recoded: int = 0
    recoded_before: int = 0
    recoded_after: int = 0
    bases: int = 0
    bases_bytes: int = 0

    @property
    def packs_read(self) -> int:
        """Packs that chunks were moved out of."""
        return len(self.rewritten)


def repack(
    store: Store,
    runs: Iterable[str] | None = None,
    *,
    min_dead: float = 0.25,
    compression: Compression | None = None,
    keyframe_every: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepackReport:
    """Rewrite packs that are dead in part, and put small ones together.

    Deltas whose bases nothing else needs any more are stored anew where that takes fewer bytes.

    Others may read, save, sync, collect and repack meanwhile. What a repack that broke off has
    done is used by the next one.

    Args:
        store: The registry's objects.
        runs: Only packs that these runs need; other runs that share one are placed anew with them.
        min_dead: Share of the bytes of a pack's chunks, above 0 and up to 1, from which on it is
            rewritten.
        compression: `zstd` or `lz4`: what is stored otherwise is compressed where that is worth it.
            `none`: everything is stored raw, deltas too. Without it nothing is compressed.
        keyframe_every: So many versions of a chunk at most, 1 to 32, are to be read for the last of
            them; longer chains of deltas are cut. They stay without it.
        dry_run: Only plan. Where chunks are to be encoded anew they are tried, so it reads them.
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
    wanted = check_compression(compression)
    options: _Options = {
        "min_dead": min_dead,
        "codec": None if wanted is None else COMPRESSIONS[wanted],
        "keyframe_every": check_keyframe_every(keyframe_every),
    }
    chosen = None if runs is None else list(runs)
    if dry_run:
        return _preview(plan_repack(store, chosen, **options))
    repacker = _Repacker(store, progress)
    for attempt in range(_PLANS):
        try:
            repacker.carry_out(plan_repack(store, chosen, **options))
            break
        except MissingObject:
            # Let go and swept while this looked, or moved by another repack: look again.
            if attempt == _PLANS - 1:
                raise
    return repacker.report()


class _Options(TypedDict):
    """What a repack is planned by."""

    min_dead: float
    codec: str | None
    keyframe_every: int | None


def _preview(plan: RepackPlan) -> RepackReport:
    return RepackReport(
        dry_run=True,
        rewritten=tuple(plan.rewritten.values()),
        packs_written=len(plan.new),
        bytes_moved=sum(target.chunk_bytes for target in plan.new),
        freed_bytes=sum(one.size_bytes for one in plan.rewritten.values()),
        runs=tuple(plan.places),
        checkpoints=sum(sum(places.values()) for places in plan.places.values()),
        recoded=sum(len(target.recoded) for target in plan.new),
        recoded_before=sum(target.before_bytes for target in plan.new),
        recoded_after=sum(target.recoded_bytes for target in plan.new),
        bases=len(plan.bases),
        bases_bytes=sum(plan.bases.values()),
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
        self._bases: dict[Chunk, int] = {}
        self._packs = Packs(store, progress)

    def carry_out(self, plan: RepackPlan) -> None:
        self._rewritten |= plan.rewritten
        self._bases |= plan.bases
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
            recoded=self._packs.recoded,
            recoded_before=self._packs.recoded_before,
            recoded_after=self._packs.recoded_after,
            bases=len(self._bases),
            bases_bytes=sum(self._bases.values()),
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
        layouts = [Layout(one, self._plan, self._store.table) for one in placements]
        packs = self._provide(writer, layouts)
        moves = []
        for place, before, layout in zip(places, placements, layouts, strict=True):
            after = layout.place(packs) if layout.is_sound else before
            going = {pack.key for pack in after.packs} & self._plan.rewritten.keys()
            self.still_named |= going
            if after == before:
                self._touched[place] = False  # names chunks that nothing needed at planning
            else:
                moves.append((place, before, after))
        put = partial(self._put, writer)
        return list(in_batches(self._store.pools.small, put, moves))

    def _provide(self, writer: Writer, layouts: Iterable[Layout]) -> dict[int, PackRef]:
        """Make sure that the packs are there that chunks of placements move to."""
        targets: dict[int, Target] = {}
        for layout in layouts:
            if layout.is_sound:
                targets |= layout.targets
        packs: dict[int, PackRef] = {}
        waiting = iter(targets.items())
        encodes = any(target.recoded for target in targets.values())
        at_once = _ENCODED_IN_FLIGHT if encodes else _PACKS_IN_FLIGHT
        while batch := list(islice(waiting, at_once)):
            jobs = [
                self._store.pools.bulk.submit(self._packs.provide, writer, target)
                for _, target in batch
            ]
            for (key, _), pack in zip(batch, results(jobs), strict=True):
                packs[key] = pack
        return packs

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
