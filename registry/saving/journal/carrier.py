"""Carry the entries of a run into the registry, in order, each exactly once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.registry.errors import (
    IntegrityError,
    MissingObject,
    ObjectNotFound,
    RegistryError,
    RolledBack,
    Stranded,
)
from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import SetStatus
from holdfast.registry.saving.journal.entry_saves import (
    REPLACED,
    CarriedSave,
    CarriedStatus,
    LogScan,
    Refused,
    refusing,
    require_line,
)
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import Entry, Note
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.store import Store
from holdfast.registry.writing import Committer, StateWriter

_LOGGER = logging.getLogger("holdfast")


class Carrier:
    """Carries the entries of one run; calls `told` with each outcome, after noting it."""

    def __init__(
        self,
        store: Store,
        folder: RunFolder,
        told: Callable[[int, Note], object] = lambda number, note: None,  # noqa: ARG005
    ) -> None:
        self._store = store
        self._folder = folder
        self._told = told
        self._committer: Committer | None = None
        self._scan: LogScan | None = None
        # Made once, since making it prepares the folders.
        self._lock = folder.lock("carrying")

    def carry(self, goes_on: Callable[[], bool] = lambda: True) -> bool:
        """Carry all waiting entries; return whether this process was the carrier (J9).

        `goes_on` decides before each entry whether to continue. After an error the entries wait.
        """
        if not self._lock.acquire(wait=False):
            return False
        try:
            self._open()  # first: a copy of the folder under another name is left as it is
            self._folder.remove_unacknowledged()
            self._folder.remove_damaged_notes()
            while goes_on():
                waiting = self._folder.waiting()
                if not waiting:
                    break
                number = waiting[0]  # J5
                note = self._folder.put_note(number, self._outcome(number))
                if note.outcome != "carried":
                    where, why = self._folder.run_id, note.reason
                    _LOGGER.error(
                        "%s: entry %d of the journal is %s: %s", where, number, note.outcome, why
                    )
                self._told(number, note)
                self._prune(number)
        finally:
            self._lock.release()
        return True

    def _outcome(self, number: int) -> Note:
        """Carry an entry, or find that it can never be carried."""
        committer = self._open()
        committer.log.refresh()
        try:
            entry = self._entry(number)
        except IntegrityError as error:
            self._put_own_slot(committer)
            return Note(outcome="damaged", reason=str(error))
        if number < max(self._folder.noted(), default=0):
            # A later entry has a note, so this one had one too: it was carried, or can never be.
            lost = MissingObject("its note is lost or damaged", where=self._folder.path)
            return self._damaged_or_carried(committer, entry, lost)
        while True:
            read = committer.log.run.next_slot
            try:
                return self._carry(committer, number, entry)
            except Stranded as error:
                committer.log.make_durable()
                return Note(outcome="stranded", reason=str(error))
            except Refused as refused:
                # Check again at the head: a longer log may allow the entry (J8).
                if committer.log.refresh().next_slot == read:
                    committer.log.make_durable()
                    return Note(outcome="refused", reason=str(refused.error))
            except RolledBack:
                raise
            except (IntegrityError, ObjectNotFound):
                damage, is_mended = self._damage(entry)
                if damage is not None:
                    return self._damaged_or_carried(committer, entry, damage)
                if not is_mended:
                    raise  # the registry is damaged, not the journal

    def _entry(self, number: int) -> Entry:
        """Return an entry of this run, if need be from the copy beside its states."""
        try:
            entry = self._folder.entry(number)
        except IntegrityError:
            self._folder.restore_entries()
            entry = self._folder.entry(number)
        self._folder.require_own(entry.run)
        return entry

    def _carry(self, committer: Committer, number: int, entry: Entry) -> Note:
        scan, folder = self._scan_for(entry), self._folder
        scan.read_to(committer.log.run)
        takeover = scan.takeover_of(folder, entry)
        scan.require_taken(takeover)
        if scan.is_due(entry, takeover, committer.log.run):
            # An entry after a damaged one is carried: its own state is whole.
            before = None if entry.follows is None else folder.outcome_of(entry.follows, number)
            with refusing():  # a save that never enters the run is followed by none (J8)
                require_line(folder.run_id, before)
        if entry.save is None:
            committer.commit(CarriedStatus(entry, takeover, scan))
            commit = None
        else:
            states = EntryStates(folder, entry.write, self._store)
            save = CarriedSave(committer.writer, entry, entry.save, takeover, scan, states)
            committer.commit(save)
            commit = save.checkpoint_n
        scan.read_to(committer.log.run)  # reads the slot back (J4)
        landed = scan.commit_of(entry.write)
        # Before the note: a start without the registry must not miss what is noted.
        self._folder.keep_copy(committer.log, self._store)
        # A save that repeats a checkpoint, with nothing new, needs no commit.
        return Note(outcome="carried", commit=commit if landed is None else landed)

    def _damage(self, entry: Entry) -> tuple[RegistryError | None, bool]:
        """Return the damage of an entry in the journal, and whether some of it was repaired."""
        try:
            self._scan_for(entry).takeover_of(self._folder, entry)
            states = EntryStates(self._folder, entry.write, self._store)
            return None, states.check_whole(entry.places)
        except (IntegrityError, ObjectNotFound) as error:
            return error, False

    def _damaged_or_carried(
        self, committer: Committer, entry: Entry, damage: RegistryError
    ) -> Note:
        """Note damage, unless a process that died has carried the entry (J8)."""
        self._put_own_slot(committer)
        scan = self._scan_for(entry)
        scan.read_to(committer.log.run)
        landed = scan.commit_of(entry.write)
        if landed is not None:
            return Note(outcome="carried", commit=landed)
        return Note(outcome="damaged", reason=str(damage))

    def _put_own_slot(self, committer: Committer) -> None:
        """Put a slot that changes nothing: after it, the put of a dead carrier cannot land."""
        if committer.log.run.dropped is None:
            committer.commit(lambda run: [SetStatus(status=run.status)])

    def _open(self) -> Committer:
        if self._committer is None:
            log = RunLog(self._store, self._folder.run_id)
            if not log.open().next_slot:  # whatever is put there would be no legal log
                raise RolledBack(
                    "the run of these saves is not in this registry",
                    where=self._folder.run_id,
                    found=f"saves of it in {self._folder.path}",
                    hint=REPLACED,
                )
            # It has no `await_earlier`, or it would wait for itself.
            self._committer = Committer(StateWriter(self._store, log))
        return self._committer

    def _scan_for(self, entry: Entry) -> LogScan:
        if self._scan is None or self._scan.start > entry.search_from:
            log = self._open().log
            self._scan = LogScan(log, entry.search_from, self._folder.ids())
        return self._scan

    def _prune(self, last: int) -> None:
        """Delete carried entries, except the newest one of the journal, and the newest save."""
        numbers = self._folder.numbers()
        newest = self._folder.entries(numbers[::-1])
        save = next((number for number, entry in newest if entry.save is not None), None)
        older = [number for number in numbers[:-1] if number <= last and number != save]
        for number, entry in self._folder.entries(older):
            note = self._folder.note(number)
            if note is not None and note.outcome in ("carried", "pushed", "deleted"):
                self._folder.remove(number, entry.write)
