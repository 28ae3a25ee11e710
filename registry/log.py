"""A run's log: slots made by put-if-absent, dense from 0, never rewritten.

Owns opening a run in three round trips, reading to the head, appending with read-back and rebase,
and reading what evicted checkpoints were. What slots mean is the business of `registry.state`;
which objects a commit may name that of `registry.writer`.
"""

from __future__ import annotations

import getpass
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock

from registry.actions import Action, Commit, Line, Place
from registry.digest import Digest
from registry.environment import host_name
from registry.errors import (
    Conflict,
    Malformed,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
)
from registry.objects.keys import (
    RUNS,
    is_run_id,
    log_prefix,
    parse_number,
    slot_key,
    snapshot_key,
)
from registry.snapshots import Snapshots
from registry.state import Forgotten, RunManifest, Slot, advance, has_bit
from registry.store import Store, gaps

#: A snapshot is written when the log has grown by so many slots.
SNAPSHOT_EVERY = 64
#: Races that an append may lose before it gives up.
MAX_LOST_RACES = 20
#: Slots that are fetched ahead of the replay.
_AHEAD = 512
_UNKNOWN_RETRIES = 8
_LONGEST_PAUSE_S = 1.0

#: Composes the lines of the next slot from the run as it stands; `None` means nothing to do.
Compose = Callable[[RunManifest], Sequence[Line | bytes] | None]


class RunLog:
    """The log of one run and its replay.

    Args:
        store: The registry's objects.
        run_id: The run.
        snapshot_slot: Slot of the newest snapshot, where the caller has listed them.

    Attributes:
        run_id: The run.
        state: The replay of everything read so far. It is compact, but for moments in which a rule
            needs what was evicted.
    """

    def __init__(self, store: Store, run_id: str, *, snapshot_slot: int = -1) -> None:
        self._store = store
        self._lock = RLock()
        self._snapshots = Snapshots(store, run_id, snapshot_slot)
        self._complete = RunManifest.empty(run_id)
        self.run_id = run_id
        self.state = self._complete.compact()

    def open(self) -> RunManifest:
        """Read the run in at most three round trips.

        They are: the list of snapshots; the newest one, and the names of the slots after it; those
        slots.

        Raises:
            IntegrityError: A slot is damaged, missing or not legal.
        """
        with self._lock:
            self._complete = RunManifest.empty(self.run_id)
            for slot in self._snapshots.listed():
                if self._open_from(slot):
                    self._snapshots.newest = slot
                    return self.state
            self.state = RunManifest.empty(self.run_id).compact()
            self.state = self.read_to(self.length()).compact()
            return self.state

    def refresh(self) -> RunManifest:
        """Read to the head; one request when nothing is new."""
        with self._lock:
            following = self._get(self.state.next_slot)
            if following is not None:
                rest = self._read_listed(self.state.next_slot + 1)
                self.state = self._grown([following, *rest])
            self.state = self.state.compact()
            return self.state

    def fold(self, slots: Sequence[Slot]) -> RunManifest:
        """Go on by slots that the caller has read; no snapshot has a say.

        A complete state stays complete.

        Raises:
            Malformed: They do not continue the log legally.
        """
        with self._lock:
            self.state = self._grown(slots)
            return self.state

    def read_to(self, stop: int) -> RunManifest:
        """Go on by the slots before `stop`, which were listed; a few are in memory at a time.

        Raises:
            Malformed: They do not continue the log legally, or one of them is absent.
        """
        with self._lock:
            numbers = range(self.state.next_slot, stop)
            if len(numbers) <= _AHEAD:
                self.state = self._grown(list(self.fetch(numbers)))
                return self.state
            try:
                self.state = advance(self.state, self.fetch(numbers))
            except Forgotten:
                self.state = advance(self.history(), self.fetch(numbers))
            return self.state

    def history(self) -> RunManifest:
        """Return the complete replay of what `state` has read, evicted checkpoints included.

        The log is read from its first slot for it; later calls read on from where the last one was.

        Raises:
            Malformed: The log does not lead to what was read.
        """
        with self._lock:
            if self.state.gone is None:
                return self.state
            done, end = self._complete.next_slot, self.state.next_slot
            complete = advance(self._complete, self.fetch(range(done, end)))
            if complete.head != self.state.head:
                raise Malformed(
                    "the log is not the one that this handle has read",
                    where=self.run_id,
                    expected=f"{self.state.commits} commits, the last one {self.state.head}",
                    found=f"{complete.commits}, the last one {complete.head}",
                    hint="Run `holdfast verify`: a snapshot says something else than the log, or "
                    "the log was replaced.",
                )
            self._complete = complete
            return complete

    def knowing(self, n: int) -> RunManifest:
        """Return a replay that has the record of a checkpoint, also of an evicted one."""
        state = self.state
        return state if n in state.by_n or not state.is_evicted(n) else self.history()

    def knowing_entry(self, version: int) -> RunManifest:
        """Return a replay that has the record of an entry of the pool, also of an evicted one."""
        state = self.state
        is_gone = state.gone is not None and has_bit(state.gone.versions, version)
        return self.history() if is_gone else state

    def place_of(self, manifest: Digest) -> Place | None:
        """Return the place of a manifest, also of an evicted one; `None` without one."""
        found = self.state.by_manifest.get(manifest)
        return found or self.history().by_manifest.get(manifest)

    def recall(self) -> None:
        """Have `state` complete, until the run is refreshed or a slot is put."""
        with self._lock:
            self.state = self.history()

    def forget(self) -> None:
        """Have `state` compact again, and remember nothing else of what was evicted."""
        with self._lock:
            self.state = self.state.compact()
            self._complete = RunManifest.empty(self.run_id)

    def _grown(self, slots: Sequence[Slot]) -> RunManifest:
        """Return the state after further slots; from the complete one where a rule needs that."""
        try:
            return advance(self.state, slots)
        except Forgotten:
            return advance(self.history(), slots)

    def _after(self, slot: Slot) -> tuple[RunManifest, bool]:
        """Return the compact state after a slot, and whether it took the complete one.

        Who opens the run by an older snapshot reads the whole log for such a slot.
        """
        try:
            return advance(self.state.compact(), [slot]), False
        except Forgotten:
            return advance(self.history(), [slot]).compact(), True

    def append(self, compose: Compose, *, races: int = MAX_LOST_RACES) -> RunManifest:
        """Put the next slot, composed anew against the head until it lands.

        Args:
            compose: Gives the lines for a state, or raises where a precondition fails; called again
                after each lost race with the state that the winner left.
            races: How many may be lost in a row.

        Returns:
            The state at the slot that was put, or at the head when there was nothing to do.

        Raises:
            Conflict: All of them were lost.
            StoreUnavailable: The store did not say whether the slot was put.
        """
        with self._lock:
            for lost in range(races):
                try:
                    lines = compose(self.state)
                except Forgotten:
                    self.recall()
                    lines = compose(self.state)
                if lines is None:
                    return self.state
                slot = Slot.build(self.state.next_slot, lines)
                grown, needs_history = self._after(slot)
                if self._put(slot):
                    self.state = grown
                    self._write_snapshot(slot, at_once=needs_history)
                    return self.state
                before = self.state.next_slot
                if lost > 1:
                    # Before reading on: what is composed now is put at once, or it is late again.
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.01 * 2 ** min(lost, 9))))
                self.refresh()
                if self.state.next_slot == before:
                    raise Malformed(
                        "the store says that a slot exists, and does not give it",
                        where=slot_key(self.run_id, before),
                    )
            raise Conflict(
                f"lost {races} races for the next slot",
                where=self.run_id,
                found=f"the last one went to {_author(self._get(self.state.next_slot - 1))}",
                hint="Nothing was committed; try again, or write to this run from fewer processes.",
            )

    def length(self) -> int:
        """Return how many slots the log has: one listing."""
        return len(self._numbers(0))

    def slots(self, start: int = 0) -> Iterator[Slot]:
        """Yield every slot from `start` to the head, fetched in parallel, up to a damaged one."""
        yield from self.fetch(self._numbers(start))

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield slots that were listed, fetched in parallel, up to a damaged one.

        Raises:
            Malformed: One of them is absent.
        """
        for start in range(0, len(numbers), _AHEAD):
            batch = numbers[start : start + _AHEAD]
            for number, slot in zip(
                batch, self._store.pools.small.map(self._get, batch), strict=True
            ):
                if slot is None:
                    raise Malformed("a listed slot is absent", where=slot_key(self.run_id, number))
                yield slot

    def _put(self, slot: Slot) -> bool:
        """Put a slot; return whether it is ours. After a lost answer only the slot can tell."""
        key = slot_key(self.run_id, slot.number)
        for attempt in range(_UNKNOWN_RETRIES):
            try:
                if self._store.backend.put_if_absent(key, slot.data):
                    return True
                return self._store.backend.get(key) == slot.data
            except ObjectNotFound:
                pass  # "exists" and then absent: a listing still settling; ask the same slot again.
            except StoreUnavailable:
                if attempt == _UNKNOWN_RETRIES - 1:
                    raise
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.02 * 2**attempt)))
        raise StoreUnavailable(
            "unknown whether the commit landed",
            where=key,
            hint=f"Run `holdfast log {self.run_id}` to see; saving again is safe either way.",
        )

    def _get(self, number: int) -> Slot | None:
        key = slot_key(self.run_id, number)
        try:
            data = self._store.backend.get(key)
        except ObjectNotFound:
            return None
        return Slot.decode(number, data, where=key)

    def _read_listed(self, start: int) -> list[Slot]:
        """Return the slots from `start` on: one listing, then all of them at once."""
        return list(self.fetch(self._numbers(start)))

    def _numbers(self, start: int) -> Sequence[int]:
        backend = self._store.backend
        after = slot_key(self.run_id, start - 1) if start else ""
        infos = backend.list(log_prefix(self.run_id), start_after=after)
        listed = [parse_number(info.key) for info in infos]
        gap = next(gaps(backend, listed, partial(slot_key, self.run_id), start), None)
        if gap is not None:
            raise Malformed(
                "the log has a gap",
                where=self.run_id,
                expected=f"slot {gap}",
                found=f"slot {next(number for number in listed if number > gap)}",
                hint="A slot was deleted from outside; put it back from a backup of this store. "
                "A mirror's slots are its own.",
            )
        return range(start, listed[-1] + 1 if listed else start)

    def _open_from(self, slot: int) -> bool:
        """Open the run by way of a snapshot; return whether that can be trusted."""
        reading = self._store.pools.small.submit(self._snapshots.read, slot)
        slots = self._read_listed(slot)
        found = reading.result()
        opened = self._snapshots.parse(found, slots[0]) if found and slots else None
        if opened is None:
            return False
        self.state = opened.compact()
        self.state = self._grown(slots[1:]).compact()
        return True

    def _write_snapshot(self, slot: Slot, *, at_once: bool) -> None:
        if not at_once and not self._snapshots.is_due(self.state, SNAPSHOT_EVERY):
            return
        data = self._snapshots.encode(self.state, slot)
        # A cache: the commit stands whether or not this lands.
        with suppress(StorageError):
            self._store.backend.put(snapshot_key(self.run_id, slot.number), data)
        self._snapshots.newest = slot.number


def commit_line(state: RunManifest, actions: Sequence[Action]) -> Commit:
    """Return the commit that continues a history with these actions."""
    return Commit(
        n=state.commits,
        run=state.run_id,
        prev=state.head,
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
