"""Rewrite packs while others read and write: drop unneeded chunks, put small packs together.

Ids never change: a repack writes new packs and placements, and only `place` lines into each run's
log. It deletes nothing; collection deletes the packs that no run names any more.

Stored bytes are moved as they are, with codec and delta base; each chunk is checked against its
digest before it is written. Where compression is asked for, and where bases of deltas are not worth
their space, chunks are decoded, verified and encoded again. A new pack is on the store before any
placement names it, and a placement before any slot does, so a crash at any point costs only space
until the next repack and collection. `holdfast.registry.upkeep.repacking.repack_plan` chooses
the packs to rewrite; `holdfast.registry.upkeep.repacking.runs` lets the runs name the new
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypedDict

from holdfast.registry.errors import InvalidInput, MissingObject
from holdfast.registry.objects import ObjectKey
from holdfast.registry.objects.codecs import COMPRESSIONS, Compression, check_compression
from holdfast.registry.store import Progress, Store, Workers
from holdfast.registry.upkeep.repacking.packs import Packs
from holdfast.registry.upkeep.repacking.repack_plan import RepackPlan, RewrittenPack, plan_repack
from holdfast.registry.upkeep.repacking.runs import PLANS, RunRepack
from holdfast.registry.upkeep.repacking.survey import chunk_of
from holdfast.registry.values import Digest
from holdfast.registry.writing import Committer, check_keyframe_every


@dataclass(frozen=True, slots=True)
class RepackReport:
    """The report of a repack, or in a dry run of its plan.

    Attributes:
        dry_run: Nothing was written.
        rewritten: The packs that were read, each with the reason.
        packs_written: Packs that were put.
        bytes_moved: Bytes of chunks in them.
        packs_in_vain: Written packs that no run names, because their states were evicted or moved
            by somebody else meanwhile. Collection deletes them.
        in_vain_bytes: Their size.
        freed_bytes: Bytes of packs that this repack moved states out of and that no run names any
            more, by the logs that were read: collection can delete them. Packs that somebody else
            freed are not counted.
        runs: Runs whose places this repack changed.
        checkpoints: Stored states that got a new place.
        placed_meanwhile: Stored states that somebody else moved first; they stay there, and the
            next repack plans for them again.
        recoded: Chunks that were stored in another encoding; those in vain are left out.
        recoded_before: Bytes of these chunks before ...
        recoded_after: ... and after.
        bases: Bases of deltas that nothing needs any more and that were not moved.
        bases_bytes: Their bytes.
    """

    dry_run: bool
    rewritten: tuple[RewrittenPack, ...] = ()
    packs_written: int = 0
    bytes_moved: int = 0
    packs_in_vain: int = 0
    in_vain_bytes: int = 0
    freed_bytes: int = 0
    runs: tuple[str, ...] = ()
    checkpoints: int = 0
    placed_meanwhile: int = 0
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
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> RepackReport:
    """Rewrite packs with unneeded chunks, and put small ones together; see `Registry.repack`."""
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
    workers = Workers(executor, store, writes=not dry_run)
    if dry_run:
        return _dry_run_report(plan_repack(store, chosen, **options, workers=workers))
    repacker = _Repacker(store, workers, progress)
    for attempt in range(PLANS):
        try:
            for plan in plan_repack(store, chosen, **options, workers=workers):
                repacker.carry_out(plan)
                del plan  # before the next one is made
            break
        except MissingObject:
            # Evicted and collected while this planned, or moved by another repack: plan again.
            if attempt == PLANS - 1:
                raise
            repacker.start_again()
    return repacker.report()


class _Options(TypedDict):
    """Options of a plan."""

    min_dead: float
    codec: str | None
    keyframe_every: int | None


def _dry_run_report(plans: Iterable[RepackPlan]) -> RepackReport:
    rewritten: list[RewrittenPack] = []
    states: dict[str, set[Digest]] = {}
    sums = Counter[str]()
    for plan in plans:
        rewritten += plan.rewritten.values()
        for run_id, places in plan.places.items():
            named = {place.manifest for place, packs in places.items() if packs}
            states.setdefault(run_id, set()).update(named)
        sums.update(
            packs_written=len(plan.new),
            bytes_moved=sum(target.chunk_bytes for target in plan.new),
            recoded=sum(len(target.recoded) for target in plan.new),
            recoded_before=sum(target.before_bytes for target in plan.new),
            recoded_after=sum(target.recoded_bytes for target in plan.new),
            bases=len(plan.bases),
            bases_bytes=sum(plan.bases.values()),
        )
        del plan  # before the next one is made
    return RepackReport(
        dry_run=True,
        rewritten=tuple(rewritten),
        freed_bytes=sum(one.size_bytes for one in rewritten),
        runs=tuple(states),
        checkpoints=sum(map(len, states.values())),
        **sums,
    )


class _Repacker:
    """Carries out one repack, with several plans if others are faster."""

    def __init__(self, store: Store, workers: Workers, progress: Progress | None) -> None:
        self._store = store
        self._rewritten: dict[ObjectKey, RewrittenPack] = {}
        self._named: set[ObjectKey] = set()
        self._left: set[ObjectKey] = set()
        self._freed: set[ObjectKey] = set()  # those that whole batches have freed
        self._relocated: dict[str, set[Digest]] = {}
        self._placed_meanwhile = 0
        self._dropped = Counter[str]()  # the bases in packs that batches have freed
        self._packs = Packs(store, workers, progress)

    def carry_out(self, plan: RepackPlan) -> None:
        self._rewritten |= plan.rewritten
        self._named -= plan.rewritten.keys()
        for run_id, places in plan.places.items():
            run = RunRepack(self._packs, self._store, plan, run_id, places, self._left)
            try:
                run.carry_out(Committer(run.writer).commit)
            finally:
                if run.relocated:
                    self._relocated.setdefault(run_id, set()).update(run.relocated)
                self._named |= run.named
            self._placed_meanwhile += len(run.lost)
        freed = plan.rewritten.keys() & self._left - self._named
        self._freed |= freed
        held = {chunk_of(entry) for key in freed for entry in plan.tables[key].values()}
        sizes = [size for chunk, size in plan.bases.items() if chunk in held]
        self._dropped.update(bases=len(sizes), bases_bytes=sum(sizes))

    def start_again(self) -> None:
        """Forget what the next plan finds again."""
        self._left &= self._freed
        self._placed_meanwhile = 0

    def report(self) -> RepackReport:
        freed = {
            key: one for key, one in self._rewritten.items() if key in self._left - self._named
        }
        made = self._packs.made
        used = [one for key, one in made.items() if key in self._named]
        in_vain = [one for key, one in made.items() if key not in self._named]
        return RepackReport(
            dry_run=False,
            rewritten=tuple(self._rewritten.values()),
            packs_written=len(made),
            bytes_moved=self._packs.bytes_moved,
            packs_in_vain=len(in_vain),
            in_vain_bytes=sum(one.size_bytes for one in in_vain),
            freed_bytes=sum(one.size_bytes for one in freed.values()),
            runs=tuple(self._relocated),
            checkpoints=sum(map(len, self._relocated.values())),
            placed_meanwhile=self._placed_meanwhile,
            recoded=sum(one.recoded for one in used),
            recoded_before=sum(one.recoded_before for one in used),
            recoded_after=sum(one.recoded_after for one in used),
            **self._dropped,
        )
