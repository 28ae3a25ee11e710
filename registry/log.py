"""A run's log: slots made by put-if-absent, dense from 0, never rewritten.

Owns opening a run in three round trips, reading to the head, appending with read-back and rebase,
snapshots, the check that a log is still the one that was read, and reading the records of evicted
checkpoints. `registry.state` defines the meaning of slots; `registry.writer` which objects a commit
may name.
"""

from __future__ import annotations

import getpass
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock

from backends import refuse_links
from registry.actions import Action, Commit, Line, Place
from registry.digest import Digest
from registry.environment import host_name
from registry.errors import (
    Conflict,
    IntegrityError,
    Malformed,
    NotFound,
    ObjectNotFound,
    RolledBack,
    StorageError,
    StoreUnavailable,
)
from registry.objects.keys import (
    CONFIG,
    RUNS,
    epoch_key,
    is_run_id,
    log_prefix,
    parse_number,
    slot_key,
    snapshot_key,
)
from registry.snapshots import Snapshots
from registry.state import Forgotten, RunManifest, Slot, advance, has_bit, link_after
from registry.store import Store, gaps, read_config

#: A snapshot is written when the log has grown by so many slots.
SNAPSHOT_EVERY = 64
#: Races that an append may lose before it gives up.
MAX_LOST_RACES = 20
#: Slots that are fetched ahead of the replay.
_AHEAD = 512
_PROOFS_AT_ONCE = 64
_UNKNOWN_RETRIES = 8
#: Seconds after which an outcome that is still unknown becomes an error.
_UNKNOWN_S = 60.0
_LONGEST_PAUSE_S = 1.0

#: Composes the lines of the next slot from the run as it stands; `None` means nothing to do.
Compose = Callable[[RunManifest], Sequence[Line | bytes] | None]


@dataclass(slots=True)
class _Tail:
    """The newest slots that were read.

    Attributes:
        newest: Digest of the newest one.
        committed: The newest one that holds a commit.
        link: Link of the history where it was seen before, once a slot has shown it.
    """

    newest: Digest | None = None
    committed: int | None = None
    link: Digest | None = None

    def take(self, slot: Slot, seen_commits: int) -> None:
        """Take a further slot; `seen_commits` says after how many commits the link is wanted."""
        self.newest = Digest.of(slot.data)
        if slot.commits:
            self.committed = slot.number
        if self.link is None and seen_commits:
            self.link = link_after([slot], seen_commits)


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
        state: The replay of everything read so far. It is compact, but for moments in which a rule
            needs what was evicted.
        seen: The head of the log on this machine; set by the caller that listed the slots
            before this was made.
    """

    def __init__(self, store: Store, run_id: str, *, snapshot_slot: int = -1) -> None:
        self._store = store
        self._pid, self._made_lock = os.getpid(), RLock()
        self._snapshots = Snapshots(store, run_id, snapshot_slot)
        self._complete = RunManifest.empty(run_id)
        # As it was before anything is read: another thread may be committing meanwhile.
        self.seen = store.heads.seen(run_id) if store.heads is not None else None
        self._is_checked = self.seen is None
        self._may_write = False
        self._tail = _Tail()
        # How many slots would survive a loss of power.
        self._durable = 0
        self.run_id = run_id
        self.state = self._complete.compact()

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
                    return self.state
            self._tail = _Tail()
            self.state = RunManifest.empty(self.run_id).compact()
            self.state = self.read_to(self.length()).compact()
            if check_head:
                self.check_head()
            return self.state

    def check_head(self, proofs: Iterable[Slot] = ()) -> None:
        """Check the log against the head that was seen before, and remember its new head.

        Args:
            proofs: Slots before those that were read, in which the head that was seen is looked
                for first.

        Raises:
            RolledBack: It is shorter than it was, or another one.
        """
        heads, seen, state = self._store.heads, self.seen, self.state
        if heads is not None and seen is not None:
            link = link_after(proofs, seen.commits) or self._tail.link
            if link is None and state.commits == seen.commits:
                link = state.head  # only marks and places follow the snapshot
            seen.require(heads.url, state.next_slot, state.commits, link)
        self._is_checked = True
        self._note_head()

    def _note_head(self) -> None:
        """Remember the head of the log, if the log was checked against the old head."""
        heads, state = self._store.heads, self.state
        if heads is not None and state.head is not None and self._is_checked:
            heads.note(
                self.run_id, state.next_slot, state.commits, state.head, self._tail.committed
            )

    def _proofs(self, snapshot: int) -> Iterator[Slot]:
        """Yield the slots that prove the head that was seen and that a snapshot skips.

        The first of them are asked for at once. More than one is needed only of a head that was
        seen by a snapshot behind which nothing was committed.
        """
        numbers = self.seen.skipped(snapshot) if self.seen is not None else range(0)
        small = self._store.pools.small
        asked = [small.submit(self._get, number) for number in numbers[:_PROOFS_AT_ONCE]]

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
            following = self._get(self.state.next_slot)
            if following is not None:
                look = self.look()
                rest = self._read_listed(self.state.next_slot + 1)
                look.outcome.result()
                slots = [following, *rest]
                self._go_on(lambda: slots)
                self._note_head()
            self.state = self.state.compact()
            return self.state

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
            numbers = range(self.state.next_slot, stop)
            if len(numbers) <= _AHEAD:
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
            if self.state.gone is None:
                return self.state
            done, end = self._complete.next_slot, self.state.next_slot
            try:
                complete = advance(self._complete, self.fetch(range(done, end)))
            except IntegrityError:
                self.look().outcome.result()  # in a log that was replaced anything may be missing
                raise
            if complete.head != self.state.head:
                raise RolledBack(
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
        """Make `state` complete, until the run is refreshed or a slot is put."""
        with self._lock:
            self.state = self.history()

    def forget(self) -> None:
        """Make `state` compact again, and forget the records of evicted checkpoints."""
        with self._lock:
            self.state = self.state.compact()
            self._complete = RunManifest.empty(self.run_id)

    def _after(self, slot: Slot) -> tuple[RunManifest, bool]:
        """Return the compact state after a slot, and whether that needed the complete one.

        A later reader with an older snapshot reads the whole log for such a slot.
        """
        try:
            return advance(self.state.compact(), [slot]), False
        except Forgotten:
            return advance(self.history(), [slot]).compact(), True

    def _go_on(self, read: Callable[[], Iterable[Slot]]) -> RunManifest:
        """Fold further slots in; from the complete state if a rule needs evicted records.

        Args:
            read: Gives the slots; called again for the complete state.
        """
        tail = replace(self._tail)
        try:
            self.state = advance(self.state, self._passing(tail, read()))
        except Forgotten:
            self.state = advance(self.history(), self._passing(tail, read()))
        self._tail = tail
        return self.state

    def _passing(self, tail: _Tail, slots: Iterable[Slot]) -> Iterator[Slot]:
        """Yield slots, and note them in the tail."""
        commits = self.seen.commits if self.seen is not None else 0
        for slot in slots:
            tail.take(slot, commits)
            yield slot

    def look(self) -> Look:
        """Begin to check that the newest slot that was read is still there unchanged.

        `append` waits for the result, so a caller that sends packs first loses no time.
        """
        with self._lock:
            number, digest = self.state.next_slot, self._tail.newest
        return Look(number, self._store.pools.small.submit(self._check_newest, number - 1, digest))

    def _check_newest(self, number: int, digest: Digest | None) -> None:
        if digest is None:
            self._check_registry()
            return
        key = slot_key(self.run_id, number)
        try:
            found: Digest | None = Digest.of(self._store.backend.get(key))
        except ObjectNotFound:
            found = None
        if found != digest:
            raise RolledBack(
                "the log is not the one that this handle has read",
                where=key,
                expected=f"the slot {digest.short}",
                found="no slot" if found is None else f"the slot {found.short}",
                hint="Nothing was committed. The log lost its newest slots, or another registry is "
                "in its place: restore it, or open the run again to continue from the present log.",
            )

    def _check_registry(self) -> None:
        """Refuse to begin a log in another registry than the handle was opened on, or in none."""
        opened = self._store.config.id
        try:
            found = read_config(self._store.backend).id
        except NotFound:
            found = None
        if found != opened:
            raise RolledBack(
                "the registry is not the one that this handle was opened on",
                where=f"{self._store.backend.url}/{CONFIG}",
                expected=f"the registry {opened}",
                found="none" if found is None else f"the registry {found}",
                hint="Nothing was committed. Bring the registry back from a backup, or open it "
                "again to work with what is there.",
            )

    def make_durable(self) -> None:
        """Make every slot durable that was read.

        Their writers may have died before. Acknowledgements, later slots and deletions that depend
        on these slots must not survive them.
        """
        with self._lock:
            if self._durable < self.state.next_slot:
                seen = [slot_key(self.run_id, self.state.next_slot - 1)]
                if self.state.epoch:
                    seen.append(epoch_key(self.state.epoch))
                self._store.backend.make_durable(seen)
                self._durable = self.state.next_slot

    def confirm(self) -> RunManifest:
        """Return the run as it was read, after checking that its slots are there and durable.

        Call it before telling a caller that there is nothing left to commit.
        """
        return self.append(lambda _: None)

    def append(
        self,
        compose: Compose,
        *,
        races: int = MAX_LOST_RACES,
        caches: bool = True,
        look: Look | None = None,
    ) -> RunManifest:
        """Put the next slot, composed anew against the head until it lands.

        Args:
            compose: Gives the lines for a state, or raises where a precondition fails; called again
                after each lost race with the state that the winner left.
            races: How many may be lost in a row.
            caches: Whether a snapshot may be written as well.
            look: One that was begun earlier; it counts if nothing was read since.

        Returns:
            The state at the slot that was put, or at the head when there was nothing to do. Either
            is durable.

        Raises:
            Conflict: All of them were lost.
            RolledBack: The log is not the one that this handle has read; nothing was committed.
            StoreUnavailable: The store did not say whether the slot was put.
            StoreUnsuitable: There is a symbolic link in the place of a file of the run.
        """
        with self._lock:
            self.prepare_writing()
            if look is None or look.next_slot != self.state.next_slot:
                look = self.look()
            look.outcome.result()
            for lost in range(races):
                try:
                    lines = compose(self.state)
                except Forgotten:
                    self.recall()
                    lines = compose(self.state)
                self.make_durable()
                if lines is None:
                    return self.state
                slot = Slot.build(self.state.next_slot, lines)
                grown, needs_history = self._after(slot)
                if self._put(slot):
                    self.state = grown
                    self._tail.take(slot, 0)
                    self._durable = grown.next_slot
                    self._note_head()
                    if caches:
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
        until = time.monotonic() + _UNKNOWN_S
        for attempt in range(_UNKNOWN_RETRIES):
            try:
                if self._store.backend.put_if_absent(key, slot.data):
                    return True
                return self._store.backend.get(key) == slot.data
            except ObjectNotFound:
                pass  # "exists" and then absent: a listing still settling; ask the same slot again.
            except StoreUnavailable:
                # The store has been patient already: a silent one must not be asked for hours.
                if attempt == _UNKNOWN_RETRIES - 1 or time.monotonic() > until:
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

    def _open_from(self, slot: int, *, check_head: bool) -> bool:
        """Open the run from a snapshot; return whether the result can be trusted."""
        proofs = self._proofs(slot) if check_head else iter(())
        reading = self._store.pools.small.submit(self._snapshots.read, slot)
        slots = self._read_listed(slot)
        found = reading.result()
        opened = self._snapshots.parse(found, slots[0]) if found and slots else None
        if opened is None:
            return False
        self._tail = _Tail()
        self._tail.take(slots[0], self.seen.commits if self.seen is not None else 0)
        self.state = opened.compact()
        self.state = self._go_on(lambda: slots[1:]).compact()
        if check_head:
            self.check_head(proofs)
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
