"""The line of training with a journal: the expected run, and where training continues.

The expected run is the run as this machine last read it, followed by the waiting entries. A save is
checked against it before it is acknowledged; a checkpoint that only this machine has is restored
from it. Its commit numbers are provisional: other writers may come first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any

from holdfast.registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    MissingObject,
    ObjectNotFound,
    StorageError,
    Stranded,
)
from holdfast.registry.history import PlacedState, RunLog, decode_plain
from holdfast.registry.history.actions import Action, SetStatus
from holdfast.registry.history.replay import NeedsHistory, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.saving.journal.checkpoint import JournaledCheckpoint, carried_here
from holdfast.registry.saving.journal.entry_saves import (
    EntryToken,
    LogScan,
    expected_save,
    require_line,
)
from holdfast.registry.saving.journal.folder import RunFolder, run_folders
from holdfast.registry.saving.journal.records import Entry, SaveFields, Takeover
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.saving.ownership import Claimed, Ownership
from holdfast.registry.store import Store
from holdfast.registry.writing import Composed, after_commit

_LOGGER = logging.getLogger("holdfast")


class ExpectedRun:
    """A run with entries that are not in it yet."""

    def __init__(self, run: RunManifest) -> None:
        self.run = run  # the run after the entries
        #: The commit number of the checkpoint of each write, provisional for entries.
        self.numbers: dict[str, int] = {}
        #: The entries of checkpoints with their numbers, by provisional commit number.
        self.entries: dict[int, tuple[int, Entry]] = {}
        #: For each of these checkpoints, the last entry of every stream to which it, or one before
        #: it that is not in the run yet, appends.
        self.last_in_streams: dict[int, dict[str, Mapping[str, Any]]] = {}
        self._newest: int | None = None

    def add(self, number: int, entry: Entry, n: int | None, actions: Sequence[Action]) -> None:
        """Add an entry with its actions for this run; `n` is the commit of its checkpoint."""
        if n is not None:
            self.numbers[entry.write] = n
            if n == self.run.commits:
                self.entries[n] = number, entry
        self.run = after_commit(self.run, actions, entry.authorship)

    def append(self, n: int, resumed: int | None, fields: SaveFields) -> None:
        """Note the streams to which a checkpoint appends."""
        before = self._newest if resumed is None else resumed
        found = {} if before is None else self.last_in_streams.get(before, {})
        new = {
            name: decode_plain(entries)[-1] for name, entries in fields.streams.items() if entries
        }
        self._newest, self.last_in_streams[n] = n, {**found, **new}


def expect(folder: RunFolder, log: RunLog, store: Store) -> ExpectedRun:
    """Return the expected run, by its log as read so far.

    Entries that will be refused, stranded or damaged are skipped.
    """
    try:
        return _expect(folder, log, store, log.run)
    except NeedsHistory:
        return _expect(folder, log, store, log.history())


def _expect(folder: RunFolder, log: RunLog, store: Store, run: RunManifest) -> ExpectedRun:
    expected = ExpectedRun(run)
    waiting = list(_waiting(folder))
    if not waiting:
        return expected
    scan = LogScan(log, min(entry.search_from for _, entry in waiting), folder.ids())
    if not log.is_copy:  # a copy has no entry that waits
        scan.read_to(run)
    left_out: set[str | None] = set()
    for number, entry in waiting:
        landed = scan.commit_of(entry.write)
        if landed is not None:
            expected.numbers[entry.write] = landed
            continue
        try:
            if entry.follows is not None:
                require_line(folder.run_id, folder.outcome_of(entry.follows, number))
            if entry.follows not in left_out:
                scan.require_own(scan.takeover_of(folder, entry))
                _add(expected, number, entry, EntryStates(folder, entry.write, store), scan)
                continue
        except (IntegrityError, ObjectNotFound):
            continue  # entries after a damaged one are carried
        except (Conflict, InvalidInput):
            pass
        left_out.add(entry.write)
    return expected


def _waiting(folder: RunFolder) -> Iterator[tuple[int, Entry]]:
    """Yield the waiting entries, except damaged ones; an entry of a newer version is an error."""
    for number in folder.waiting():
        with suppress(ObjectNotFound, IntegrityError):
            entry = folder.entry(number)
            folder.require_own(entry.run)
            yield number, entry


def _add(
    expected: ExpectedRun, number: int, entry: Entry, states: EntryStates, scan: LogScan
) -> None:
    run, fields = expected.run, entry.save
    if fields is None:
        expected.add(number, entry, None, [entry.action])
        return
    resumed = fields.resumes_commit
    if fields.resumes_write is not None:
        write = fields.resumes_write
        resumed = expected.numbers.get(write, scan.commit_of(write))
    token = EntryToken(run.run_id, entry=entry)
    token.continue_from(resumed, fields.keeps)
    save = expected_save(states, token, entry, fields, run)
    save.check(run)
    actions = save.actions(run)
    expected.add(number, entry, save.checkpoint_n, actions)
    if save.checkpoint_n == run.commits:  # not a save that repeats a checkpoint
        expected.append(save.checkpoint_n, resumed, fields)


class JournaledLine:
    """The run as training with a journal sees it: the log, followed by the entries that wait."""

    def __init__(self, ownership: Ownership, folder: RunFolder) -> None:
        self.ownership, self.folder = ownership, folder
        self._log, self._store = ownership.log, ownership.store
        self.begin()

    def begin(self) -> None:
        """Begin with nothing acknowledged; also called in a process that was forked."""
        self.carrier = BackgroundCarrier(self._store, self.folder)
        #: Number and slot of the takeover that this handle saves under; 0 before its first save.
        self.takeover = self.slot = 0
        #: The checkpoint that the next save continues from, by number or `write`.
        self.resumes: int | str | None = None
        self.keeps: int | None = None  # the last pivot after it that the next save keeps
        #: The states of the newest entry of this handle, the bases of the next save.
        self.last: tuple[EntryStates, Mapping[str, PlacedState]] | None = None
        self._expecting = RLock()
        # The entry that training continues from, by number and `write`.
        self._follows: tuple[int, str] | None = None
        # Acknowledged entries whose outcome is not known: `write`, and the slot to search from.
        self._unsettled: dict[int, tuple[str, int]] = {}
        self._search_from = 0
        self._read_to = 0
        if self._log.is_copy:  # it has at least what was carried until now
            self._read_to = self.folder.settled_to()
            self.folder.open_copy(self._log)
        self._expected: ExpectedRun | None = None
        self._told: set[int] = set()

    # The expected run

    @property
    def run(self) -> RunManifest:
        """The run with the saves that only the journal holds."""
        return self.expect().run

    def expect(self) -> ExpectedRun:
        """Return the expected run, computed if it is not known; again if something is carried."""
        # Other threads call this too, such as one that prepares a save during another save.
        with self._expecting:
            while self._expected is None:
                carried = self.folder.settled_to()
                if carried > self._read_to:  # into slots that this handle has not read
                    self.read()
                expected = expect(self.folder, self._log, self._store)
                if self.folder.settled_to() == carried:  # nothing was carried meanwhile
                    self._expected = expected
            return self._expected

    def expect_anew(self) -> None:
        """Compute the expected run again when it is needed: the log or the entries have changed."""
        self._expected = None

    def read(self) -> None:
        """Read the log."""
        carried = self.folder.settled_to()
        self._log.refresh()
        self._read_to, self._expected = carried, None

    def refresh(self) -> RunManifest:
        """Read the log; return the run with the saves that are only in the journal."""
        if not self._log.is_copy:
            self.read()
        return self.run

    def newest_first(self) -> list[Checkpoint]:
        """Return the kept checkpoints, newest first, also those that only the journal holds."""
        self._expected = None
        self.folder.restore_entries()
        self.carrier.wake()
        expected, backlog = self.expect(), self.folder.backlog()
        if backlog.stranded or backlog.refused or backlog.damaged:
            _LOGGER.warning(
                "%s: the journal %s has saves that are not in the run: %d stranded, %d refused, "
                "%d damaged; `holdfast journal ls` lists them",
                self._log.run_id,
                self.folder.path,
                backlog.stranded,
                backlog.refused,
                backlog.damaged,
            )
        self._warn_of_others()
        here = self.folder.carried() if self._log.is_copy else {}
        live = expected.run.live()
        return [self._known(record.n, here.get(record.n)) for record in reversed(live)]

    def _warn_of_others(self) -> None:
        """Warn of saves that wait for another registry, which may have moved or be lost."""
        for registry_id, other in run_folders(self.folder.journal, self._log.run_id):
            if other.path != self.folder.path and other.waiting():
                _LOGGER.warning(
                    "%s: the journal has saves for a run of this name in another registry, and "
                    "training here does not continue from them: %s. If that registry has moved or "
                    "is lost, `holdfast journal push RUN FORK --to URL --from %s` brings them",
                    self._log.run_id,
                    other.path,
                    registry_id[:8],
                )

    def last_in_stream(self, checkpoint: Checkpoint, stream: str) -> Mapping[str, Any] | None:
        """Return the last entry of a stream at a checkpoint, if only the journal holds it."""
        if not isinstance(checkpoint, JournaledCheckpoint) or checkpoint.durable_in == "registry":
            return None
        expected = self.expect()
        n = expected.numbers[checkpoint.entry.write]
        return expected.last_in_streams.get(n, {}).get(stream)

    def _known(self, n: int, here: Entry | None) -> Checkpoint:
        """Return a checkpoint of the expected run; `here` is its entry if it was carried."""
        expected, store = self.expect(), self._store
        if here is not None:
            return carried_here(EntryStates(self.folder, here.write, store), here, expected.run, n)
        if n in expected.entries:
            number, entry = expected.entries[n]
            return self.checkpoint(EntryStates(self.folder, entry.write, store), number, entry, n)
        return Checkpoint(store, self._log, expected.run.by_n[n])

    def checkpoint(self, states: EntryStates, number: int, entry: Entry, n: int) -> Checkpoint:
        """Return the checkpoint of an entry, which has a number in the expected run."""
        return JournaledCheckpoint(states, number, entry, self.run, n, self._find)

    def _find(self, number: int, entry: Entry) -> Checkpoint | None:
        """Return the checkpoint of an entry in the registry; `None` if it is not there."""
        note = self.carrier.outcomes.get(number) or self.folder.note(number)
        if note is None and number in self.folder.numbers():
            return None  # it waits
        if note is not None and note.outcome != "carried":
            return None
        log = self._log
        with suppress(StorageError):
            n = None if note is None else note.commit
            if n is None or n >= log.run.commits:
                log.refresh()
            if n is None:  # another process has carried it, and deleted the note
                scan = LogScan(log, entry.search_from, self.folder.ids())
                scan.read_to(log.run)
                n = scan.commit_of(entry.write)
            if n is not None:
                return Checkpoint(self._store, log, log.knowing(n).by_n[n])
        return None

    # Where training continues

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint that training resumed from, before the first save."""
        n = self.resumed_at()
        resumed = None if n is None else self.run.by_n.get(n)
        return None if resumed is None else resumed.step

    def resumed_at(self) -> int | None:
        """Return the number of the checkpoint that training continues from, in the expected run."""
        if not isinstance(self.resumes, str):
            return self.resumes
        found = self.expect().numbers.get(self.resumes)
        if found is None:  # it was carried meanwhile
            scan = LogScan(self._log, self._search_from, self.folder.ids())
            scan.read_to(self._log.run)
            found = self.resumes = scan.commit_of(self.resumes)
        return found

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Continue from exactly a checkpoint; the next save takes the run over."""
        self.ownership.earlier.forget()
        self._continue_from(checkpoint)

    def resume_after(self, checkpoint: Checkpoint) -> str | None:
        """Continue from a checkpoint and, if it is the newest, from the pivots after it."""
        if checkpoint.durable_in == "journal":  # a pivot waits until the registry has everything
            self._continue_from(checkpoint)
            return None
        name, token = self.ownership.resume_after(checkpoint), self.ownership.token
        self._continue_from(checkpoint)
        self.keeps, token.resumed_at = token.keeps, None
        return name

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        self.ownership.failed.clear()
        self.keeps = self._follows = None
        if isinstance(checkpoint, JournaledCheckpoint) and checkpoint.durable_in == "journal":
            write = self.resumes = checkpoint.entry.write
            self._search_from = checkpoint.entry.search_from
            self._follows = checkpoint.number, write
        else:
            self.resumes = checkpoint.handle.n
        components = checkpoint.manifest.components
        self.ownership.earlier.remember(checkpoint.handle.record.phase, checkpoint.step, components)
        self.takeover, self._expected, self.last = 0, None, None

    def take_over(self) -> None:
        """Take the run over in the registry, and read that back (J1).

        Without the registry go on under the newest takeover of this machine: it was read back.
        """
        token, log = self.ownership.token, self._log
        if log.is_copy and (held := self.folder.own_takeover()) is not None:
            token.token = held.token
            self.note_takeover(held)
            return
        token.warn_of_owner(log.run)
        self.folder.restore_entries()
        token.prefix, token.resumed_at = self.folder.id(), None
        token.reset()
        nothing = Composed(lambda run: ())  # noqa: ARG005
        self.ownership.committer.commit(Claimed(token, nothing), waits=False)
        log.check_unchanged()
        self.note_takeover()

    def note_takeover(self, held: Takeover | None = None) -> None:
        """Note the takeover that this handle has just committed, or continues."""
        self.slot = self._log.run.next_slot - 1 if held is None else held.slot
        self.takeover = self.folder.put_takeover(self.ownership.token.token, self.slot)
        if held is None:
            self.folder.keep_copy(self._log, self._store)
        self.ownership.taken()
        self._told = set(self.folder.noted())
        self._expected = None

    # Entries of this handle

    def entry(
        self, write: str, *, save: SaveFields | None = None, said: SetStatus | None = None
    ) -> Entry:
        """Return the next entry, not acknowledged yet."""
        slot = self.slot
        if isinstance(self.resumes, str):
            slot = min(slot, self._search_from)
        follows = self._follows and self._follows[1]
        return Entry.now(
            self.folder.run_id, self.takeover, slot, follows, write=write, save=save, said=said
        )

    def acknowledge(self, entry: Entry, n: int | None, actions: Sequence[Action]) -> int:
        """Acknowledge an entry: from now on it is durable on this machine; return its number."""
        with self._expecting:
            expected, self._expected = self.expect(), None
            number = self.folder.acknowledge(entry)
            self.resumes = self.keeps = None
            self._follows = number, entry.write
            if actions:  # otherwise its commit may be that of another entry
                self._unsettled[number] = entry.write, entry.search_from
            expected.add(number, entry, n, actions)
            self._expected = expected
        self.carrier.take()
        return number

    def require_kept(self) -> None:
        """Refuse to continue from a save that never enters the run."""
        if self._follows is not None:
            number, _ = self._follows
            note = self.carrier.outcomes.get(number) or self.folder.note(number)
            require_line(self._log.run_id, note)

    def raise_outcomes(self) -> None:
        """Raise each failed save of this handle once; a stranded one, and a freeze, every time."""
        self.carrier.raise_frozen()
        for number in self.folder.noted():
            note = self.folder.note(number) if number not in self._told else None
            if self.takeover and note is not None and note.outcome != "carried":
                if note.outcome == "stranded":
                    raise Stranded(note.reason or "")
                self._told.add(number)
                raise Conflict(
                    f"a save that was acknowledged by the journal is {note.outcome}",
                    where=f"{self._log.run_id}: entry {number} of {self.folder.path}",
                    found=note.reason,
                    hint="Its bytes are kept there; this call did nothing.",
                )

    def raise_lost(self) -> None:
        """Raise, once, if acknowledged saves are neither in the journal nor in the registry."""
        with self._expecting:  # another thread may acknowledge meanwhile
            here = set(self.folder.numbers())
            noted = {*self.folder.noted(), *self.carrier.outcomes}
            lost = {n: one for n, one in self._unsettled.items() if n not in here | noted}
            if lost:
                self.folder.restore_entries()
                here = set(self.folder.numbers())
                lost = {n: one for n, one in lost.items() if n not in here}
            if lost:
                self._log.refresh()
                scan = LogScan(self._log, min(start for _, start in lost.values()), ())
                scan.read_to(self._log.run)
                lost = {n: one for n, one in lost.items() if scan.commit_of(one[0]) is None}
            self._unsettled = {n: one for n, one in self._unsettled.items() if n in here - noted}
        if lost:
            self.takeover, self._follows, self._expected, self.last = 0, None, None, None
            raise MissingObject(
                f"{len(lost)} saves that were acknowledged are gone from the journal",
                where=f"{self._log.run_id}: {self.folder.path}",
                found=f"entries {', '.join(map(str, lost))} are neither there nor in the registry",
                hint="This error comes once; later saves continue without them. If the folder was "
                "moved, put it back before the next save.",
            )
