"""Collecting what nothing needs, while others write: the collector's side of the protocol.

*A condemned name is never spoken again.* Rules G1 to G5 of docs/spec.md, section 13, in four steps:
choose (G1), condemn (G1), mark (G2 to G4), delete (G5). Each may be repeated, by anyone, after any
crash, and any number of collectors may be at any of them. The proof is in docs/collection.md, the
protocol as a program in tests/model; the writers' side is `registry.writer`.

Nothing here asks a clock whether a deletion is safe. Grace spares writers from storing again what
was about to be named, and keeps `undo` possible for a while.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from backends import ObjectInfo
from registry.actions import Line, Mark
from registry.epochs import Epochs, encode_sweep
from registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    Malformed,
    MissingObject,
    UnsupportedFormat,
)
from registry.log import RunLog
from registry.maintenance.gc_report import GcReport, Plan, Tally
from registry.maintenance.live import (
    Lying,
    Needs,
    RunFiles,
    fold_young,
    list_objects,
    list_run_files,
    list_run_ids,
)
from registry.objects.keys import ObjectKey, epoch_key, snapshot_slot
from registry.pools import results
from registry.state import RunManifest
from registry.store import Store

DAY_S = 86_400.0
#: Unfinished files and probes younger than this stay, whatever the grace: their makers may live.
_LEFTOVER_S = 3600.0
#: Entries of `epochs/` that are looked through for what a collector left condemned.
_RECENT_EPOCHS = 4
#: Snapshots of a run that stay: the newest, and one in case it cannot be read.
_SNAPSHOTS_KEPT = 2
#: Races for a slot that a mark may lose: what it waits for is a busy run, never a stuck one.
_RACES = 1000
_PROBES = ".probe/"
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
    """Delete what no run needs.

    Args:
        store: The registry's objects.
        grace_s: What was stored or let go within so many seconds by the store's clock stays.
        dry_run: Only report. The age of objects is then taken by this machine's clock.
        progress: Told of bytes deleted.

    Raises:
        IntegrityError: Something could not be read or is not known; nothing was deleted.
        UnsupportedFormat: A newer Holdfast wrote something; nothing was deleted.
    """
    collector = Collector(store, grace_s=grace_s, progress=progress)
    plan = collector.choose(dry_run=dry_run)
    if dry_run:
        return collector.report(dry_run=True)
    if plan.candidates:
        collector.condemn()
        collector.mark()
    return collector.delete()


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
    """

    def __init__(
        self, store: Store, *, grace_s: float = DAY_S, progress: Progress | None = None
    ) -> None:
        number = isinstance(grace_s, (int, float)) and not isinstance(grace_s, bool)
        if not number or not 0 <= grace_s < float("inf"):
            raise InvalidInput("a grace is a number of seconds, 0 or more", found=repr(grace_s))
        self._store = store
        self._grace_s = grace_s
        self._progress = progress
        self._epochs = Epochs(store)
        self._needs = Needs(store)
        self._logs: dict[str, RunLog] = {}
        self._plan: Plan | None = None
        self._sweep: _Sweep | None = None
        self._deleted_bytes = 0

    # G1: any choice is safe; this one is good

    def choose(self, *, dry_run: bool = False) -> Plan:
        """Look for what no run needs; nothing is written but a file that tells the store's time.

        Raises:
            IntegrityError: Something cannot be read or is not known.
        """
        with _nothing_deleted():
            # Before the logs, so that what is committed meanwhile is found to be needed.
            objects = list_objects(self._store)
            self._check_generations(objects)
            self._needs = Needs(self._store, objects)
            self._logs, self._sweep = {}, None
            probes = list(self._store.backend.list(_PROBES))
            now_s = self._now_s(dry_run=dry_run) if self._grace_s or probes else 0.0
            cutoff_s = now_s - self._grace_s if self._grace_s else float("inf")
            runs = list(list_run_files(self._store))
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

    def _check_generations(self, objects: Mapping[ObjectKey, Lying]) -> None:
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

    def _now_s(self, *, dry_run: bool) -> float:
        """Return the store's time; in a dry run, which writes nothing, this machine's."""
        if dry_run:
            return time.time()
        key = f"{_PROBES}clock-{secrets.token_hex(8)}"
        self._store.backend.put(key, b"")
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
        # Slots are put in order: what stands before an old one is old, whatever its time says.
        ages = enumerate(files.slots_s, start=1)
        settled = max((number for number, put_s in ages if put_s <= cutoff_s), default=0)
        young = range(settled, len(files.slots_s))
        if young:
            log.recall()  # an undo among them names what was evicted before
        log.read_to(settled)
        lately = fold_young(log, list(log.fetch(young)))
        log.forget()
        return log, self._needed_by(log), self._needs.as_far_as_left(lately)

    def _needed_by(self, log: RunLog) -> set[ObjectKey]:
        """Return what a run needs at its head, or at an earlier slot that was read already."""
        while True:
            try:
                return self._needs.of(log.state)
            except MissingObject:
                # Let go since, and deleted by another collector? Then the log has grown.
                read = log.state.next_slot
                if log.refresh().next_slot == read:
                    raise

    def condemn(self) -> int | None:
        """Publish the candidates as an epoch, or join the sweep that has condemned them already.

        Returns:
            The epoch; `None` where there is nothing to collect.

        Raises:
            UnsupportedFormat: The registry demands a newer collector.
        """
        with _nothing_deleted():
            candidates = self._chosen().candidates
            if not candidates:
                return None
            while self._sweep is None:
                newest = self._epochs.observe()
                fresh = candidates.keys() - self._condemned_lately(candidates, newest)
                entry = encode_sweep(newest + 1, fresh, self._epochs.min_writer(newest))
                # Nothing fresh: whoever condemned these died, or is still at it; help to finish.
                if not fresh:
                    self._sweep = _Sweep(newest, candidates)
                elif self._store.backend.put_if_absent(epoch_key(newest + 1), entry):
                    self._sweep = _Sweep(newest + 1, candidates)
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
        with _nothing_deleted():
            # G2: listed anew, after the epoch stands. Whoever creates a run later observes it.
            run_ids = self._logs.keys() | set(list_run_ids(self._store))
            live: set[ObjectKey] = set()
            for needed in self._in_parallel(partial(self._mark_run, sweep), run_ids):
                live |= needed
            sweep.live = frozenset(live)

    def _mark_run(self, sweep: _Sweep, run_id: str) -> set[ObjectKey]:
        log = self._logs.get(run_id)
        if log is None:
            log = RunLog(self._store, run_id)
            log.read_to(log.length())
            if not log.state.next_slot:
                # A folder without slot 0 is no run yet, and its writer has observed nothing.
                return set()

        def compose(state: RunManifest) -> list[Line] | None:
            # The mark of a later sweep does as well: who has read it refuses what both condemned.
            # A dropped run needs none: no commit may follow, so nothing can come into use again.
            marked = state.epoch >= sweep.epoch or state.dropped is not None
            return None if marked else [Mark(epoch=sweep.epoch)]

        # What the run needs at its mark, or, where one stood already, at any slot after it.
        log.append(compose, races=_RACES)
        return self._needed_by(log) & sweep.doomed.keys()

    # G5

    def delete(self) -> GcReport:
        """Delete what was condemned and turned out dead, stale caches, and what dead writers left.

        Raises:
            StorageError: The store refused; what is left is deleted by the next collection.
        """
        plan, sweep = self._chosen(), self._sweep
        if sweep is not None:
            if sweep.live is None:
                raise InvalidInput("nothing may be deleted before every run is marked")
            doomed = sweep.doomed.keys() - sweep.live
            # In the reverse order of writing: what names before what is named.
            for packs in (False, True):
                keys = [key for key in doomed if (key.kind == "packs") is packs]
                self._delete_all((str(key), sweep.doomed[key]) for key in keys)
        self._delete_all((info.key, info.size_bytes) for info in plan.stale)
        unfinished = self._store.backend.clear_unfinished(max(self._grace_s, _LEFTOVER_S))
        return self.report(unfinished_bytes=unfinished)

    def _delete_all(self, files: Iterable[tuple[str, int]]) -> None:
        delete = self._store.backend.delete
        waiting = iter(files)
        while batch := list(islice(waiting, _DELETES_AT_ONCE)):
            results([self._store.pools.small.submit(delete, key) for key, _ in batch])
            self._deleted_bytes += sum(size for _, size in batch)
            if self._progress is not None:
                self._progress(self._deleted_bytes)

    def report(self, *, dry_run: bool = False, unfinished_bytes: int = 0) -> GcReport:
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
            unfinished_bytes=unfinished_bytes,
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
def _nothing_deleted() -> Iterator[None]:
    """Say with an error that it stopped the collection before anything was deleted."""
    try:
        yield
    except Conflict as error:
        error.hint = "Nothing was deleted; the next collection goes on from here."
        raise
    except (IntegrityError, UnsupportedFormat) as error:
        error.hint = f"Nothing was deleted. {error.hint or ''}".rstrip()
        raise
