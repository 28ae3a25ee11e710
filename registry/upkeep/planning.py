"""Plan a collection: list the objects, replay the runs, and find what none of them needs.

Rules G1 and D2 of docs/spec.md, section 13. `plan` writes only the reserve of a folder, the file
that tells the store's time, and the line that frees a dropped run; `make_notes` puts notes and
seals at the end of a collection. `holdfast.registry.upkeep.gc` carries a plan out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from holdfast.backends import ObjectInfo, refuse_links
from holdfast.registry.errors import (
    Conflict,
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
    Seen,
    set_aside,
    stale_snapshots,
    taken_up,
)
from holdfast.registry.history.actions import Free, Line, Place, Recover
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.objects import FOLDERS, PROBES, ObjectKey, epoch_key, is_probe
from holdfast.registry.store import RUNS_AT_ONCE, Store, Workers, ask_time, in_batches
from holdfast.registry.store.heads import Head
from holdfast.registry.upkeep.accepting import accept_logs
from holdfast.registry.upkeep.gc_report import Tally
from holdfast.registry.upkeep.live import (
    UNREADABLE,
    KeptPlaces,
    Listing,
    Needs,
    RunFiles,
    fold_recent,
    held_place,
    is_forgotten,
    list_by_run,
    list_objects,
    run_files,
    with_way_out,
)
from holdfast.registry.upkeep.run_notes import Held, Notes, Replayed, RunNote, of_seal
from holdfast.registry.upkeep.sealing import QuietRuns, has_only_seals, seal
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.upkeep.sorted_rows import (
    LISTED,
    Objects,
    SortedRows,
    grouped,
    keys_of,
    object_rows,
)

#: Unfinished files and probes younger than this stay, whatever the grace: their writers may be
#: alive.
LEFTOVER_S = 3600.0
#: What rows of objects say: needed by a run, needed within the grace, named by a note.
_NEEDED, _RECENT, _NOTED = 2, 4, 8
_LOGGER = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Plan:
    """Objects that a collector would condemn."""

    to_condemn: Objects  # unneeded objects that are not recent
    recent: Tally  # unneeded objects within the grace
    objects: Tally
    runs: int
    #: Snapshots that newer ones have replaced, and files of probes that ended long ago.
    stale: tuple[ObjectInfo, ...]


class Planner:
    """Finds the objects that no run needs.

    Attributes:
        logs: The logs that were replayed, set aside, by run; `log` returns one.
        passed: The runs that cannot be read and are passed over: they are in `forget`, or an epoch
            says that they were forgotten.
        full: Whether every log and placement is read, and compared with the notes.
        differing: The runs whose notes differ from what was read.
        forgotten: The slot that ends the log of each run that was forgotten up to now.
        accepted: The runs in `accept` whose logs are not those of their notes or snapshots.
        hidden: The dropped runs that hold what they held.
        freed: The dropped runs whose delay has passed: they were freed, or would be.
        seals: Whether the registry seals runs.
        keeps: Whether the registry frees nothing that evictions, thinnings and drops release.
    """

    def __init__(
        self,
        store: Store,
        epochs: Epochs,
        grace_s: float,
        forget: Collection[str] = (),
        *,
        accept: Collection[str] = (),
        full: bool = False,
        shard: Shard | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._store = store
        self._epochs = epochs
        self._grace_s = grace_s
        self._shard = shard or Shard()
        self._workers = workers or Workers(None, store)
        self._needs = Needs(self._workers)
        self._seen: Mapping[str, Head] = {}
        self._forget = frozenset(forget)
        self._accept = frozenset(accept)
        self._asked_full = self.full = full
        self._notes = Notes()
        #: The runs that get a note, each with whether it may be sealed; and the notes.
        self._due: dict[str, bool] = {}
        self._made = Shelf[bytes]()
        self.logs = Shelf[bytes]()
        self.passed: set[str] = set()
        self.differing: set[str] = set()
        self.forgotten: dict[str, int] = {}
        self.accepted: list[str] = []
        self.hidden: set[str] = set()
        self.freed: set[str] = set()
        self._delay_s: float = math.inf  # until the epoch is read
        self.keeps = False
        self._epoch = 0
        self.seals = False
        self.quiet = QuietRuns(store, self._notes, self._needs, self._seen, grace_s)
        self._kept = Shelf[bytes]()  # the `KeptPlaces` of each run
        self._asked_at: dict[str, int] = {}  # slots of each run when its needs were found
        self._now_s: Callable[[], float] = time.time
        self._is_dry = True

    def plan(self, *, dry_run: bool = False) -> Plan:
        """Find what no run needs, and free dropped runs that are due; see `Collector.choose`."""
        heads = self._store.heads
        self.refuse_links()
        if not dry_run:
            self._store.prepare_writing()
        # Before the logs, so that objects which are committed meanwhile are found to be needed.
        objects = list_objects(self._store, self._shard)
        self._check_generations(objects.highest)
        # Before the runs are listed, so that every slot that a note names is in the listing.
        self._notes, self._due, self.differing = Notes.read(self._store), {}, set()
        self.accepted = accept_logs(
            self._store, self._epochs, self._notes, self._accept, dry_run=dry_run
        )
        self._needs, self.passed = self._needs_beside(objects), set()
        self._made, self.logs = Shelf(), Shelf()
        self.full = self._asked_full or self._notes.is_full_due
        self._seen = heads.all() if heads is not None else {}
        self.quiet = QuietRuns(self._store, self._notes, self._needs, self._seen, self._grace_s)
        probes = [p for p in self._store.backend.list(PROBES) if is_probe(p.key)]
        self.hidden, self.freed, self._is_dry = set(), set(), dry_run
        # A full store cannot give its time: then it is that of its newest object.
        store, newest_s = self._store, objects.newest_s
        self._now_s = cache(lambda: time.time() if dry_run else ask_time(store) or newest_s)
        now_s = self._now_s() if self._grace_s or probes else 0.0
        # Without a grace nothing is recent.
        cutoff_s = now_s - self._grace_s if self._grace_s else float("inf")
        runs, stale = Shelf[bytes](), list[ObjectInfo]()
        for name, infos in self._list_active(objects.rows):
            try:
                files = run_files(self._store, name, infos, accepts=name in self.accepted)
            except UNREADABLE as error:
                self._pass_over(name, error)
            else:
                runs[name] = files.packed()
                stale += [*files.beyond, *stale_snapshots(files.snapshots)]
        listed = {*runs, *self.passed, *self.quiet.runs}
        # A run that was seen before and is gone: nobody knows what it needed.
        self.passed |= self._forget & (self._seen.keys() | self._notes.by_run.keys()) - listed
        for name in sorted(
            self._notes.by_run.keys() - listed - self.passed - self.forgotten.keys()
        ):
            self._pass_over(name, self._notes.by_run[name].lost("no such run"))
        if heads is not None:
            heads.check_runs(listed | self.passed, self._seen)
        self._read_runs(runs, cutoff_s, objects.rows)
        self._check_forget()
        to_condemn, recent = _choose(objects.rows, cutoff_s)
        old_s = now_s - max(self._grace_s, LEFTOVER_S)
        return Plan(
            to_condemn,
            recent,
            objects.tally,
            len(listed),
            (*stale, *(one for one in probes if one.modified_s <= old_s)),
        )

    def _needs_beside(self, objects: Listing) -> Needs:
        """Return a `Needs` that knows which noted placements the listing lacks."""
        # Each shard looks only for its own part of the placements.
        rows, unlisted = SortedRows(shard=self._shard), set[ObjectKey]()
        for note in self._notes.by_run.values():
            rows.add(object_rows(note.placements(), _NOTED))
        for part in objects.rows.beside(rows):
            heads, told = grouped(part)
            unlisted.update(keys_of(heads[told == _NOTED]))
        return Needs(self._workers, unlisted)

    def _list_active(self, objects: SortedRows) -> Iterator[tuple[str, Iterable[ObjectInfo]]]:
        """Find the quiet runs, note what they need, and yield the files of all others."""
        if not self.seals:
            return list_by_run(self._store)
        given_up = self._forget | self.forgotten.keys()
        names = self.quiet.find(
            given_up,
            lambda needed: objects.add(object_rows(needed, _NEEDED)),
            all_active=self.full or self.keeps,
        )
        active = names - self.quiet.runs
        if len(active) <= len(self.quiet.runs):
            return list_by_run(self._store, active)
        return ((name, infos) for name, infos in list_by_run(self._store) if name in active)

    def refuse_links(self) -> None:
        """Raise if there is a link: a run may be behind it, and nothing there may be deleted."""
        for folder in (*FOLDERS, PROBES):
            refuse_links(self._store.backend, folder)

    def _check_generations(self, highest: ObjectKey | None) -> None:
        """Refuse objects whose generation is above the newest epoch: epochs were lost."""
        newest = self._epochs.observe()
        header = self._epochs.header(newest)
        self.forgotten = dict(header.forgotten or {})
        self._delay_s = header.drop_s
        self.keeps = header.keep is True
        self.seals = self._epochs.seals(newest)
        self._epoch = newest
        if highest is not None and highest.generation > newest:
            raise Malformed(
                "an object was put under an epoch that is not there",
                where=highest,
                expected=f"a generation of at most {newest}",
                hint=f"Restore {epoch_key(newest + 1)} and all later epochs from a backup, or "
                "move the object away if Holdfast did not write it.",
            )

    def _read_runs(self, runs: Shelf[bytes], cutoff_s: float, objects: SortedRows) -> None:
        """Note the objects that runs need now, and those that they needed within the grace."""

        def read(name: str) -> tuple[set[bytes], set[bytes]] | None:
            files = RunFiles.unpacked(name, runs.get(name) or b"")
            try:
                return self._read_run(files, cutoff_s)
            except UNREADABLE as error:
                self._pass_over(name, error)
                return None

        found = in_batches(self._store.pools.bulk, read, list(runs), at_once=RUNS_AT_ONCE)
        for now, recently in filter(None, found):
            objects.add(object_rows(now, _NEEDED))
            objects.add(object_rows(recently, _RECENT))

    def log(self, run_id: str) -> RunLog | None:
        """Return the log of a run as it was replayed; `None` if it was not."""
        aside = self.logs.get(run_id)
        return None if aside is None else taken_up(self._store, run_id, aside)

    def _read_run(self, files: RunFiles, cutoff_s: float) -> tuple[set[bytes], set[bytes]]:
        """Replay a log: from its note or slot 0 up to the grace, then the slots within it.

        Return the objects that it needs now, and those that it needed within the grace.
        """
        log = RunLog(self._store, files.run_id, snapshot_slot=files.newest)
        log.seen.head = self._seen.get(files.run_id)
        # Slots are put in order: a slot before an old one is old, whatever its time says.
        ages = enumerate(files.slots_s, start=1)
        settled = max((number for number, put_s in ages if put_s <= cutoff_s), default=0)
        recent = list(log.fetch(range(settled, len(files.slots_s))))
        note = self._notes.by_run.get(files.run_id)
        start = None if note is None else self._start(log, note, len(files.slots_s), recent)
        if start is None and recent:
            log.recall()  # an undo among them names what was evicted before
        at_note = (
            log.read_to(note.settled) if self.full and note and note.settled <= settled else None
        )
        at_grace = log.read_to(settled)
        places = fold_recent(log, recent)
        # What the note knows of the commits that were seen was compared with the log.
        is_skipped = start is not None and start.commits != log.seen.commits
        log.check_head(log.fetch(log.seen.skipped(note.settled - 1)) if note and is_skipped else ())
        log.compact()
        needed, recently = self.needed_by(log), self._needs.of_evicted(places)
        self._asked_at[log.run_id] = log.run.next_slot
        if log.run.is_hidden and self._free_if_due(log, files):
            recently |= needed if self._grace_s else set()  # it was needed until now
            needed = set() if self._is_dry else self.needed_by(log)
        if note is not None and at_note is not None and self._differs(note, at_note.compact()):
            self.differing.add(files.run_id)
        if log.newest_commit is not None:
            done = Replayed(log, log.run.next_slot, log.newest_commit, at_grace.compact())
            self._queue_note(done, note, start, is_old=self._may_be_sealed(log, recent))
        self.logs[log.run_id] = set_aside(log)
        return needed, recently

    def _queue_note(
        self, done: Replayed, note: RunNote | None, start: RunManifest | None, *, is_old: bool
    ) -> None:
        """Let `make_notes` note a run, unless its note or its seal still stands."""
        run_id = done.log.run_id
        differs = run_id in self.differing
        is_sealed = not differs and is_old and self.quiet.is_sealed(done.log, note)
        if not is_sealed and (differs or is_old or done.is_due(note, start)):
            seen, held = done.note(self._needs.known(done.settled.places))
            self._made[run_id], self._due[run_id] = seen.encode() + b"\n" + held, is_old

    def _may_be_sealed(self, log: RunLog, recent: Sequence[Slot]) -> bool:
        """Return whether a run may be sealed."""
        stays = self.keeps or log.run.is_hidden or log.run_id in self.forgotten
        return self.seals and not stays and has_only_seals(recent)

    def _free_if_due(self, log: RunLog, files: RunFiles) -> bool:
        """Free a hidden run if its delay has passed; return whether it is freed, or would be."""
        hidden_at = log.run.hidden_at or 0
        put_s = min(files.slots_s[hidden_at:], default=float("inf"))
        if self.keeps or put_s > self._now_s() - self._delay_s:
            self.hidden.add(log.run_id)
            return False
        self.freed.add(log.run_id)
        if self._is_dry:
            return True

        def compose(run: RunManifest) -> list[Line] | None:
            # An undrop that was faster wins; what hid the run after it is a drop of its own.
            return [Free()] if run.is_hidden and run.hidden_at == hidden_at else None

        with suppress(StoreFull):
            self._store.with_reserve(lambda: log.append(compose))
        if not log.run.holds_nothing:
            self.freed.discard(log.run_id)
        return log.run.holds_nothing

    def _start(
        self, log: RunLog, note: RunNote, slots: int, recent: Sequence[Slot]
    ) -> RunManifest | None:
        """Check a log against the note of the run, and start from it; `None` if that cannot be."""
        seen, commit = note.seen, note.check_log(log, slots)
        undone = (a for slot in recent for _, one in slot.commits for a in one.actions)
        # A longer grace than before needs earlier slots; an undo, the records of the evicted.
        is_young = note.settled > slots - len(recent)
        is_undone = any(isinstance(one, Recover) for one in undone)
        if self.full or is_young or is_undone or not note.settled:
            return None
        try:
            run, packs, author = note.replay()
        except (IntegrityError, ValueError) as error:
            _LOGGER.warning("a note of a collection is not used: %s", error)
            return None
        last = [] if seen.slot == note.settled - 1 else list(log.fetch([note.settled - 1]))
        log.start_from(run, [one for one in (commit, *last) if one.number < note.settled], author)
        for place in run.places:
            if place.placement_key in packs:
                self._needs.learn(place, packs[place.placement_key])
        return run

    def _differs(self, note: RunNote, run: RunManifest) -> bool:
        """Return whether a note says something else than the log and the placements."""
        if not note.settled:
            return False
        try:
            noted, packs, _ = note.replay()
        except (IntegrityError, ValueError):
            return True
        read = self._needs.known(run.places)
        same = all(set(packs[key]) == set(read[key]) for key in packs.keys() & read.keys())
        # Tables of a run that was complete for a while may have another order.
        return _told(noted) != _told(run) or not same

    def make_notes(self) -> None:
        """Put notes of the runs that have changed, for the next collection, and seal quiet ones."""
        sealed: dict[str, int] = {}

        def note(run_id: str) -> tuple[Seen, bytes]:
            first, _, held = (self._made.get(run_id) or b"").partition(b"\n")
            seen, log = Seen.parse(first, where=run_id), self.log(run_id)
            assert log is not None  # it was replayed
            if self._due[run_id] and held:
                with suppress(Conflict, StoreFull):
                    slot = seal(log, Held.parse(held, where=run_id).run, self._epoch)
                    if slot is not None:
                        sealed[run_id] = slot
                        seen = of_seal(seen, log.run.next_slot, slot, self._grace_s)
            # A note of slots that a loss of power undoes would stop every later collection.
            log.make_durable()
            return seen, held

        try:
            if any(self._due.values()):
                self._epochs.make_durable(self._epoch)
            made = in_batches(self._store.pools.bulk, note, self._due, at_once=RUNS_AT_ONCE)
            self._notes.put(self._store, made, full=self.full)
            self.quiet.remove_markers(sealed)
        except StorageError as error:
            _LOGGER.warning("notes for the next collection are not kept: %s", error)

    def needed_by(self, log: RunLog, but: Collection[Place] = ()) -> set[bytes]:
        """Return the objects that a run needs at the slot read last.

        If a placement is gone, it reads on. What only the places in `but` need is left out.
        """
        while True:
            try:
                return self._needs.of(log.run, but) | self._kept_by(log)
            except MissingObject:
                # Evicted since, and deleted by another collector? Then the log has grown.
                read = log.run.next_slot
                if log.refresh().next_slot == read:
                    raise

    def places_at_choice(self, log: RunLog) -> frozenset[Place]:
        """Return the places that a log held at the choice; none if it was read further since."""
        if self._asked_at.get(log.run_id) != log.run.next_slot:
            return frozenset()  # it was read since
        return frozenset(held_place(log.run, manifest) for manifest in log.run.held)

    def _kept_by(self, log: RunLog) -> set[bytes]:
        """Return the objects that a registry which keeps holds on to, as long as they are there."""
        if not self.keeps:
            return set()
        kept = KeptPlaces(self._kept.get(log.run_id) or b"")
        kept.read(log)
        self._kept[log.run_id] = kept.packed()
        return self._needs.of_evicted(kept.places)

    def check_rules(self, epoch: int) -> None:
        """Refuse to go on if the registry was told meanwhile to keep what this collection frees."""
        if self._epochs.header(epoch).keep and not self.keeps:
            raise Conflict(
                "the registry was told to keep everything meanwhile", where=epoch_key(epoch)
            )

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
            log = self.log(name)
            if log is None:
                raise NotFound("no such run", where=name, hint="`holdfast run ls` lists the runs.")
            if log.run.dropped is None or log.run.is_hidden:
                raise InvalidInput(
                    "only a run that cannot be read is forgotten",
                    where=name,
                    found="it can be read",
                    hint=f"To release what it holds, run `holdfast run rm {name} --now`.",
                )


def _choose(objects: SortedRows, cutoff_s: float) -> tuple[Objects, Tally]:
    """Return the unneeded objects that are not recent, and count those that are."""
    chosen, recent = Objects(), Tally()
    for part in objects:
        heads, told = grouped(part)
        unneeded = told & (LISTED | _NEEDED) == LISTED
        is_recent = (heads["put_s"] > cutoff_s) | (told & _RECENT > 0)
        chosen.add(heads[unneeded & ~is_recent])
        young = heads["size"][unneeded & is_recent]
        recent += Tally(len(young), int(young.sum()))
    return chosen, recent


def _told(run: RunManifest) -> tuple[object, ...]:
    """Return the facts that decide over the objects of a run, now and after further slots."""
    return run.commits, run.head, run.epoch, run.dropped, set(run.places), run.uses
