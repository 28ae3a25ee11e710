"""Delete the objects that no run needs, while others write: the collector's side of the protocol.

*A condemned name is never used again.* Rules G0 to G5 of docs/spec.md, section 13, are carried
out by the steps of `Collector`. Anyone may repeat any step after any crash, and any number of
collectors may work at once. The proof is in docs/collection-proof.md, the protocol as a program
in tests/model; the writers' side is `holdfast.registry.writing.object_writer`.

No clock decides whether a deletion is safe. The grace saves writers from storing an object again
that they were about to name, and keeps `undo` possible for a while.

On a full store nothing can be condemned before some space is free: first delete files that need no
epoch (`tidy`), then use the reserve (`spend_reserve`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from holdfast.backends.escape import quoted
from holdfast.registry.errors import (
    Conflict,
    Hint,
    IntegrityError,
    InvalidInput,
    Malformed,
    StorageError,
    StoreFull,
    StoreUnsuitable,
    UnsupportedFormat,
)
from holdfast.registry.history import Epochs, RunLog, encode_forget, set_aside
from holdfast.registry.history.actions import Forget, Line, Mark, Place
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.objects import (
    LAST,
    RUNS,
    ObjectKey,
    epoch_key,
    is_run_id,
    log_prefix,
    marker_key,
    parse_number,
    slot_key,
)
from holdfast.registry.store import DAY_S, RUNS_AT_ONCE, Progress, Store, Workers, in_batches
from holdfast.registry.upkeep.gc_report import GcReport, Tally
from holdfast.registry.upkeep.live import is_forgotten, list_run_ids
from holdfast.registry.upkeep.planning import LEFTOVER_S, Plan, Planner
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.sorted_rows import SPARED, Objects, SortedRows, keys_of, object_rows

#: The longest grace: 30,000 years.
_LONGEST_S = 10**12
#: Epochs that are searched for objects that a collector condemned and did not delete. What an older
#: one condemned is condemned again.
_RECENT_EPOCHS = 4
#: Seconds for which a mark may lose races: it waits for a busy run, never for a stuck one.
_PATIENCE_S = 600.0
#: The most objects that a sweep condemns on a full store: its epoch must fit into the reserve.
_CONDEMNED_WHEN_FULL = 256
#: The most objects that are deleted by one call, and the fewest: calls run side by side.
_DELETES, _FEW_DELETES = 1000, 64


def collect(
    store: Store,
    *,
    grace_s: float = DAY_S,
    forget: Collection[str] = (),
    accept: Collection[str] = (),
    full: bool = False,
    dry_run: bool = False,
    shard: str | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> GcReport:
    """Delete what no run needs; see `Registry.gc`."""
    part, workers = Shard.parse(shard), Workers(executor, store)
    report: GcReport | None = None
    done_bytes = 0

    def count(deleted_bytes: int) -> None:
        if progress is not None:
            progress(done_bytes + deleted_bytes)

    while True:
        collector = Collector(
            store,
            grace_s=grace_s,
            forget=forget,
            accept=accept,
            full=full,
            shard=part,
            workers=workers,
            progress=count,
            has_deleted=done_bytes > 0,
        )
        plan = collector.choose(dry_run=dry_run)
        if dry_run:
            return collector.report(dry_run=True)
        if len(plan.to_condemn) or collector.to_forget:
            _run_sweep(collector)
        made = collector.delete()
        report = made if report is None else report.before(made)
        if not collector.is_partial:
            store.backend.keep_reserve(RUNS)
            collector.note()
            return report
        # Now there is space for an epoch that condemns the other objects.
        done_bytes += collector.deleted_bytes


def _run_sweep(collector: Collector) -> None:
    """Forget, condemn and mark; on a full store, make room for that first."""
    for make_room in (collector.tidy, collector.spend_reserve, None):
        try:
            collector.forget()
            collector.condemn()
            collector.mark()
        except StoreFull:
            if make_room is None:
                raise
            make_room()
        else:
            return


@dataclass(slots=True)
class _Sweep:
    """A sweep under way."""

    epoch: int
    condemned: Objects  # the objects that this collector saw and the epoch condemned
    #: What runs needed when marked and did not need before; `None` before all are marked.
    spared: SortedRows | None = None
    deleted: Objects | None = None  # the condemned that were not spared


class Collector:
    """One collection, step by step; `collect` calls the steps.

    1. `choose` refuses links, lists all objects, and only then the logs of all runs. Logs that an
       operator accepts as they are get marks until they are longer than what their notes have seen.
    2. It takes what quiet runs need from their notes: sealed runs without a marker. It replays
       every other log from what the last collection noted of it, or from the first slot, and frees
       the runs that were dropped longer ago than the delay of the registry. An object that no run
       needs is condemned unless it is recent: put, or needed by a run, within the grace.
    3. If no object is to be condemned and no run to be forgotten, only steps 10 and 11 follow.
    4. `forget` ends the logs of runs that the operator gives up, and records them in an epoch.
    5. `condemn` puts the unneeded objects as an epoch, or joins a sweep that has named them (G1).
       From now on no writer that has observed the epoch uses these names.
    6. `mark` lists the runs again: a run created later observes the epoch (G2).
    7. It appends a mark to the log of each run that is not quiet, and reads all commits before the
       mark (G3). A quiet run that has a marker by now is no longer quiet (G2').
    8. It spares the condemned objects that a run needs at its mark or later (G4).
    9. `delete` removes the others (G5): manifests and placements first, then packs.
    10. `delete` removes stale snapshots and probes, and unfinished files of dead writers. On a full
        store `collect` repeats all steps for the rest.
    11. `note` keeps what the runs hold for the replays of the next collection.

    With a shard it lists, condemns and deletes only the objects of that part of the keys. It reads
    and marks the runs like any other collection.
    """

    def __init__(
        self,
        store: Store,
        *,
        grace_s: float = DAY_S,
        forget: Collection[str] = (),
        accept: Collection[str] = (),
        full: bool = False,
        shard: Shard | None = None,
        workers: Workers | None = None,
        progress: Progress | None = None,
        has_deleted: bool = False,
    ) -> None:
        is_number = isinstance(grace_s, (int, float)) and not isinstance(grace_s, bool)
        if not is_number or not 0 <= grace_s <= _LONGEST_S:
            raise InvalidInput(
                "a grace is a number of seconds",
                expected=f"0 to {_LONGEST_S}",
                found=quoted(grace_s),
            )
        self._store = store
        self._grace_s = grace_s
        self._progress = progress
        self._epochs = Epochs(store)
        self._shard = shard or Shard()
        self._planner = Planner(
            store,
            self._epochs,
            grace_s,
            forget,
            accept=accept,
            full=full,
            shard=shard,
            workers=workers,
        )
        self._plan: Plan | None = None
        self._sweep: _Sweep | None = None
        self._unfinished_bytes = 0
        self._may_cache = True
        self._is_tidy, self._has_deleted = False, has_deleted
        self.to_forget: tuple[str, ...] = ()  # the runs that this collection forgets
        self.deleted_bytes = 0  # bytes that were deleted so far
        #: Whether only some unneeded objects are condemned, because space is short.
        self.is_partial = False

    # The choice: any is safe

    def choose(self, *, dry_run: bool = False) -> Plan:
        """Find what no run needs, and free the dropped runs whose delay has passed."""
        with self._nothing_deleted():
            self._sweep, self._is_tidy = None, False
            self._plan = self._planner.plan(dry_run=dry_run)
            self.to_forget = tuple(self._planner.to_forget())
        return self._plan

    # G0: only what the operator says

    def forget(self) -> None:
        """End the logs of the runs that are given up, then record them in an epoch of their own."""
        with self._nothing_deleted():
            ends = {name: self._end(name) for name in self._planner.to_forget()}
            while ends:
                newest = self._epochs.observe()
                self._epochs.make_durable(newest)
                entry = encode_forget(newest + 1, ends, self._epochs.header(newest))
                if self._store.backend.put_if_absent(epoch_key(newest + 1), entry):
                    self._planner.forgotten |= ends
                    return

    def _end(self, run_id: str) -> int:
        """End the log of a run in each free slot that its writers may come to; return the last.

        There are several if slots are lost, and those may be put back from a backup.
        """
        backend, end, ended = self._store.backend, Slot.build(0, [Forget()]).data, 0
        if not is_run_id(run_id):
            return ended  # no program can write to it
        taken = set()
        for info in backend.list(log_prefix(run_id)):
            with suppress(Malformed):
                taken.add(parse_number(info.key))
        for number in sorted({0, *(one + 1 for one in taken if one < LAST)} - taken):
            ended = number
            while not backend.put_if_absent(slot_key(run_id, ended), end):
                ended += 1
        if self._planner.seals:  # for readers who know the run as it was sealed
            backend.put_if_absent(marker_key(run_id, ended), b"")
        return ended

    # G1: publish the choice

    def condemn(self) -> int | None:
        """Publish the chosen objects as an epoch, or join the sweep that condemned them already."""
        with self._nothing_deleted():
            chosen = self._chosen().to_condemn
            if not len(chosen):
                return None
            while self._sweep is None:
                newest = self._epochs.observe()
                self._planner.check_rules(newest)
                # Its writer may have died before it was durable, and the next steps depend on it.
                self._epochs.make_durable(newest)
                fresh = self._not_condemned_before(chosen, newest)
                # Nothing new: the collector that condemned these died or still works; finish it.
                if not len(fresh):
                    self._sweep = _Sweep(newest, chosen)
                elif self._epochs.put_sweep(newest + 1, fresh, joins=self._may_cache):
                    self._sweep = _Sweep(newest + 1, chosen)
            if self._store.heads is not None:
                self._store.heads.check_epoch(self._sweep.epoch)
            return self._sweep.epoch

    def _not_condemned_before(self, chosen: Objects, newest: int) -> Objects:
        fresh = Objects()
        for rows in chosen.parts():
            keys, found = keys_of(rows), set[ObjectKey]()
            for epoch in range(max(1, newest - _RECENT_EPOCHS + 1), newest + 1):
                found |= self._epochs.condemned_by(epoch, keys)
            fresh.add(rows[[key not in found for key in keys]])
        return fresh

    # G2 to G4

    def mark(self) -> None:
        """Mark every run, and find the condemned objects that it needs."""
        sweep = self._sweep
        if sweep is None:
            return
        with self._nothing_deleted():
            # G2: listed again after the epoch was put. Whoever creates a run later observes it.
            passed, quiet = self._planner.passed, self._planner.quiet.still()
            listed = list_run_ids(self._store, passed)
            run_ids = {*self._planner.logs, *passed, *self._planner.quiet.runs, *listed} - quiet
            mark, pool = partial(self._mark_run, sweep), self._store.pools.bulk
            # Places held at the choice are passed over: what they need was not chosen.
            spared = SortedRows(shard=self._shard)
            for needed in in_batches(pool, mark, run_ids, at_once=RUNS_AT_ONCE):
                spared.add(object_rows(needed, SPARED))
            # Once more, since the logs were read long ago: a run may be behind a new link.
            self._planner.refuse_links()
            sweep.spared = spared

    def _mark_run(self, sweep: _Sweep, run_id: str) -> set[bytes]:
        """Mark a run, and return what it needs now and did not need at the choice."""
        log = self._planner.log(run_id)
        if run_id in self._planner.passed:
            if not is_forgotten(self._store, self._planner.forgotten, run_id):
                raise Malformed("the log of a run that was forgotten is another one", where=run_id)
            return set()
        before = frozenset[Place]() if log is None else self._planner.places_at_choice(log)
        if log is None:
            log = RunLog(self._store, run_id)
            log.read_to(log.length())
            self._planner.quiet.check(log)
            if not log.run.next_slot:
                # A folder without slot 0 is no run yet, and its writer has observed nothing.
                return set()

        def compose(run: RunManifest) -> list[Line] | None:
            # The mark of a later sweep also does: its readers refuse what both sweeps condemned.
            # One that was dropped for good needs none: no commit may follow, which uses them again.
            marked = run.epoch >= sweep.epoch or run.is_dropped_for_good
            return None if marked else [Mark(epoch=sweep.epoch)]

        # The needs of the run at its mark, or, where there was a mark, at any slot after it.
        log.append(compose, patience_s=_PATIENCE_S, caches=self._may_cache, announces=False)
        needed = self._planner.needed_by(log, but=before)
        # If a loss of power undid one of these evictions, its run would need the objects again.
        log.make_durable()
        if run_id in self._planner.logs:  # `note` goes on from here
            self._planner.logs[run_id] = set_aside(log)
        return needed

    # On a full store

    def tidy(self) -> None:
        """Delete stale files and files of dead writers, which needs no epoch and no space."""
        stale = () if self._is_tidy else self._chosen().stale
        self._delete_all([(info.key, info.size_bytes) for info in stale], len(stale))
        self._is_tidy = True
        self._unfinished_bytes += self._store.backend.clear_unfinished(
            max(self._grace_s, LEFTOVER_S)
        )

    def spend_reserve(self) -> None:
        """Give up the store's reserve, and condemn only as much as it has space for."""
        self._store.backend.give_up_reserve()
        self._may_cache = False
        chosen = self._chosen().to_condemn
        if self._sweep is None and len(chosen) > _CONDEMNED_WHEN_FULL:
            few = chosen.largest(_CONDEMNED_WHEN_FULL)
            self._plan, self.is_partial = replace(self._chosen(), to_condemn=few), True

    # G5

    def delete(self) -> GcReport:
        """Delete the condemned that were not spared, stale files, and files of dead writers."""
        sweep = self._sweep
        if sweep is not None:
            if sweep.spared is None:
                raise InvalidInput("nothing may be deleted before every run is marked")
            to_delete = sweep.deleted = sweep.condemned.without(sweep.spared)
            # In the reverse order of writing: an object goes before the packs that it names.
            for packs in (False, True):
                files = (
                    (str(key), size)
                    for key, size in to_delete.sizes()
                    if (key.kind == "packs") is packs
                )
                count = to_delete.packs if packs else len(to_delete) - to_delete.packs
                self._delete_all(files, count)
        self.tidy()
        return self.report()

    def note(self) -> None:
        """Note what the runs hold, so that the next collection reads only what is new."""
        self._planner.make_notes()

    def _delete_all(self, files: Iterable[tuple[str, int]], count: int) -> None:
        """Delete files, given with their sizes; return only when none of them is left."""
        backend, waiting = self._store.backend, iter(files)
        at_once = min(_DELETES, max(_FEW_DELETES, count // backend.concurrency))
        batches = iter(lambda: dict(islice(waiting, at_once)), {})
        first, failed = None, 0

        def delete(batch: dict[str, int]) -> tuple[dict[str, int], Mapping[str, StorageError]]:
            return batch, backend.delete_many(list(batch))

        for batch, errors in in_batches(self._store.pools.small, delete, batches):
            first = first or next(iter(errors.values()), None)
            failed += len(errors)
            self.deleted_bytes += sum(batch[key] for key in batch.keys() - errors.keys())
            if self._progress is not None:
                self._progress(self.deleted_bytes)
        if first is not None:
            is_are = "is" if failed == 1 else "are"
            first.add_note(f"{failed} of {count} objects {is_are} not deleted")
            raise first

    def report(self, *, dry_run: bool = False) -> GcReport:
        """Report the work done so far."""
        plan, sweep = self._chosen(), self._sweep
        deleted = None if sweep is None else sweep.deleted
        return GcReport(
            dry_run=dry_run,
            epoch=None if sweep is None else sweep.epoch,
            runs=plan.runs,
            forgotten=self.to_forget,
            accepted=tuple(self._planner.accepted),
            full=self._planner.full,
            differing=tuple(sorted(self._planner.differing)),
            hidden_runs=tuple(sorted(self._planner.hidden)),
            freed_runs=tuple(sorted(self._planner.freed)),
            keeps=self._planner.keeps,
            objects=plan.objects,
            condemned=plan.to_condemn.tally,
            spared=Tally() if deleted is None else plan.to_condemn.tally - deleted.tally,
            recent=plan.recent,
            deleted=Tally() if deleted is None else deleted.tally,
            stale=Tally.of(info.size_bytes for info in plan.stale),
            unfinished_bytes=self._unfinished_bytes,
            keeps_versions=self._store.backend.keeps_versions(),
        )

    def _chosen(self) -> Plan:
        if self._plan is None:
            self.choose()
        assert self._plan is not None
        return self._plan

    @contextmanager
    def _nothing_deleted(self) -> Iterator[None]:
        """Add to an error that it stopped the collection before anything was deleted."""
        deleted = "No object was deleted" if self._is_tidy else "Nothing was deleted"
        if self._has_deleted:
            deleted = (
                "Only unneeded objects were deleted, before the store had space for this round"
            )
        try:
            yield
        except Conflict as error:
            error.hints = Hint.of(f"{deleted}; the next collection goes on from here.")
            raise
        except (IntegrityError, StoreUnsuitable, UnsupportedFormat) as error:
            error.hints = Hint.of(f"{deleted}.", error.hints)
            raise
