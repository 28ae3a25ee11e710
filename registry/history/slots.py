"""The slots of one run as files: list them, fetch several at once, put one if it is absent.

`Races` decides how long a writer that lost a slot waits, and when it gives up.

`holdfast.registry.history.log` decides what a slot holds, and replays it. `Tail` remembers the
newest slots that a handle read, `SeenHead` the head that this machine has seen: a log can lose its
newest slots, be set back to an older copy, or be replaced by the log of another registry. A commit
after such a change would be in no log, or after a gap (W4 of docs/spec.md).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

from holdfast.registry.errors import (
    Malformed,
    NotFound,
    ObjectNotFound,
    RegistryError,
    RolledBack,
    StoreUnavailable,
)
from holdfast.registry.history.actions import Mark, Place, Seal
from holdfast.registry.history.replay import RunManifest, Slot, link_after
from holdfast.registry.objects import CONFIG, RUNS, is_run_id, log_prefix, parse_number, slot_key
from holdfast.registry.store import Store, gaps, read_config
from holdfast.registry.values import Digest, Field, Record

#: Seconds for which a writer tries.
PATIENCE_S = 60.0
#: A pause is at most this many times as long as the last attempt was.
_MOST_ATTEMPTS = 64
_LONGEST_WAIT_S = 10.0


class Races:
    """The races that one commit has lost.

    A pause is measured in attempts, so it fits a folder and a bucket. It doubles with each race, as
    long as there seem to be more writers, and shrinks with the time left: who has waited for long
    tries most often. So nobody is left behind while others win again and again.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._began_s = self._tried_s = time.monotonic()
        self.lost = 0  # how many races it has lost

    def lose(self) -> bool:
        """Wait before the next attempt; return whether there is time for one."""
        self.lost += 1
        now_s = time.monotonic()
        left = 1 - (now_s - self._began_s) / self._patience_s
        if left <= 0:
            return False
        if self.lost > 2:
            attempts = min(2 ** min(self.lost - 2, 32), _MOST_ATTEMPTS)
            most_s = min((now_s - self._tried_s) * attempts * left, _LONGEST_WAIT_S)
            time.sleep(random.uniform(0, most_s))
        self._tried_s = time.monotonic()
        return True


class Tail:
    """The newest slots that were read."""

    newest: Digest | None = None  # digest of the newest one
    slot: Slot | None = None  # the newest one
    committed: int | None = None  # the newest one that holds a commit
    committed_digest: Digest | None = None  # digest of that one
    #: Digest of the last commit of the seen head, once a slot has given it.
    link: Digest | None = None
    author: str | None = None  # of commit 0, once its slot was read

    def take(self, slot: Slot, seen_commits: int) -> None:
        """Note a further slot; `seen_commits` is the number of commits of the seen head."""
        self.newest, self.slot = Digest.of(slot.data), slot
        if slot.commits:
            self.committed, self.committed_digest = slot.number, self.newest
            if slot.number == 0:
                self.author = slot.commits[0][1].author
        if self.link is None and seen_commits:
            self.link = link_after([slot], seen_commits)


class CommitSlot(NamedTuple):
    """A slot that holds a commit, to which all commits before it are chained."""

    number: int
    digest: Digest


class SeenHead:
    """The head of a run's log on this machine: checked when the log is read, then remembered.

    Attributes:
        head: The head that was seen before, if any.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._heads = store.heads
        self._run_id = run_id
        # Read before the log is: another thread may commit meanwhile.
        self.head = None if store.heads is None else store.heads.seen(run_id)
        self.is_checked = self.head is None  # whether the log was compared with it

    @property
    def slots(self) -> int:
        """How many slots the log had when it was seen; 0 if it was not."""
        return 0 if self.head is None else self.head.slots

    @property
    def commits(self) -> int:
        """How many commits the log had when it was seen; 0 if it was not."""
        return 0 if self.head is None else self.head.commits

    def skipped(self, snapshot: int) -> range:
        """Return the slots that prove the head and that a snapshot skips."""
        return range(0) if self.head is None else self.head.skipped(snapshot)

    def check(self, run: RunManifest, tail: Tail, proofs: Iterable[Slot]) -> None:
        """Check that the log continues from the head, and remember its new head."""
        if self._heads is not None and self.head is not None:
            link = link_after(proofs, self.commits) or tail.link
            if link is None and run.commits == self.commits:
                link = run.head  # only marks and places follow the snapshot
            self.head.require(self._heads.url, run.next_slot, run.commits, link)
        self.is_checked = True
        self.note(run, tail)

    def note(self, run: RunManifest, tail: Tail) -> None:
        """Remember the head of the log, if the log was checked against the seen head."""
        if self._heads is not None and run.head is not None and self.is_checked:
            self._heads.note(self._run_id, run.next_slot, run.commits, run.head, tail.committed)


class Look(NamedTuple):
    """A running check of the newest slot that was read."""

    next_slot: int  # the slot after that one
    check: Future[None]  # its result: an error unless the slot is unchanged


def check_newest(store: Store, run_id: str, number: int, newest: Digest | None) -> None:
    """Check that the newest slot that was read is still there unchanged."""
    if newest is None:
        _check_registry(store)
        return
    key = slot_key(run_id, number)
    try:
        found: Digest | None = Digest.of(store.backend.get(key))
    except ObjectNotFound:
        found = None
    if found != newest:
        raise RolledBack(
            "the log is not the one that this handle has read",
            where=key,
            expected=f"the slot {newest.short}",
            found="no slot" if found is None else f"the slot {found.short}",
            hint="Nothing was committed. The log lost its newest slots, or another registry is "
            "in its place: restore it, or open the run again to continue from the present log.",
        )


def _check_registry(store: Store) -> None:
    """Refuse to begin a log if the registry is missing, or is not the one that was opened."""
    opened = store.config.id
    try:
        found = read_config(store.backend).id
    except NotFound:
        found = None
    if found != opened:
        raise RolledBack(
            "the registry is not the one that this handle was opened on",
            where=f"{store.backend.url}/{CONFIG}",
            expected=f"the registry {opened}",
            found="none" if found is None else f"the registry {found}",
            hint="Nothing was committed. Restore the registry from a backup, or open it "
            "again to work with its present content.",
        )


#: A log that has grown by more slots has changed; of fewer ones each is read.
_FEW = 4


class LogEnd(Record):
    """How a log ended when it was read: its newest slot."""

    run: str
    slots: Annotated[int, Field(ge=1)]  # number of slots
    size_bytes: int  # of the newest one; 0 if a note told of it
    modified_ms: int | None = None  # its time, by the store's clock; absent until it was listed
    sealed: int | None = None  # the slot of its newest seal
    notes: int | None = None  # the newest table of notes that was listed before it was read


End = TypeVar("End", bound=LogEnd)


def still_ends(store: Store, end: End) -> End | None:
    """Return how a log ends now, by one listing; `None` if a commit may have been added, or lost.

    Marks, seals and places, which collections and repacks put into logs, change nothing.
    """
    before = slot_key(end.run, end.slots - 2) if end.slots > 1 else ""
    slots = Slots(store, end.run)
    try:
        infos = list(store.backend.list(log_prefix(end.run), start_after=before, limit=_FEW + 2))
        expected = [slot_key(end.run, end.slots - 1 + i) for i in range(len(infos))]
        if not infos or len(infos) > _FEW + 1 or [info.key for info in infos] != expected:
            return None
        first_ms = int(infos[0].modified_s * 1000)
        if (infos[0].size_bytes, first_ms) != (end.size_bytes, end.modified_ms or first_ms):
            return None
        sealed = end.sealed
        for i in range(1, len(infos)):
            slot = slots.get(end.slots - 1 + i)
            if slot is None or any(not isinstance(x, Mark | Place | Seal) for _, x in slot.lines):
                return None
            if any(isinstance(line, Seal) for _, line in slot.lines):
                sealed = slot.number
    except StoreUnavailable:
        raise
    except RegistryError:
        return None  # opening it says why
    head = None if store.heads is None else store.heads.seen(end.run)
    if head is not None and head.slots > end.slots + len(infos) - 1:
        return None  # the log went back
    newest = infos[-1]
    return end.changed(
        slots=end.slots + len(infos) - 1,
        size_bytes=newest.size_bytes,
        modified_ms=int(newest.modified_s * 1000),
        sealed=sealed,
    )


#: Slots that are fetched at once.
AHEAD = 512
#: What a bucket lists in one answer.
_PAGE = 1000
_UNKNOWN_RETRIES = 8
#: Slots that may prove the seen head and are fetched before they are needed.
_PROOFS_AT_ONCE = 64
#: Seconds after which an unknown outcome becomes an error.
_UNKNOWN_S = 60.0
_LONGEST_PAUSE_S = 1.0


class Slots:
    """The slots of one run."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def get(self, number: int) -> Slot | None:
        """Return a slot; `None` if it is absent."""
        key = slot_key(self._run_id, number)
        try:
            data = self._store.backend.get(key)
        except ObjectNotFound:
            return None
        return Slot.decode(number, data, where=key)

    def end(self, seen: int) -> int | None:
        """Return how many slots the log has, of which `seen` were seen before: one request.

        `None` if that takes more requests, or the log is shorter than it was, or damaged.
        """
        with suppress(Malformed):
            numbers = self.numbers(max(seen - 1, 0), _PAGE)
            if len(numbers) < _PAGE and (numbers or not seen):
                return numbers.stop
        return None

    def numbers(self, start: int = 0, most: int | None = None) -> range:
        """Return the numbers of the slots from `start` to the head, or of `most`: one listing."""
        backend = self._store.backend
        after = slot_key(self._run_id, start - 1) if start else ""
        infos = backend.list(log_prefix(self._run_id), start_after=after, limit=most)
        listed = [parse_number(info.key) for info in infos]
        gap = next(gaps(backend, listed, partial(slot_key, self._run_id), start), None)
        if gap is not None:
            raise Malformed(
                "the log has a gap",
                where=self._run_id,
                expected=f"slot {gap}",
                found=f"slot {next(number for number in listed if number > gap)}",
                hint="Somebody deleted a slot; restore it from a backup of this store. Do not take "
                "it from a mirror, whose slots differ.",
            )
        return range(start, listed[-1] + 1 if listed else start)

    def fetch(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Yield listed slots, fetched in parallel, up to a damaged one."""
        for start in range(0, len(numbers), AHEAD):
            batch = numbers[start : start + AHEAD]
            for number, slot in zip(
                batch, self._store.pools.small.map(self.get, batch), strict=True
            ):
                if slot is None:
                    raise Malformed("a listed slot is absent", where=slot_key(self._run_id, number))
                yield slot

    def prove(self, numbers: Sequence[int]) -> Iterator[Slot]:
        """Return slots that may prove the seen head; fetching the first ones starts at once.

        More than one is needed only if nothing was committed after the snapshot that was seen.
        """
        small = self._store.pools.small
        started = [small.submit(self.get, number) for number in numbers[:_PROOFS_AT_ONCE]]

        def proofs() -> Iterator[Slot]:
            yield from (slot for slot in (one.result() for one in started) if slot is not None)
            for start in range(_PROOFS_AT_ONCE, len(numbers), _PROOFS_AT_ONCE):
                yield from self.fetch(numbers[start : start + _PROOFS_AT_ONCE])

        return proofs()

    def put(self, slot: Slot) -> bool:
        """Put a slot unless one of its number exists; return whether the existing one is ours.

        After a lost answer the slot is read, to learn whether it is ours.
        """
        key = slot_key(self._run_id, slot.number)
        until = time.monotonic() + _UNKNOWN_S
        for attempt in range(_UNKNOWN_RETRIES):
            try:
                if self._store.backend.put_if_absent(key, slot.data):
                    return True
                return self._store.backend.get(key) == slot.data
            except ObjectNotFound:
                pass  # it exists and yet is absent: the store is not settled yet; try again
            except StoreUnavailable:
                # Each call has its own retries already; do not ask a silent store for hours.
                if attempt == _UNKNOWN_RETRIES - 1 or time.monotonic() > until:
                    raise
            pause(0.02, attempt)
        raise StoreUnavailable(
            "unknown whether the commit landed",
            where=key,
            hint=f"`holdfast log {self._run_id}` shows it; saving again is safe in both cases.",
        )


def list_runs(store: Store) -> list[str]:
    """Return the ids of all runs, sorted."""
    listed = store.backend.list(RUNS, delimiter=True)
    names = (info.key.removeprefix(RUNS) for info in listed if info.key.endswith("/"))
    return sorted(name[:-1] for name in names if is_run_id(name[:-1]))


def pause(first_s: float, attempt: int) -> None:
    """Wait for a random time of at most `first_s`, doubled with each attempt up to a bound."""
    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, first_s * 2 ** min(attempt, 9))))
