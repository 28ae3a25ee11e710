"""A run's log: slots made by put-if-absent, dense from 0, never rewritten.

Owns opening a run in two round trips, reading to the head, putting the next slot, and reading the
records of evicted checkpoints. `holdfast.registry.history.slots` lists, fetches and puts the files,
and checks that the log is still the one that was read;
`holdfast.registry.history.snapshots` makes opening shorter. `holdfast.registry.history.replay`
defines the meaning of slots, `holdfast.registry.writing.object_writer` which objects a commit may
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy as copied

from holdfast.backends import Backend, refuse_links
from holdfast.registry.errors import Conflict, IntegrityError, Malformed, RolledBack, StorageError
from holdfast.registry.history.actions import Commit, Line, Place
from holdfast.registry.history.replay import (
    NeedsHistory,
    PartedRun,
    RecentRun,
    RunManifest,
    Slot,
    advance,
    has_bit,
)
from holdfast.registry.history.slots import (
    AHEAD,
    PATIENCE_S,
    CommitSlot,
    LogEnd,
    Look,
    Races,
    SeenHead,
    Slots,
    Tail,
    check_newest,
)
from holdfast.registry.history.snapshots import Snapshots
from holdfast.registry.objects import (
    RUNS,
    epoch_key,
    log_prefix,
    marker_key,
    parse_number,
    slot_key,
    snapshot_key,
    snapshot_prefix,
)
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, ProcessLock

#: The least number of slots between snapshots.
SNAPSHOT_EVERY = 8

#: Returns the lines of the next slot for a run; `None` if there is nothing to write.
Compose = Callable[[RunManifest], Sequence[Line | bytes] | None]


class RunLog:
    """The log of one run and its replay."""

    def __init__(self, store: Store, run_id: str, *, snapshot_slot: int = -1) -> None:
        self._store = store
        self._lock = ProcessLock()
        self._slots = Slots(store, run_id)
        self.snapshots = Snapshots(store, run_id, snapshot_slot)  # they shorten its opening
        self._complete = RunManifest.empty(run_id)
        self.seen = SeenHead(store, run_id)  # the head of the log that this machine has seen
        self.may_write = False  # whether symbolic links were looked for
        self._announced = -2  # the newest seal behind which this handle has put its marker
        self.tail = Tail()  # the newest slots that were read
        self.durable = 0  # the number of slots that would survive a power loss
        #: Whether `run` comes from a copy, and the registry has not answered since.
        self.is_copy = False
        self.run_id = run_id  # the run
        #: The replay of everything that was read. It is compact, except while a rule needs evicted
        #: records.
        self.run = self._complete.compact()

    def open(self, *, check_head: bool = True) -> RunManifest:
        """Read the run in two round trips; in three if its log has many slots that were not seen.

        First the lists of snapshots and of slots; then the newest snapshot, the slots after it, and
        the slot that proves the seen head.
        """
        with self._lock.here():
            self._complete, self.durable = RunManifest.empty(self.run_id), 0
            self.is_copy = False
            listing = self._store.pools.small.submit(self.snapshots.listed)
            end = self._slots.end(self.seen.slots)
            for slot in listing.result():
                if self._open_from(slot, end, check_head=check_head):
                    self.snapshots.newest = slot
                    return self.run
            self.tail = Tail()
            self.run = RunManifest.empty(self.run_id).compact()
            self.run = self.read_to(self.length() if end is None else end).compact()
            if check_head:
                self.check_head()
            return self.run

    def check_head(self, proofs: Iterable[Slot] = ()) -> None:
        """Check the log against the seen head, and remember its new head."""
        self.seen.check(self.run, self.tail, proofs)

    def refresh(self) -> RunManifest:
        """Read to the head; one request when nothing is new."""
        with self._lock.here():
            following = self._slots.get(self.run.next_slot)
            if self.is_copy:
                self.check_unchanged()  # the registry may be another one by now
                self.is_copy = self._store.is_away = False
            if following is not None:
                look = self.look()
                rest = list(self.slots(self.run.next_slot + 1))
                look.check.result()
                slots = [following, *rest]
                self._fold(lambda: slots)
                self.seen.note(self.run, self.tail)
            self.run = self.run.compact()
            return self.run

    def hear(self, slot: Slot) -> None:
        """Read to the head; the slot is the newest one that another process has read or put."""
        with self._lock.here():
            if self.run.next_slot == slot.number:
                self._fold(lambda: [slot])
                self.seen.note(self.run, self.tail)
                self.run = self.run.compact()
            elif self.run.next_slot < slot.number:
                self.refresh()

    def check_unchanged(self) -> None:
        """Raise unless the newest slot that was read is still there."""
        self.look().check.result()

    def keep_copy(self, backend: Backend) -> None:
        """Keep the newest slot and a snapshot after it on another backend, for `open_copy`."""
        with self._lock.here():
            slot = self.tail.slot
            assert slot is not None  # the caller has put or read one
            # The slot last: until it is there the copy before counts.
            snapshot, key = (make(self.run_id, slot.number) for make in (snapshot_key, slot_key))
            backend.put(snapshot, self.snapshots.encode(self.run.compact().whole(), slot))
            backend.put(key, slot.data)
            older = [*backend.list(snapshot_prefix(self.run_id), start_after=snapshot)]
            older += [one for one in backend.list(log_prefix(self.run_id)) if one.key < key]
            for one in older:
                backend.delete(one.key)

    def open_copy(self, backend: Backend, *, is_durable: bool = True) -> bool:
        """Open the run from a copy without asking the registry; return whether there is one.

        `is_durable` says whether its slots are durable: otherwise the next commit sees to it.
        """
        store = Store(backend, self._store.config)
        store.pools = self._store.pools
        copy = RunLog(store, self.run_id)
        with suppress(IntegrityError, StorageError):
            copy.open(check_head=False)
        with self._lock.here():
            self.run, self.tail = copy.run, copy.tail
            self.durable = copy.run.next_slot if is_durable else 0
            self.is_copy = copy.run.commits > 0
            return self.is_copy

    def fold(self, slots: Sequence[Slot]) -> RunManifest:
        """Fold in slots that the caller has read; no snapshot is used.

        A complete run stays complete.
        """
        with self._lock.here():
            return self._fold(lambda: slots)

    def read_to(self, stop: int) -> RunManifest:
        """Replay the listed slots before `stop`; only a few are in memory at a time."""
        with self._lock.here():
            numbers = range(self.run.next_slot, stop)
            if len(numbers) <= AHEAD:
                slots = list(self.fetch(numbers))
                return self._fold(lambda: slots)
            return self._fold(lambda: self.fetch(numbers))

    def start_from(self, run: RunManifest, slots: Iterable[Slot], author: str | None) -> None:
        """Start from a replay that the caller has made before, instead of the first slot.

        `slots` are the newest one with a commit, and the last one of that replay.
        """
        with self._lock.here():
            self.tail = Tail()
            self.tail.author = author
            for slot in slots:
                self.tail.take(slot, self.seen.commits)
            self.run = run

    def end(self, notes: int | None) -> LogEnd | None:
        """Return how the log ended when it was read; `notes` is the table listed before."""
        newest = self.tail.slot
        return newest and LogEnd.unchecked(
            run=self.run_id,
            slots=newest.number + 1,
            size_bytes=len(newest.data),
            sealed=self.run.sealed_at,
            notes=notes,
        )

    @property
    def newest_commit(self) -> CommitSlot | None:
        """The newest slot with a commit among those that were read."""
        number, digest = self.tail.committed, self.tail.committed_digest
        return None if number is None or digest is None else CommitSlot(number, digest)

    def history(self) -> RunManifest:
        """Return the complete run at the slot of `run`, evicted checkpoints included.

        The first call reads the log from its first slot; a later one reads only further slots.
        """
        with self._lock.here():
            if self.run.gone is None:
                return self.run
            self._complete = self._replayed(self.run, self._complete)
            return self._complete

    def _replayed(self, run: RunManifest, complete: RunManifest) -> RunManifest:
        """Return the complete form of a run from the log, by way of an earlier complete form."""
        try:
            complete = advance(complete, self.fetch(range(complete.next_slot, run.next_slot)))
        except IntegrityError:
            self.check_unchanged()  # if the log was replaced, that is the error
            raise
        if complete.head != run.head:
            raise RolledBack(
                "the log is not the one that this handle has read",
                where=self.run_id,
                expected=f"{run.commits} commits, the last one {run.head}",
                found=f"{complete.commits}, the last one {complete.head}",
                hint="Run `holdfast verify`: a snapshot does not match the log, or the log was "
                "replaced.",
            )
        return complete

    def _join(self, recent: RecentRun, slots: Sequence[Slot], after: RecentRun) -> RunManifest:
        """Return a run after slots, with the records in its parts; without them, replay the log."""
        whole = self.snapshots.join(recent)
        if whole is not None:
            with suppress(NeedsHistory):
                return advance(whole, slots)
        return self._replayed(after, RunManifest.empty(self.run_id)).compact()

    def knowing(self, n: int) -> RunManifest:
        """Return a run that has the record of a checkpoint, even of an evicted one."""
        run = self.run
        return run if n in run.by_n or not run.is_evicted(n) else self.history()

    def knowing_entry(self, version: int) -> RunManifest:
        """Return a run that has the record of an entry of the pool, even of an evicted one."""
        run = self.run
        is_evicted = run.gone is not None and has_bit(run.gone.versions, version)
        return self.history() if is_evicted else run

    def owner(self) -> str | None:
        """Return the owner of the run; without one, the user who put commit 0.

        That may take a request. `None` if the commit cannot be read.
        """
        if self.run.created is not None and self.run.created.owner is not None:
            return self.run.created.owner
        with self._lock.here():
            if self.tail.author is None and self.run.commits and not self.is_copy:
                with suppress(IntegrityError):
                    first = self._slots.get(0)
                    if first is not None and first.commits:
                        self.tail.author = first.commits[0][1].author
            author = self.tail.author
            return None if author is None else author.rpartition("@")[0] or author

    def place_of(self, manifest: Digest) -> Place | None:
        """Return the place of a manifest, even of an evicted one; `None` if it has none."""
        found = self.run.by_manifest.get(manifest)
        return found or self.history().by_manifest.get(manifest)

    def recall(self) -> None:
        """Make `run` complete, until the next refresh or the next slot that is put."""
        with self._lock.here():
            self.run = self.history()

    def compact(self) -> None:
        """Make `run` compact again, without the records of evicted checkpoints."""
        with self._lock.here():
            self.run = self.run.compact()
            self._complete = RunManifest.empty(self.run_id)

    def _after(self, slot: Slot) -> tuple[RunManifest, bool]:
        """Return the compact run after a slot, and whether that needed the complete run.

        A reader who has an older snapshot must read the whole log for such a slot.
        """
        try:
            return advance(self.run.compact(), [slot]), False
        except NeedsHistory:
            return advance(self.history(), [slot]).compact(), True

    def _fold(self, read: Callable[[], Iterable[Slot]]) -> RunManifest:
        """Fold in further slots; into the complete run if a rule needs evicted records."""
        if isinstance(self.run, PartedRun):
            with suppress(NeedsHistory, Malformed):  # the whole run decides
                tail = copied(self.tail)
                self.run, self.tail = self.run.advanced(self._noted(tail, read())), tail
                return self.run
        tail = copied(self.tail)
        try:
            self.run = advance(self.run, self._noted(tail, read()))
        except NeedsHistory:
            self.run = advance(self.history(), self._noted(tail, read()))
        self.tail = tail
        return self.run

    def _noted(self, tail: Tail, slots: Iterable[Slot]) -> Iterator[Slot]:
        """Yield slots, and note them in the tail; others may have put them."""
        self.snapshots.is_shared = True
        for slot in slots:
            tail.take(slot, self.seen.commits)
            yield slot

    def look(self) -> Look:
        """Start a check that the newest slot that was read is unchanged.

        `append` waits for the result, so a caller that sends packs meanwhile loses no time.
        """
        with self._lock.here():
            number, digest = self.run.next_slot, self.tail.newest
        outcome = self._store.pools.small.submit(
            check_newest, self._store, self.run_id, number - 1, digest
        )
        return Look(number, outcome)

    def announce(self, *, is_sealing: bool = False) -> int | None:
        """Put the marker behind the newest seal, once, so that no collection passes over the run.

        In a registry that seals, also a log without a seal gets one: it may have been put back by a
        mirror. Return the slot of the seal (W1').
        """
        sealed = self.run.sealed_at
        behind = -1 if sealed is None else sealed
        if (is_sealing or sealed is not None) and behind > self._announced:
            self.prepare_writing()
            marker = marker_key(self.run_id, behind + 1)
            if not self._store.backend.put_if_absent(marker, b""):
                self._store.backend.make_durable([marker])  # the one who put it may have died
            self._announced = behind
        return sealed

    def make_durable(self) -> None:
        """Make all slots that were read durable.

        A writer may have died before its slot was durable. No acknowledgement, later slot or
        deletion that depends on a slot may survive the loss of that slot.
        """
        with self._lock.here():
            if self.durable < self.run.next_slot:
                seen = [slot_key(self.run_id, self.run.next_slot - 1)]
                if self.run.epoch:
                    seen.append(epoch_key(self.run.epoch))
                self._store.backend.make_durable(seen)
                self.durable = self.run.next_slot

    def append(
        self,
        compose: Compose,
        *,
        patience_s: float = PATIENCE_S,
        caches: bool = True,
        look: Look | None = None,
        announces: bool = True,
    ) -> RunManifest:
        """Put the next slot; after a lost race read to the head, compose again and try again.

        Only marks and seals need not be announced by a marker.
        """
        with self._lock.here():
            self.prepare_writing()
            if look is None or look.next_slot != self.run.next_slot:
                look = self.look()
            look.check.result()
            races, has_time = Races(patience_s), True
            while has_time:
                if announces:
                    self.announce()
                lines = self._compose(compose)
                self.make_durable()
                if lines is None or self._has_put(lines, caches=caches):
                    return self.run
                # It waits before reading, not after: lines that are composed must be put at once.
                has_time = races.lose()
                self._read_winner()
            raise Conflict(
                f"lost {races.lost} races for the next slot in {patience_s:g} s",
                where=self.run_id,
                found=f"the last one went to {_author(self._slots.get(self.run.next_slot - 1))}",
                hint="Nothing was committed; try again, or write to this run from fewer processes.",
            )

    def _compose(self, compose: Compose) -> Sequence[Line | bytes] | None:
        try:
            return compose(self.run)
        except NeedsHistory:
            self.recall()
            return compose(self.run)

    def _has_put(self, lines: Sequence[Line | bytes], *, caches: bool) -> bool:
        """Put the next slot unless another writer was faster; return whether it is ours."""
        slot = Slot.build(self.run.next_slot, lines)
        grown, needs_history = self._after(slot)
        if not self._slots.put(slot):
            return False
        self.run = grown
        self.tail.take(slot, 0)
        self.durable = grown.next_slot
        self.seen.note(self.run, self.tail)
        # Lines that a sync copies are bytes: others have made those commits.
        if self._store.signer is not None and any(isinstance(line, Commit) for line in lines):
            self._store.signer.sign(self._store, *slot.commits[-1])
        if caches:
            self.snapshots.write(self.run, slot, SNAPSHOT_EVERY, at_once=needs_history)
        return True

    def _read_winner(self) -> None:
        """Read to the head after a lost race."""
        before = self.run.next_slot
        self.refresh()
        if self.run.next_slot == before:
            raise Malformed(
                "the store says that a slot exists, and does not give it",
                where=slot_key(self.run_id, before),
            )

    def prepare_writing(self) -> None:
        """Prepare the first write, once: refuse symbolic links, also in the run's own folder."""
        if not self.may_write:
            self._store.prepare_writing()
            if self._store.signer is not None:
                self._store.signer.prepare()
            refuse_links(self._store.backend, f"{RUNS}{self.run_id}/")
            self.may_write = True

    def length(self) -> int:
        """Return how many slots the log has: one listing."""
        return len(self._slots.numbers())

    def slots(self, start: int = 0) -> Iterator[Slot]:
        """Yield every slot from `start` to the head, fetched in parallel, up to a damaged one."""
        yield from self._slots.fetch(self._slots.numbers(start))

    def commits(self) -> Iterator[Commit]:
        """Yield every commit of the log as it is now, oldest first."""
        return (commit for slot in self.slots() for _, commit in slot.commits)

    def put_times(self) -> dict[int, float]:
        """Return when each slot was put, in seconds by the store's clock: one listing."""
        infos = self._store.backend.list(log_prefix(self.run_id))
        return {parse_number(info.key): info.modified_s for info in infos}

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield slots that were listed, fetched in parallel, up to a damaged one."""
        yield from self._slots.fetch(numbers)

    def _open_from(self, slot: int, end: int | None, *, check_head: bool) -> bool:
        """Open the run from a snapshot; return whether that was possible."""
        proofs = self._slots.prove(self.seen.skipped(slot)) if check_head else ()
        reading = self._store.pools.small.submit(self.snapshots.read, slot)
        slots = [*self.fetch(self._slots.numbers(slot) if end is None else range(slot, end))]
        found = reading.result()
        opened = self.snapshots.parse(found, slots[0]) if found and slots else None
        if opened is None:
            return False
        self.tail = Tail()
        self.tail.take(slots[0], self.seen.commits)
        if isinstance(opened, RecentRun):
            opened = PartedRun.of_snapshot(opened, self._join)
        self.run = opened.compact()
        self.run = self._fold(lambda: slots[1:]).compact()
        if check_head:
            self.check_head(proofs)
        return True


def _author(slot: Slot | None) -> str:
    commits = slot.commits if slot else ()
    return commits[-1][1].author if commits else "a collector or a repack"
