"""Collecting what nothing needs, while others write: the collector's side of the protocol.

*A condemned name is never spoken again.* Rules G1 to G5 of docs/spec.md, section 13, in four steps:
choose (G1), condemn (G1), mark (G2 to G4), delete (G5). Each may be repeated, by anyone, after any
crash, and any number of collectors may be at any of them. The proof is in docs/collection.md, the
protocol as a program in tests/model; the writers' side is
`holdfast.registry.writing.object_writer`.

Nothing here asks a clock whether a deletion is safe. Grace spares writers from storing again what
was about to be named, and keeps `undo` possible for a while.

On a full store nothing can be condemned before some space is free: first delete files that need no
epoch (`tidy`), then use the reserve (`spend_reserve`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from holdfast.backends import ObjectInfo, refuse_links
from holdfast.backends.escape import quoted
from holdfast.registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    Malformed,
    MissingObject,
    StoreFull,
    StoreUnsuitable,
    UnsupportedFormat,
)
from holdfast.registry.history.actions import Line, Mark
from holdfast.registry.history.epochs import DAY_S, Epochs, encode_sweep
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.maintenance.gc_report import GcReport, Plan, Tally
from holdfast.registry.maintenance.live import (
    Needs,
    RunFiles,
    StoredFile,
    fold_young,
    list_objects,
    list_run_files,
    list_run_ids,
)
from holdfast.registry.storage.heads import Head
from holdfast.registry.storage.keys import (
    FOLDERS,
    PROBES,
    RUNS,
    ObjectKey,
    epoch_key,
    is_probe,
    snapshot_slot,
)
from holdfast.registry.storage.store import Store
from holdfast.registry.storage.threads import results

#: The longest grace: 30,000 years.
_LONGEST_S = 10**12
#: Unfinished files and probes younger than this stay, whatever the grace: their makers may live.
_LEFTOVER_S = 3600.0
#: Entries of `epochs/` that are looked through for what a collector left condemned.
_RECENT_EPOCHS = 4
#: Snapshots of a run that stay: the newest, and one in case it cannot be read.
_SNAPSHOTS_KEPT = 2
#: Races for a slot that a mark may lose: what it waits for is a busy run, never a stuck one.
_RACES = 1000
#: The most objects that a sweep condemns on a full store: its epoch must fit into the reserve.
_CONDEMNED_WHEN_FULL = 256
_DELETES_AT_ONCE = 4096
_RUNS_AT_ONCE = 256

_In = TypeVar("_In")
_Out = TypeVar("_Out")

#: Called with the number of bytes that were deleted so far.
Progress = Callable[[int], object]


def collect(
    store: Store,
    *,
    grace_s: float = DAY_S,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> GcReport:
    """Delete what no run needs; see `Registry.gc`."""
    report: GcReport | None = None
    done_bytes = 0
    while True:
        further = None if progress is None else _beyond(done_bytes, progress)
        collector = Collector(store, grace_s=grace_s, progress=further)
        plan = collector.choose(dry_run=dry_run)
        if dry_run:
            return collector.report(dry_run=True)
        if plan.candidates:
            _sweep(collector)
        made = collector.delete()
        report = made if report is None else report.before(made)
        if not collector.is_partial:
            store.backend.keep_reserve(RUNS)
            return report
        # Now there is space for an epoch that condemns the other objects.
        done_bytes += collector.deleted_bytes


def _beyond(deleted_bytes: int, progress: Progress) -> Progress:
    return lambda further_bytes: progress(deleted_bytes + further_bytes)


def _sweep(collector: Collector) -> None:
    """Condemn and mark; on a full store, make room for that first."""
    for make_room in (collector.tidy, collector.spend_reserve):
        try:
            collector.condemn()
            collector.mark()
        except StoreFull:
            make_room()
        else:
            return
    collector.condemn()
    collector.mark()


@dataclass(slots=True)
class _Sweep:
    """A sweep under way.

    Attributes:
        epoch: Its epoch.
        doomed: What it condemned and this collector saw, with sizes.
        live: Those that runs needed when they were marked; `None` before all of them are.
    """

    epoch: int
    doomed: Mapping[ObjectKey, int]
    live: frozenset[ObjectKey] | None = None


class Collector:
    """One collection, step by step.

    Args:
        store: The registry's objects.
        grace_s: What was stored or let go within so many seconds by the store's clock stays.
        progress: Told of bytes deleted.

    Attributes:
        deleted_bytes: How much was deleted so far.
        is_partial: Whether only some unneeded objects are condemned, because space is short.
    """

    def __init__(
        self, store: Store, *, grace_s: float = DAY_S, progress: Progress | None = None
    ) -> None:
        number = isinstance(grace_s, (int, float)) and not isinstance(grace_s, bool)
        if not number or not 0 <= grace_s <= _LONGEST_S:
            raise InvalidInput("a grace is a number of seconds, 0 or more", found=quoted(grace_s))
        self._store = store
        self._grace_s = grace_s
        self._progress = progress
        self._epochs = Epochs(store)
        self._needs = Needs(store)
        self._logs: dict[str, RunLog] = {}
        self._seen: Mapping[str, Head] = {}
        self._plan: Plan | None = None
        self._sweep: _Sweep | None = None
        self._unfinished_bytes = 0
        self._may_cache = True
        self._is_tidy = False
        self.deleted_bytes = 0
        self.is_partial = False

    # G1: any choice is safe; this one is good

    def choose(self, *, dry_run: bool = False) -> Plan:
        """Look for what no run needs; nothing is written but a file that tells the store's time.

        Raises:
            IntegrityError: Something cannot be read or is not known.
            StoreUnsuitable: There is a symbolic link among what would be read.
        """
        with _nothing_deleted():
            self._refuse_links()
            if not dry_run:
                self._store.prepare_writing()
            # Before the logs, so that what is committed meanwhile is found to be needed.
            objects = list_objects(self._store)
            self._check_generations(objects)
            self._needs = Needs(self._store, objects)
            self._logs, self._sweep, self._is_tidy = {}, None, False
            self._seen = self._store.heads.all() if self._store.heads is not None else {}
            probes = [p for p in self._store.backend.list(PROBES) if is_probe(p.key)]
            newest_s = max((lying.modified_s for lying in objects.values()), default=0.0)
            now_s = 0.0
            if self._grace_s or probes:
                now_s = self._now_s(newest_s, dry_run=dry_run)
            cutoff_s = now_s - self._grace_s if self._grace_s else float("inf")
            runs = list(list_run_files(self._store))
            if self._store.heads is not None:
                self._store.heads.check_runs((files.run_id for files in runs), self._seen)
            needed, kept = self._read_runs(runs, cutoff_s)
            unneeded = objects.keys() - needed
            recent = {key for key in unneeded if objects[key].modified_s > cutoff_s or key in kept}
            candidates = {key: objects[key].size_bytes for key in unneeded - recent}
            self._plan = Plan(
                candidates,
                Tally.of(objects[key].size_bytes for key in recent),
                Tally.of(lying.size_bytes for lying in objects.values()),
                len(runs),
                tuple(_stale(runs, probes, now_s - max(self._grace_s, _LEFTOVER_S))),
            )
        return self._plan

    def _refuse_links(self) -> None:
        """Raise if there is a link: it may hide a run, and nothing behind it may be deleted."""
        for folder in (*FOLDERS, PROBES):
            refuse_links(self._store.backend, folder)

    def _check_generations(self, objects: Mapping[ObjectKey, StoredFile]) -> None:
        """Refuse objects put under an epoch that is gone: the log of epochs lost its end."""
        newest = self._epochs.observe()
        for key in objects:
            if key.generation > newest:
                raise Malformed(
                    "an object was put under an epoch that is not there",
                    where=key,
                    expected=f"a generation of at most {newest}",
                    hint=f"Restore {epoch_key(newest + 1)} and what followed from a backup, or "
                    "move the object away if it is none of Holdfast's.",
                )

    def _now_s(self, newest_s: float, *, dry_run: bool) -> float:
        """Return the store's time; in a dry run, which writes nothing, this machine's.

        A completely full store cannot give its time: then the result is at least `newest_s`.
        """
        if dry_run:
            return time.time()
        key = f"{PROBES}clock-{secrets.token_hex(8)}"
        try:
            self._store.with_reserve(lambda: self._store.backend.put(key, b""))
        except StoreFull:
            return newest_s
        try:
            return self._store.backend.stat(key).modified_s
        finally:
            self._store.backend.delete(key)

    def _read_runs(
        self, runs: Iterable[RunFiles], cutoff_s: float
    ) -> tuple[set[ObjectKey], set[ObjectKey]]:
        """Return what the runs need, and what some of them needed within the grace."""
        needed: set[ObjectKey] = set()
        kept: set[ObjectKey] = set()
        read = partial(self._read_run, cutoff_s=cutoff_s)
        for log, now, lately in self._in_parallel(read, runs):
            self._logs[log.run_id] = log
            needed |= now
            kept |= lately
        return needed, kept

    def _read_run(
        self, files: RunFiles, cutoff_s: float
    ) -> tuple[RunLog, set[ObjectKey], set[ObjectKey]]:
        newest = snapshot_slot(files.snapshots[0].key) if files.snapshots else -1
        log = RunLog(self._store, files.run_id, snapshot_slot=newest)
        log.seen.head = self._seen.get(files.run_id)
        # Slots are put in order: what stands before an old one is old, whatever its time says.
        ages = enumerate(files.slots_s, start=1)
        settled = max((number for number, put_s in ages if put_s <= cutoff_s), default=0)
        young = range(settled, len(files.slots_s))
        if young:
            log.recall()  # an undo among them names what was evicted before
        log.read_to(settled)
        lately = fold_young(log, list(log.fetch(young)))
        log.check_head()
        log.forget()
        return log, self._needed_by(log), self._needs.as_far_as_left(lately)

    def _needed_by(self, log: RunLog) -> set[ObjectKey]:
        """Return what a run needs at its head, or at an earlier slot that was read already."""
        while True:
            try:
                return self._needs.of(log.run)
            except MissingObject:
                # Let go since, and deleted by another collector? Then the log has grown.
                read = log.run.next_slot
                if log.refresh().next_slot == read:
                    raise

    def condemn(self) -> int | None:
        """Publish the candidates as an epoch, or join the sweep that has condemned them already.

        Returns:
            The epoch; `None` where there is nothing to collect.

        Raises:
            UnsupportedFormat: The registry demands a newer collector.
        """
        with _nothing_deleted(is_tidy=self._is_tidy):
            candidates = self._chosen().candidates
            if not candidates:
                return None
            while self._sweep is None:
                newest = self._epochs.observe()
                # Its writer may have died before it was durable, and the next steps depend on it.
                self._epochs.make_durable(newest)
                fresh = candidates.keys() - self._condemned_lately(candidates, newest)
                entry = encode_sweep(newest + 1, fresh, self._epochs.min_writer(newest))
                # Nothing fresh: whoever condemned these died, or is still at it; help to finish.
                if not fresh:
                    self._sweep = _Sweep(newest, candidates)
                elif self._store.backend.put_if_absent(epoch_key(newest + 1), entry):
                    self._sweep = _Sweep(newest + 1, candidates)
            if self._store.heads is not None:
                self._store.heads.check_epoch(self._sweep.epoch)
            return self._sweep.epoch

    def _condemned_lately(self, keys: Collection[ObjectKey], newest: int) -> set[ObjectKey]:
        found: set[ObjectKey] = set()
        for epoch in range(max(1, newest - _RECENT_EPOCHS + 1), newest + 1):
            listed = self._epochs.entry(epoch)[1]
            found |= {key for key in keys if key.generation < epoch and key in listed}
        return found

    # G2 to G4

    def mark(self) -> None:
        """Mark every run, and find what of the condemned it needs.

        Raises:
            IntegrityError: A run cannot be read; nothing was deleted.
        """
        sweep = self._sweep
        if sweep is None:
            return
        with _nothing_deleted(is_tidy=self._is_tidy):
            # G2: listed anew, after the epoch stands. Whoever creates a run later observes it.
            run_ids = self._logs.keys() | set(list_run_ids(self._store))
            live: set[ObjectKey] = set()
            for needed in self._in_parallel(partial(self._mark_run, sweep), run_ids):
                live |= needed
            # Once more, since the logs were read long ago: a new link may hide a run.
            self._refuse_links()
            sweep.live = frozenset(live)

    def _mark_run(self, sweep: _Sweep, run_id: str) -> set[ObjectKey]:
        log = self._logs.get(run_id)
        if log is None:
            log = RunLog(self._store, run_id)
            log.read_to(log.length())
            if not log.run.next_slot:
                # A folder without slot 0 is no run yet, and its writer has observed nothing.
                return set()

        def compose(run: RunManifest) -> list[Line] | None:
            # The mark of a later sweep does as well: who has read it refuses what both condemned.
            # A dropped run needs none: no commit may follow, so nothing can come into use again.
            marked = run.epoch >= sweep.epoch or run.dropped is not None
            return None if marked else [Mark(epoch=sweep.epoch)]

        # What the run needs at its mark, or, where one stood already, at any slot after it.
        log.append(compose, races=_RACES, caches=self._may_cache)
        needed = self._needed_by(log)
        # If a loss of power undid one of these evictions, its run would need the objects again.
        log.make_durable()
        return needed & sweep.doomed.keys()

    # On a full store

    def tidy(self) -> None:
        """Delete stale caches and files of dead writers, which needs no epoch and no space."""
        stale = () if self._is_tidy else self._chosen().stale
        self._delete_all((info.key, info.size_bytes) for info in stale)
        self._is_tidy = True
        self._unfinished_bytes += self._store.backend.clear_unfinished(
            max(self._grace_s, _LEFTOVER_S)
        )

    def spend_reserve(self) -> None:
        """Give up the store's reserve, and condemn only as much as it has space for."""
        self._store.backend.give_up_reserve()
        self._may_cache = False
        candidates = self._chosen().candidates
        if self._sweep is None and len(candidates) > _CONDEMNED_WHEN_FULL:
            largest = sorted(candidates, key=candidates.__getitem__, reverse=True)
            few = {key: candidates[key] for key in largest[:_CONDEMNED_WHEN_FULL]}
            self._plan, self.is_partial = replace(self._chosen(), candidates=few), True

    # G5

    def delete(self) -> GcReport:
        """Delete what was condemned and turned out dead, stale caches, and what dead writers left.

        Raises:
            StorageError: The store refused; what is left is deleted by the next collection.
        """
        sweep = self._sweep
        if sweep is not None:
            if sweep.live is None:
                raise InvalidInput("nothing may be deleted before every run is marked")
            doomed = sweep.doomed.keys() - sweep.live
            # In the reverse order of writing: what names before what is named.
            for packs in (False, True):
                keys = [key for key in doomed if (key.kind == "packs") is packs]
                self._delete_all((str(key), sweep.doomed[key]) for key in keys)
        self.tidy()
        return self.report()

    def _delete_all(self, files: Iterable[tuple[str, int]]) -> None:
        delete = self._store.backend.delete
        waiting = iter(files)
        while batch := list(islice(waiting, _DELETES_AT_ONCE)):
            results([self._store.pools.small.submit(delete, key) for key, _ in batch])
            self.deleted_bytes += sum(size for _, size in batch)
            if self._progress is not None:
                self._progress(self.deleted_bytes)

    def report(self, *, dry_run: bool = False) -> GcReport:
        """Return what was done so far."""
        plan, sweep = self._chosen(), self._sweep
        live = None if sweep is None else sweep.live
        dead = [] if live is None or sweep is None else sweep.doomed.keys() - live
        return GcReport(
            dry_run=dry_run,
            epoch=None if sweep is None else sweep.epoch,
            runs=plan.runs,
            objects=plan.objects,
            condemned=Tally.of(plan.candidates.values()),
            spared=Tally.of(plan.candidates[key] for key in live or ()),
            recent=plan.recent,
            deleted=Tally.of(plan.candidates[key] for key in dead),
            stale=Tally.of(info.size_bytes for info in plan.stale),
            unfinished_bytes=self._unfinished_bytes,
            keeps_versions=self._store.backend.keeps_versions(),
        )

    def _chosen(self) -> Plan:
        if self._plan is None:
            self.choose()
        assert self._plan is not None
        return self._plan

    def _in_parallel(self, work: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        waiting = iter(items)
        while batch := list(islice(waiting, _RUNS_AT_ONCE)):
            yield from results([self._store.pools.bulk.submit(work, item) for item in batch])


def _stale(
    runs: Iterable[RunFiles], probes: Iterable[ObjectInfo], before_s: float
) -> Iterator[ObjectInfo]:
    """Yield the files beside the objects that serve nobody any more."""
    for files in runs:
        yield from files.snapshots[_SNAPSHOTS_KEPT:]
    yield from (info for info in probes if info.modified_s <= before_s)


@contextmanager
def _nothing_deleted(*, is_tidy: bool = False) -> Iterator[None]:
    """Add to an error that it stopped the collection before anything was deleted.

    Args:
        is_tidy: Whether stale caches were deleted already, but no objects.
    """
    told = "No object was deleted" if is_tidy else "Nothing was deleted"
    try:
        yield
    except Conflict as error:
        error.hint = f"{told}; the next collection goes on from here."
        raise
    except (IntegrityError, StoreUnsuitable, UnsupportedFormat) as error:
        error.hint = f"{told}. {error.hint or ''}".rstrip()
        raise
