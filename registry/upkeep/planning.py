"""Plan a collection: list the objects, replay the runs, and find what none of them needs.

Rule G1 of docs/spec.md, section 13, reads here. Nothing is written but the file that tells the
store's time. `holdfast.registry.upkeep.gc` carries a plan out.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.backends import ObjectInfo, ObjectNotFound, refuse_links
from holdfast.registry.errors import (
    IntegrityError,
    InvalidInput,
    Malformed,
    MissingObject,
    NotFound,
    StorageError,
    StoreFull,
    UnsupportedFormat,
)
from holdfast.registry.history import (
    Epochs,
    RunLog,
    stale_snapshots,
)
from holdfast.registry.history.actions import Recover
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.objects import (
    FOLDERS,
    PROBES,
    ObjectKey,
    epoch_key,
    is_probe,
    snapshot_slot,
)
from holdfast.registry.store import Store
from holdfast.registry.store.heads import Head
from holdfast.registry.upkeep.gc_report import Tally
from holdfast.registry.upkeep.live import (
    UNREADABLE,
    Needs,
    RunFiles,
    StoredFile,
    fold_recent,
    is_forgotten,
    list_by_run,
    list_objects,
    run_files,
    with_way_out,
)
from holdfast.registry.upkeep.run_notes import Notes, Replayed, RunNote, Seen
from holdfast.registry.upkeep.window import RUNS_AT_ONCE, in_batches
from holdfast.registry.values import Digest

#: Unfinished files and probes younger than this stay, whatever the grace: their writers may be
#: alive.
LEFTOVER_S = 3600.0
_LOGGER = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Plan:
    """Objects that a collector would condemn."""

    #: Unneeded objects that are not recent, with their sizes in bytes.
    to_condemn: Mapping[ObjectKey, int]
    recent: Tally  # unneeded objects within the grace
    objects: Tally
    runs: int
    #: Snapshots that newer ones have replaced, and files of probes that ended long ago.
    stale: tuple[ObjectInfo, ...]


class Planner:
    """Finds the objects that no run needs.

    Attributes:
        logs: The logs that were replayed, by run.
        passed: The runs that cannot be read and are passed over: they are in `forget`, or an epoch
            says that they were forgotten.
        full: Whether every log and placement is read, and compared with the notes.
        differing: The runs whose notes differ from what was read.
        forgotten: The slot that ends the log of each run that was forgotten up to now.
    """

    def __init__(
        self,
        store: Store,
        epochs: Epochs,
        grace_s: float,
        forget: Collection[str] = (),
        *,
        full: bool = False,
    ) -> None:
        self._store = store
        self._epochs = epochs
        self._grace_s = grace_s
        self._needs = Needs(store)
        self._seen: Mapping[str, Head] = {}
        self._forget = frozenset(forget)
        self._asked_full = self.full = full
        self._notes = Notes()
        self._due: list[Replayed] = []
        self.logs: dict[str, RunLog] = {}
        self.passed: set[str] = set()
        self.differing: set[str] = set()
        self.forgotten: dict[str, int] = {}

    def plan(self, *, dry_run: bool = False) -> Plan:
        """Find what no run needs; see `Collector.choose`."""
        heads = self._store.heads
        self.refuse_links()
        if not dry_run:
            self._store.prepare_writing()
        # Before the logs, so that objects which are committed meanwhile are found to be needed.
        objects = list_objects(self._store)
        self._check_generations(objects)
        self._needs, self.logs, self.passed = Needs(self._store, objects), {}, set()
        # Before the runs are listed, so that every slot that a note names is in the listing.
        self._notes, self._due, self.differing = Notes.read(self._store), [], set()
        self.full = self._asked_full or self._notes.is_full_due
        self._seen = heads.all() if heads is not None else {}
        probes = [p for p in self._store.backend.list(PROBES) if is_probe(p.key)]
        newest_s = max((file.modified_s for file in objects.values()), default=0.0)
        now_s = 0.0
        if self._grace_s or probes:
            now_s = self._now_s(newest_s, dry_run=dry_run)
        cutoff_s = now_s - self._grace_s if self._grace_s else float("inf")
        runs = []
        for name, infos in list_by_run(self._store):
            try:
                runs.append(run_files(self._store, name, infos))
            except UNREADABLE as error:
                self._pass_over(name, error)
        listed = {files.run_id for files in runs} | self.passed
        # A run that was seen before and is gone: nobody knows what it needed.
        self.passed |= self._forget & (self._seen.keys() | self._notes.by_run.keys()) - listed
        for name in sorted(
            self._notes.by_run.keys() - listed - self.passed - self.forgotten.keys()
        ):
            self._pass_over(name, self._notes.by_run[name].lost("no such run"))
        if heads is not None:
            heads.check_runs(listed | self.passed, self._seen)
        needed, needed_recently = self._read_runs(runs, cutoff_s)
        self._check_forget()
        unneeded = objects.keys() - needed
        recent = {
            key for key in unneeded if objects[key].modified_s > cutoff_s or key in needed_recently
        }
        return Plan(
            {key: objects[key].size_bytes for key in unneeded - recent},
            Tally.of(objects[key].size_bytes for key in recent),
            Tally.of(file.size_bytes for file in objects.values()),
            len(listed),
            tuple(_stale(runs, probes, now_s - max(self._grace_s, LEFTOVER_S))),
        )

    def refuse_links(self) -> None:
        """Raise if there is a link: a run may be behind it, and nothing there may be deleted."""
        for folder in (*FOLDERS, PROBES):
            refuse_links(self._store.backend, folder)

    def _check_generations(self, objects: Mapping[ObjectKey, StoredFile]) -> None:
        """Refuse objects whose generation is above the newest epoch: epochs were lost."""
        newest = self._epochs.observe()
        header = self._epochs.header(newest)
        self.forgotten = dict((header and header.forgotten) or {})
        for key in objects:
            if key.generation > newest:
                raise Malformed(
                    "an object was put under an epoch that is not there",
                    where=key,
                    expected=f"a generation of at most {newest}",
                    hint=f"Restore {epoch_key(newest + 1)} and all later epochs from a backup, or "
                    "move the object away if Holdfast did not write it.",
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
        except ObjectNotFound:  # this one stalled, and another one deleted the old probe
            return self._now_s(newest_s, dry_run=dry_run)
        finally:
            self._store.backend.delete(key)

    def _read_runs(
        self, runs: Iterable[RunFiles], cutoff_s: float
    ) -> tuple[set[ObjectKey], set[ObjectKey]]:
        """Return the objects that runs need now, and those that they needed within the grace."""
        needed: set[ObjectKey] = set()
        needed_recently: set[ObjectKey] = set()
        read = partial(self._read_unless_passed, cutoff_s=cutoff_s)
        found = in_batches(self._store.pools.bulk, read, runs, at_once=RUNS_AT_ONCE)
        for log, now, recently in filter(None, found):
            self.logs[log.run_id] = log
            needed |= now
            needed_recently |= recently
        return needed, needed_recently

    def _read_unless_passed(
        self, files: RunFiles, cutoff_s: float
    ) -> tuple[RunLog, set[ObjectKey], set[ObjectKey]] | None:
        try:
            return self._read_run(files, cutoff_s)
        except UNREADABLE as error:
            self._pass_over(files.run_id, error)
            return None

    def _read_run(
        self, files: RunFiles, cutoff_s: float
    ) -> tuple[RunLog, set[ObjectKey], set[ObjectKey]]:
        newest = snapshot_slot(files.snapshots[0].key) if files.snapshots else -1
        log = RunLog(self._store, files.run_id, snapshot_slot=newest)
        log.seen.head = self._seen.get(files.run_id)
        # Slots are put in order: a slot before an old one is old, whatever its time says.
        ages = enumerate(files.slots_s, start=1)
        settled = max((number for number, put_s in ages if put_s <= cutoff_s), default=0)
        recent = list(log.fetch(range(settled, len(files.slots_s))))
        note = self._notes.by_run.get(files.run_id)
        start = None if note is None else self._start(log, note, len(files.slots_s), recent)
        if start is None and recent:
            log.recall()  # an undo among them names what was evicted before
        then = log.read_to(note.settled) if self.full and note and note.settled <= settled else None
        before = log.read_to(settled)
        places = fold_recent(log, recent)
        # What the note knows of the commits that were seen was compared with the log.
        is_skipped = start is not None and start.commits != log.seen.commits
        log.check_head(log.fetch(log.seen.skipped(note.settled - 1)) if note and is_skipped else ())
        log.compact()
        needed, recently = self.needed_by(log), self._needs.of_evicted(places)
        if note is not None and then is not None and self._differs(note, then.compact()):
            self.differing.add(files.run_id)
        if log.newest_commit is not None:
            done = Replayed(log, log.run.next_slot, log.newest_commit, before.compact())
            if files.run_id in self.differing or done.is_due(note, start):
                self._due.append(done)
        return log, needed, recently

    def _start(
        self, log: RunLog, note: RunNote, slots: int, recent: Sequence[Slot]
    ) -> RunManifest | None:
        """Check a log against the note of the run, and start from it; `None` if that cannot be."""
        seen = note.seen
        commit = next(log.fetch([seen.slot])) if seen.slot < slots else None
        note.check(slots, None if commit is None else Digest.of(commit.data))
        undone = (a for slot in recent for _, one in slot.commits for a in one.actions)
        # A longer grace than before needs earlier slots; an undo, the records of the evicted.
        is_young = note.settled > slots - len(recent)
        is_undone = any(isinstance(one, Recover) for one in undone)
        if self.full or is_young or is_undone or not note.settled:
            return None
        assert commit is not None
        try:
            run, packs = note.replay()
        except (IntegrityError, ValueError) as error:
            _LOGGER.warning("a note of a collection is not used: %s", error)
            return None
        last = [] if seen.slot == note.settled - 1 else list(log.fetch([note.settled - 1]))
        log.start_from(run, [one for one in (commit, *last) if one.number < note.settled])
        for place in run.places:
            if place.placement_key in packs:
                self._needs.learn(place, packs[place.placement_key])
        return run

    def _differs(self, note: RunNote, run: RunManifest) -> bool:
        """Return whether a note says something else than the log and the placements."""
        if not note.settled:
            return False
        try:
            noted, packs = note.replay()
        except (IntegrityError, ValueError):
            return True
        read = self._needs.known(run.places)
        same = all(set(packs[key]) == set(read[key]) for key in packs.keys() & read.keys())
        # Tables of a run that was complete for a while may have another order.
        return _told(noted) != _told(run) or not same

    def make_notes(self) -> None:
        """Put notes of the runs that have changed, for the next collection."""

        def note(done: Replayed) -> tuple[Seen, bytes]:
            # A note of slots that a loss of power undoes would stop every later collection.
            done.log.make_durable()
            return done.note(self._needs.known(done.settled.places))

        try:
            made = in_batches(self._store.pools.bulk, note, self._due, at_once=RUNS_AT_ONCE)
            self._notes.put(self._store, made, full=self.full)
        except StorageError as error:
            _LOGGER.warning("notes for the next collection are not kept: %s", error)

    def needed_by(self, log: RunLog) -> set[ObjectKey]:
        """Return the objects that a run needs at its head, or at an earlier slot already read."""
        while True:
            try:
                return self._needs.of(log.run)
            except MissingObject:
                # Evicted since, and deleted by another collector? Then the log has grown.
                read = log.run.next_slot
                if log.refresh().next_slot == read:
                    raise

    # Runs that cannot be read

    def _pass_over(self, run_id: str, error: IntegrityError | UnsupportedFormat) -> None:
        """Raise an error of reading a run unless an operator gives the run up, or has done so."""
        if run_id not in self._forget and not is_forgotten(self._store, self.forgotten, run_id):
            raise with_way_out(error, run_id, "collects for the others")
        self.passed.add(run_id)

    def to_forget(self) -> list[str]:
        """Return the runs that this collection has to forget."""
        new = self.passed & self._forget
        return sorted(one for one in new if not is_forgotten(self._store, self.forgotten, one))

    def _check_forget(self) -> None:
        """Refuse to forget a run that can be read, or that nobody has heard of."""
        for name in sorted(self._forget - self.passed):
            log = self.logs.get(name)
            if log is None:
                raise NotFound("no such run", where=name, hint="`holdfast run ls` lists the runs.")
            if log.run.dropped is None:
                raise InvalidInput(
                    "only a run that cannot be read is forgotten",
                    where=name,
                    found="it can be read",
                    hint=f"To release what it holds, run `holdfast run drop {name}`.",
                )


def _told(run: RunManifest) -> tuple[object, ...]:
    """Return the facts that decide over the objects of a run, now and after further slots."""
    return run.commits, run.head, run.epoch, run.dropped, set(run.places), run.uses


def _stale(
    runs: Iterable[RunFiles], probes: Iterable[ObjectInfo], before_s: float
) -> Iterator[ObjectInfo]:
    """Yield snapshots and probes that nobody uses any more."""
    for files in runs:
        yield from stale_snapshots(files.snapshots)
    yield from (info for info in probes if info.modified_s <= before_s)
