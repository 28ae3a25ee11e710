"""A run's log: slots made by put-if-absent, dense from 0, never rewritten.

Owns opening a run in three round trips, reading to the head, appending with read-back and rebase,
snapshots, and the look whether a log is still the one that was read. What slots mean is the
business of `registry.state`; which objects a commit may name that of `registry.writer`.
"""

from __future__ import annotations

import getpass
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock

from registry import canonical
from registry.actions import Action, Commit, Line, line_digest
from registry.digest import Digest
from registry.environment import host_name
from registry.errors import (
    Conflict,
    IntegrityError,
    LogReplaced,
    Malformed,
    ObjectNotFound,
    RegistryError,
    StorageError,
    StoreUnavailable,
)
from registry.objects.framing import join_lines, split_lines
from registry.objects.keys import (
    RUNS,
    epoch_key,
    is_run_id,
    log_prefix,
    parse_number,
    slot_key,
    snapshot_key,
    snapshot_prefix,
    snapshot_slot,
)
from registry.state import RunManifest, Slot, advance
from registry.store import Store, gaps

#: A snapshot is written when the log has grown by so many slots.
SNAPSHOT_EVERY = 64
#: Races that an append may lose before it gives up.
MAX_LOST_RACES = 20
#: Bump whenever replay gives another result for the same slots: older snapshots are then ignored.
REPLAY_VERSION = 3
_SNAPSHOTS_TRIED = 4
_UNKNOWN_RETRIES = 8
_LONGEST_PAUSE_S = 1.0

#: Composes the lines of the next slot from the run as it stands; `None` means nothing to do.
Compose = Callable[[RunManifest], Sequence[Line | bytes] | None]


@dataclass(frozen=True, slots=True)
class Look:
    """A look at the newest slot that was read, on its way.

    Attributes:
        next_slot: The slot after that one.
        outcome: Done when it is there as it was read.
    """

    next_slot: int
    outcome: Future[None]


class RunLog:
    """The log of one run and its replay.

    Args:
        store: The registry's objects.
        run_id: The run.
        snapshot_slot: Slot of the newest snapshot, where the caller has listed them.

    Attributes:
        run_id: The run.
        state: The replay of everything read so far.
    """

    def __init__(self, store: Store, run_id: str, *, snapshot_slot: int = -1) -> None:
        self._store = store
        self._lock = RLock()
        self._snapshot_slot = snapshot_slot
        # Of the newest slot that was read or put, and how many slots would survive a loss of power.
        self._newest: Digest | None = None
        self._durable = 0
        self.run_id = run_id
        self.state = RunManifest.empty(run_id)

    def open(self) -> RunManifest:
        """Read the run in at most three round trips.

        They are: the list of snapshots; the newest one, and the names of the slots after it; those
        slots.

        Raises:
            IntegrityError: A slot is damaged, missing or not legal.
        """
        with self._lock:
            self._newest, self._durable = None, 0
            for slot in self._snapshot_slots():
                opened = self._open_from(slot)
                if opened is not None:
                    self._snapshot_slot = slot
                    return opened
            return self._go_on(RunManifest.empty(self.run_id), self._read_listed(0))

    def refresh(self) -> RunManifest:
        """Read to the head; one request when nothing is new.

        Raises:
            LogReplaced: What is new does not follow what this handle has read.
            IntegrityError: A slot is damaged, missing or not legal.
        """
        with self._lock:
            following = self._get(self.state.next_slot)
            if following is not None:
                look = self.look()
                rest = self._read_listed(self.state.next_slot + 1)
                look.outcome.result()
                self._go_on(self.state, [following, *rest])
            return self.state

    def fold(self, slots: Sequence[Slot]) -> RunManifest:
        """Go on by slots that the caller has read; no snapshot has a say.

        Raises:
            Malformed: They do not continue the log legally.
        """
        with self._lock:
            return self._go_on(self.state, slots)

    def _go_on(self, state: RunManifest, slots: Sequence[Slot]) -> RunManifest:
        self.state = advance(state, slots)
        if slots:
            self._newest = Digest.of(slots[-1].data)
        return self.state

    def look(self) -> Look:
        """Begin to look whether the newest slot that was read is still there as it was read.

        `append` waits for it, so whoever has something else to send first loses no time.
        """
        with self._lock:
            number, digest = self.state.next_slot, self._newest
        return Look(number, self._store.pools.small.submit(self._check_newest, number - 1, digest))

    def _check_newest(self, number: int, digest: Digest | None) -> None:
        if digest is None:
            return  # nothing was read yet
        key = slot_key(self.run_id, number)
        try:
            found: Digest | None = Digest.of(self._store.backend.get(key))
        except ObjectNotFound:
            found = None
        if found != digest:
            raise LogReplaced(
                "the log is not the one that this handle has read",
                where=key,
                expected=f"the slot {digest.short}",
                found="no slot" if found is None else f"the slot {found.short}",
                hint="Nothing was committed. The log lost its newest slots, or another registry is "
                "in its place: restore it, or open it anew to go on from what is there.",
            )

    def make_durable(self) -> None:
        """Return when every slot that was read would survive a loss of power.

        Whoever put them may have died before. What is acknowledged, put next or deleted because of
        them must not outlive them.
        """
        with self._lock:
            if self._durable < self.state.next_slot:
                seen = [slot_key(self.run_id, self.state.next_slot - 1)]
                if self.state.epoch:
                    seen.append(epoch_key(self.state.epoch))
                self._store.backend.make_durable(seen)
                self._durable = self.state.next_slot

    def confirm(self) -> RunManifest:
        """Return the run as it was read, once that is certain to be there and to stay.

        Who tells a caller that there is nothing left to commit rests on this.
        """
        return self.append(lambda _: None)

    def append(
        self, compose: Compose, *, races: int = MAX_LOST_RACES, look: Look | None = None
    ) -> RunManifest:
        """Put the next slot, composed anew against the head until it lands.

        Args:
            compose: Gives the lines for a state, or raises where a precondition fails; called again
                after each lost race with the state that the winner left.
            races: How many may be lost in a row.
            look: One that was begun earlier; it counts if nothing was read since.

        Returns:
            The state at the slot that was put, or at the head when there was nothing to do. Either
            is durable.

        Raises:
            Conflict: All of them were lost.
            LogReplaced: The log is not the one that this handle has read; nothing was committed.
            StoreUnavailable: The store did not say whether the slot was put.
        """
        with self._lock:
            if look is None or look.next_slot != self.state.next_slot:
                look = self.look()
            look.outcome.result()
            for lost in range(races):
                lines = compose(self.state)
                self.make_durable()
                if lines is None:
                    return self.state
                slot = Slot.build(self.state.next_slot, lines)
                grown = advance(self.state, [slot])
                if self._put(slot):
                    self.state, self._newest = grown, Digest.of(slot.data)
                    self._durable = grown.next_slot
                    self._write_snapshot(slot)
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

    def slots(self, start: int = 0) -> Iterator[Slot]:
        """Yield every slot from `start` to the head, fetched in parallel, up to a damaged one."""
        yield from self.fetch(self._numbers(start))

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield slots that were listed, fetched in parallel, up to a damaged one.

        Raises:
            Malformed: One of them is absent.
        """
        for number, slot in zip(
            numbers, self._store.pools.small.map(self._get, numbers), strict=True
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

    def _snapshot_slots(self) -> list[int]:
        prefix = snapshot_prefix(self.run_id)
        found = []
        for info in self._store.backend.list(prefix, limit=_SNAPSHOTS_TRIED):
            with suppress(RegistryError):
                found.append(snapshot_slot(info.key))
        return found

    def _open_from(self, slot: int) -> RunManifest | None:
        """Return the run by way of a snapshot, or `None` where the snapshot cannot be trusted."""
        reading = self._store.pools.small.submit(self._read_snapshot, slot)
        slots = self._read_listed(slot)
        found = reading.result()
        if found is None or not slots:
            return None
        header, body = found
        if header != _snapshot_header(slots[0]):
            return None
        try:
            state = RunManifest.decode(body, where=snapshot_key(self.run_id, slot))
        except (IntegrityError, ValueError):
            return None
        if (state.run_id, state.next_slot) != (self.run_id, slot + 1):
            return None
        if slots[0].commits and line_digest(slots[0].commits[-1][0]) != state.head:
            return None
        self._newest = Digest.of(slots[0].data)
        return self._go_on(state, slots[1:])

    def _read_snapshot(self, slot: int) -> Sequence[bytes] | None:
        key = snapshot_key(self.run_id, slot)
        try:
            lines = split_lines(self._store.backend.get(key), where=key)
        except (IntegrityError, ObjectNotFound):
            return None
        return lines if len(lines) == 2 else None

    def _write_snapshot(self, slot: Slot) -> None:
        if slot.number - self._snapshot_slot < SNAPSHOT_EVERY:
            return
        data = join_lines([_snapshot_header(slot), self.state.encode()])
        # A cache: the commit stands whether or not this lands.
        with suppress(StorageError):
            self._store.backend.put(snapshot_key(self.run_id, slot.number), data)
        self._snapshot_slot = slot.number


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


def _snapshot_header(slot: Slot) -> bytes:
    # The slot's own digest ties the snapshot to this log and to no other of the same name.
    tie = Digest.of(slot.data).hex()
    return canonical.encode(
        {
            "format": "holdfast.snapshot/1",
            "replay": REPLAY_VERSION,
            "slot": slot.number,
            "slot_digest": tie,
        }
    )


def _author(slot: Slot | None) -> str:
    commits = slot.commits if slot else ()
    return commits[-1][1].author if commits else "a collector or a repack"
