"""A run's log: slots made by put-if-absent, dense from 0, never rewritten.

Owns opening a run in three round trips, reading to the head, putting the next slot, and reading the
records of evicted checkpoints. `holdfast.registry.history.slots` lists, fetches and puts the files;
`holdfast.registry.history.tail` checks that the log is still the one that was read;
`holdfast.registry.history.snapshots` shortens the reading. `holdfast.registry.history.replay`
defines the meaning of slots; `holdfast.registry.writing.object_writer` which objects a commit may
name.
"""

from __future__ import annotations

import getpass
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import RLock

from holdfast.backends import refuse_links
from holdfast.registry.errors import Conflict, IntegrityError, Malformed, RolledBack, StorageError
from holdfast.registry.history.actions import Action, Commit, Line, Place
from holdfast.registry.history.replay import Forgotten, RunManifest, Slot, advance, has_bit
from holdfast.registry.history.slots import AHEAD, Slots, pause
from holdfast.registry.history.snapshots import Snapshots
from holdfast.registry.history.tail import Look, SeenHead, Tail, check_newest
from holdfast.registry.storage.keys import RUNS, epoch_key, is_run_id, slot_key, snapshot_key
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.process import host_name

#: A snapshot is written when the log has grown by this many slots.
SNAPSHOT_EVERY = 64
#: Races that an append may lose before it gives up.
MAX_LOST_RACES = 20
_PROOFS_AT_ONCE = 64

#: Gives the lines of the next slot for the run as it is; `None` means nothing to do.
Compose = Callable[[RunManifest], Sequence[Line | bytes] | None]


class RunLog:
    """The log of one run and its replay.

    Args:
        store: The registry's objects.
        run_id: The run.
        snapshot_slot: Slot of the newest snapshot, where the caller has listed them.

    Attributes:
        run_id: The run.
        run: The replay of everything read so far. It is compact, but for moments in which a rule
            needs what was evicted.
        seen: The head of the log on this machine.
    """

    def __init__(self, store: Store, run_id: str, *, snapshot_slot: int = -1) -> None:
        self._store = store
        self._pid, self._made_lock = os.getpid(), RLock()
        self._slots = Slots(store, run_id)
        self._snapshots = Snapshots(store, run_id, snapshot_slot)
        self._complete = RunManifest.empty(run_id)
        self.seen = SeenHead(store, run_id)
        self._may_write = False
        self._tail = Tail()
        # How many slots would survive a loss of power.
        self._durable = 0
        self.run_id = run_id
        self.run = self._complete.compact()

    @property
    def _lock(self) -> RLock:
        if self._pid != os.getpid():
            # A fork copies the lock as it was, and nobody would ever release it here.
            self._pid, self._made_lock = os.getpid(), RLock()
        return self._made_lock

    def open(self, *, check_head: bool = True) -> RunManifest:
        """Read the run in at most three round trips.

        They are: the list of snapshots; the newest one, and the names of the slots after it; those
        slots. One that proves the head that was seen before is read with them.

        Args:
            check_head: Refuse a log that does not continue from the head that was seen before.

        Raises:
            IntegrityError: A slot is damaged, missing or not legal.
            RolledBack: The log is shorter than it was seen before, or another one.
        """
        with self._lock:
            self._complete, self._durable = RunManifest.empty(self.run_id), 0
            for slot in self._snapshots.listed():
                if self._open_from(slot, check_head=check_head):
                    self._snapshots.newest = slot
                    return self.run
            self._tail = Tail()
            self.run = RunManifest.empty(self.run_id).compact()
            self.run = self.read_to(self.length()).compact()
            if check_head:
                self.check_head()
            return self.run

    def check_head(self, proofs: Iterable[Slot] = ()) -> None:
        """Check the log against the head that was seen before, and remember its new head.

        Args:
            proofs: Slots before those that were read, in which the head that was seen is looked
                for first.

        Raises:
            RolledBack: It is shorter than it was, or another one.
        """
        self.seen.check(self.run, self._tail, proofs)

    def _proofs(self, snapshot: int) -> Iterator[Slot]:
        """Yield the slots that prove the head that was seen and that a snapshot skips.

        The first of them are asked for at once. More than one is needed only of a head that was
        seen by a snapshot behind which nothing was committed.
        """
        numbers = self.seen.skipped(snapshot)
        small = self._store.pools.small
        asked = [small.submit(self._slots.get, number) for number in numbers[:_PROOFS_AT_ONCE]]

        def proofs() -> Iterator[Slot]:
            yield from (slot for slot in (one.result() for one in asked) if slot is not None)
            for start in range(_PROOFS_AT_ONCE, len(numbers), _PROOFS_AT_ONCE):
                yield from self.fetch(numbers[start : start + _PROOFS_AT_ONCE])

        return proofs()

    def refresh(self) -> RunManifest:
        """Read to the head; one request when nothing is new.

        Raises:
            RolledBack: What is new does not follow what this handle has read.
            IntegrityError: A slot is damaged, missing or not legal.
        """
        with self._lock:
            following = self._slots.get(self.run.next_slot)
            if following is not None:
                look = self.look()
                rest = list(self.slots(self.run.next_slot + 1))
                look.outcome.result()
                slots = [following, *rest]
                self._go_on(lambda: slots)
                self.seen.note(self.run, self._tail)
            self.run = self.run.compact()
            return self.run

    def fold(self, slots: Sequence[Slot]) -> RunManifest:
        """Go on by slots that the caller has read; no snapshot has a say.

        A complete state stays complete.

        Raises:
            Malformed: They do not continue the log legally.
        """
        with self._lock:
            return self._go_on(lambda: slots)

    def read_to(self, stop: int) -> RunManifest:
        """Replay the slots before `stop`, which were listed; only a few are in memory at a time.

        Raises:
            Malformed: They do not continue the log legally, or one of them is absent.
        """
        with self._lock:
            numbers = range(self.run.next_slot, stop)
            if len(numbers) <= AHEAD:
                slots = list(self.fetch(numbers))
                return self._go_on(lambda: slots)
            return self._go_on(lambda: self.fetch(numbers))

    def history(self) -> RunManifest:
        """Return the complete replay of what `state` has read, evicted checkpoints included.

        The log is read from its first slot for it; later calls read on from where the last one was.

        Raises:
            RolledBack: The log does not lead to what was read.
            IntegrityError: A slot is damaged, missing or not legal.
        """
        with self._lock:
            if self.run.gone is None:
                return self.run
            done, end = self._complete.next_slot, self.run.next_slot
            try:
                complete = advance(self._complete, self.fetch(range(done, end)))
            except IntegrityError:
                self.look().outcome.result()  # in a log that was replaced anything may be missing
                raise
            if complete.head != self.run.head:
                raise RolledBack(
                    "the log is not the one that this handle has read",
                    where=self.run_id,
                    expected=f"{self.run.commits} commits, the last one {self.run.head}",
                    found=f"{complete.commits}, the last one {complete.head}",
                    hint="Run `holdfast verify`: a snapshot says something else than the log, or "
                    "the log was replaced.",
                )
            self._complete = complete
            return complete

    def knowing(self, n: int) -> RunManifest:
        """Return a replay that has the record of a checkpoint, also of an evicted one."""
        run = self.run
        return run if n in run.by_n or not run.is_evicted(n) else self.history()

    def knowing_entry(self, version: int) -> RunManifest:
        """Return a replay that has the record of an entry of the pool, also of an evicted one."""
        run = self.run
        is_gone = run.gone is not None and has_bit(run.gone.versions, version)
        return self.history() if is_gone else run

    def place_of(self, manifest: Digest) -> Place | None:
        """Return the place of a manifest, also of an evicted one; `None` without one."""
        found = self.run.by_manifest.get(manifest)
        return found or self.history().by_manifest.get(manifest)

    def recall(self) -> None:
        """Make `state` complete, until the run is refreshed or a slot is put."""
        with self._lock:
            self.run = self.history()

    def forget(self) -> None:
        """Make `state` compact again, and forget the records of evicted checkpoints."""
        with self._lock:
            self.run = self.run.compact()
            self._complete = RunManifest.empty(self.run_id)

    def _after(self, slot: Slot) -> tuple[RunManifest, bool]:
        """Return the compact state after a slot, and whether that needed the complete one.

        A later reader with an older snapshot reads the whole log for such a slot.
        """
        try:
            return advance(self.run.compact(), [slot]), False
        except Forgotten:
            return advance(self.history(), [slot]).compact(), True

    def _go_on(self, read: Callable[[], Iterable[Slot]]) -> RunManifest:
        """Fold further slots in; from the complete state if a rule needs evicted records.

        Args:
            read: Gives the slots; called again for the complete state.
        """
        tail = replace(self._tail)
        try:
            self.run = advance(self.run, self._passing(tail, read()))
        except Forgotten:
            self.run = advance(self.history(), self._passing(tail, read()))
        self._tail = tail
        return self.run

    def _passing(self, tail: Tail, slots: Iterable[Slot]) -> Iterator[Slot]:
        """Yield slots, and note them in the tail."""
        for slot in slots:
            tail.take(slot, self.seen.commits)
            yield slot

    def look(self) -> Look:
        """Begin to check that the newest slot that was read is still there unchanged.

        `append` waits for the result, so a caller that sends packs first loses no time.
        """
        with self._lock:
            number, digest = self.run.next_slot, self._tail.newest
        outcome = self._store.pools.small.submit(
            check_newest, self._store, self.run_id, number - 1, digest
        )
        return Look(number, outcome)

    def make_durable(self) -> None:
        """Make every slot durable that was read.

        Their writers may have died before. Acknowledgements, later slots and deletions that depend
        on these slots must not survive them.
        """
        with self._lock:
            if self._durable < self.run.next_slot:
                seen = [slot_key(self.run_id, self.run.next_slot - 1)]
                if self.run.epoch:
                    seen.append(epoch_key(self.run.epoch))
                self._store.backend.make_durable(seen)
                self._durable = self.run.next_slot

    def append(
        self,
        compose: Compose,
        *,
        races: int = MAX_LOST_RACES,
        caches: bool = True,
        look: Look | None = None,
    ) -> RunManifest:
        """Put the next slot; after a lost race read to the head, compose again and try again.

        Args:
            compose: Gives the lines for a run, or raises if the run does not allow them; called
                again after each lost race with the run that the winner left.
            races: How many may be lost in a row.
            caches: Whether a snapshot may be written as well.
            look: One that was begun earlier; it counts if nothing was read since.

        Returns:
            The run at the slot that was put, or at the head if there was nothing to do. Either is
            durable.

        Raises:
            Conflict: All of them were lost.
            RolledBack: The log is not the one that this handle has read; nothing was committed.
            StoreUnavailable: The store did not say whether the slot was put.
            StoreUnsuitable: There is a symbolic link in the place of a file of the run.
        """
        with self._lock:
            self.prepare_writing()
            if look is None or look.next_slot != self.run.next_slot:
                look = self.look()
            look.outcome.result()
            for lost in range(races):
                lines = self._composed(compose)
                self.make_durable()
                if lines is None or self._has_put(lines, caches=caches):
                    return self.run
                self._read_winner(lost)
            raise Conflict(
                f"lost {races} races for the next slot",
                where=self.run_id,
                found=f"the last one went to {_author(self._slots.get(self.run.next_slot - 1))}",
                hint="Nothing was committed; try again, or write to this run from fewer processes.",
            )

    def _composed(self, compose: Compose) -> Sequence[Line | bytes] | None:
        try:
            return compose(self.run)
        except Forgotten:
            self.recall()
            return compose(self.run)

    def _has_put(self, lines: Sequence[Line | bytes], *, caches: bool) -> bool:
        """Put the next slot, unless another writer has; return whether it is ours."""
        slot = Slot.build(self.run.next_slot, lines)
        grown, needs_history = self._after(slot)
        if not self._slots.put(slot):
            return False
        self.run = grown
        self._tail.take(slot, 0)
        self._durable = grown.next_slot
        self.seen.note(self.run, self._tail)
        if caches:
            self._write_snapshot(slot, at_once=needs_history)
        return True

    def _read_winner(self, lost: int) -> None:
        """Read to the head after a lost race; `lost` says how many were lost before it."""
        before = self.run.next_slot
        if lost > 1:
            # Before reading on: what is composed now is put at once, or it is late again.
            pause(0.01, lost)
        self.refresh()
        if self.run.next_slot == before:
            raise Malformed(
                "the store says that a slot exists, and does not give it",
                where=slot_key(self.run_id, before),
            )

    def prepare_writing(self) -> None:
        """Prepare the first write, once: refuse links, in the run's own folder too.

        Raises:
            StoreUnsuitable: There is one; nothing was written.
        """
        if not self._may_write:
            self._store.prepare_writing()
            refuse_links(self._store.backend, f"{RUNS}{self.run_id}/")
            self._may_write = True

    def length(self) -> int:
        """Return how many slots the log has: one listing."""
        return len(self._slots.numbers())

    def slots(self, start: int = 0) -> Iterator[Slot]:
        """Yield every slot from `start` to the head, fetched in parallel, up to a damaged one."""
        yield from self._slots.fetch(self._slots.numbers(start))

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield slots that were listed, fetched in parallel, up to a damaged one.

        Raises:
            Malformed: One of them is absent.
        """
        yield from self._slots.fetch(numbers)

    def _open_from(self, slot: int, *, check_head: bool) -> bool:
        """Open the run from a snapshot; return whether the result can be trusted."""
        proofs = self._proofs(slot) if check_head else iter(())
        reading = self._store.pools.small.submit(self._snapshots.read, slot)
        slots = list(self.slots(slot))
        found = reading.result()
        opened = self._snapshots.parse(found, slots[0]) if found and slots else None
        if opened is None:
            return False
        self._tail = Tail()
        self._tail.take(slots[0], self.seen.commits)
        self.run = opened.compact()
        self.run = self._go_on(lambda: slots[1:]).compact()
        if check_head:
            self.check_head(proofs)
        return True

    def _write_snapshot(self, slot: Slot, *, at_once: bool) -> None:
        if not at_once and not self._snapshots.is_due(self.run, SNAPSHOT_EVERY):
            return
        data = self._snapshots.encode(self.run, slot)
        # A cache: the commit is made whether or not this succeeds.
        with suppress(StorageError):
            self._store.backend.put(snapshot_key(self.run_id, slot.number), data)
        self._snapshots.newest = slot.number


def commit_line(run: RunManifest, actions: Sequence[Action]) -> Commit:
    """Return the commit that continues a history with these actions."""
    return Commit(
        n=run.commits,
        run=run.run_id,
        prev=run.head,
        write=secrets.token_hex(8),
        author=author(),
        time_ms=int(time.time() * 1000),
        actions=tuple(actions),
    )


def list_runs(store: Store) -> list[str]:
    """Return the ids of all runs, sorted."""
    listed = store.backend.list(RUNS, delimiter=True)
    names = (info.key.removeprefix(RUNS) for info in listed if info.key.endswith("/"))
    return sorted(name[:-1] for name in names if is_run_id(name[:-1]))


def author() -> str:
    """Return `user@host`, as commits show it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no entry anywhere
        user = "unknown"
    return f"{user.encode(errors='replace').decode()}@{host_name()}"


def _author(slot: Slot | None) -> str:
    commits = slot.commits if slot else ()
    return commits[-1][1].author if commits else "a collector or a repack"
