"""The journal of one run: numbered files that are put once, and the states of entries."""

# Paths are strings here, as in the store of folders.
# ruff: noqa: PTH103, PTH112, PTH118, PTH208
from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

from holdfast.backends.local.backend import LocalBackend
from holdfast.registry.errors import Fenced, IntegrityError, ObjectNotFound, StorageError
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.history.log import new_signature
from holdfast.registry.journal.locks import FileLock
from holdfast.registry.journal.records import Entry, JournalId, Note, SaveFields, Takeover
from holdfast.registry.journal.settings import Journal
from holdfast.registry.storage.framing import join_lines, split_lines
from holdfast.registry.storage.keys import parse_number
from holdfast.registry.training.backlog import Backlog
from holdfast.registry.values.records import Record

_ID = "journal.json"
_TAKEOVERS, _ENTRIES, _NOTES, _STATES = "takeovers/", "entries/", "notes/", "states"

_R = TypeVar("_R", bound=Record)


class RunFolder:
    """The journal of one run.

    Args:
        journal: The journal of the machine.
        registry_id: The registry.
        run_id: The run.

    Attributes:
        journal: The same.
        run_id: The run.
        path: The folder.
    """

    def __init__(self, journal: Journal, registry_id: str, run_id: str) -> None:
        self.journal = journal
        self.run_id = run_id
        self.path = os.path.join(journal.path, registry_id, run_id)
        self._files = LocalBackend(self.path)

    @property
    def exists(self) -> bool:
        """Whether anything was ever acknowledged here."""
        return os.path.isdir(os.path.join(self.path, _ENTRIES))

    # Locks

    def lock(self, name: str) -> FileLock:
        """Return a new holder of a lock: `carrying`, `acknowledging` or `writing`."""
        os.makedirs(self.path, exist_ok=True)
        return FileLock(os.path.join(self.path, f"lock-{name}"))

    # Takeovers

    def id(self) -> str:
        """Return the id of the journal, with which its tokens begin; it is made at first use."""
        made = JournalId(id=secrets.token_hex(8))
        with suppress(ObjectNotFound):
            return self._read(_ID, JournalId).id
        self._put(_ID, made)
        return self._read(_ID, JournalId).id

    def take_over(self, token: str, slot: int) -> int:
        """Note a takeover that is in the registry; from here on other handles are fenced."""
        with self.lock("acknowledging").held():
            number = max(self._numbers(_TAKEOVERS), default=0) + 1
            self._put(_key(_TAKEOVERS, number), Takeover(token=token, slot=slot))
        return number

    def takeover(self, number: int) -> Takeover:
        """Return a takeover."""
        return self._read(_key(_TAKEOVERS, number), Takeover)

    def newest_takeover(self) -> int:
        """Return the number of the newest takeover; 0 before the first."""
        return max(self._numbers(_TAKEOVERS), default=0)

    # Entries

    def acknowledge(self, entry: Entry) -> int:
        """Make an entry durable; return its number.

        Raises:
            Fenced: Another handle of this machine has taken the run over.
        """
        with self.lock("acknowledging").held():
            if self.newest_takeover() != entry.takeover:
                raise Fenced(
                    "another trainer of this machine has taken this run over",
                    where=self.run_id,
                    hint="Stop this process; its earlier saves are kept.",
                )
            numbers = [*self._numbers(_ENTRIES), *self._numbers(_NOTES)]
            number = max(numbers, default=0) + 1
            self._put(_key(_ENTRIES, number), entry)
        return number

    def new_entry(
        self,
        takeover: int,
        *,
        write: str,
        save: SaveFields | None = None,
        status: RunStatus | None = None,
        search_from: int | None = None,
    ) -> Entry:
        """Return an entry of a takeover, signed now.

        Args:
            takeover: The number of the takeover.
            write: The `write` of its commit.
            save: The save.
            status: The status.
            search_from: A slot from which on the log is searched, if the takeover is later.
        """
        signed, slot = new_signature(), self.takeover(takeover).slot
        return Entry(
            run=self.run_id,
            takeover=takeover,
            search_from=slot if search_from is None else min(slot, search_from),
            write=write,
            author=signed.author,
            time_ms=signed.time_ms,
            save=save,
            status=status,
        )

    def numbers(self) -> list[int]:
        """Return the numbers of all entries, ascending."""
        return self._numbers(_ENTRIES)

    def waiting(self) -> list[int]:
        """Return the numbers of the entries without a note, ascending."""
        if not self.exists:
            return []
        # A note comes after its entry, and is deleted after it: entries before and behind the notes
        # show what has none.
        entries = self._numbers(_ENTRIES)
        noted = set(self._numbers(_NOTES))
        there = set(self._numbers(_ENTRIES))
        return [number for number in entries if number in there - noted]

    def carried_to(self) -> int:
        """Return the number of the last entry that does not wait; it never goes back."""
        entries = self.numbers() if self.exists else []
        waiting = self.waiting()  # after them: a new entry does not look carried
        return waiting[0] - 1 if waiting else max(entries, default=0)

    def entry(self, number: int) -> Entry:
        """Return an entry.

        Raises:
            ObjectNotFound: It was carried and deleted.
            IntegrityError: Its file is damaged.
        """
        return self._read(_key(_ENTRIES, number), Entry)

    def entries(self, numbers: list[int]) -> Iterator[tuple[int, Entry]]:
        """Yield entries that are sound and still there."""
        for number in numbers:
            with suppress(ObjectNotFound, IntegrityError):
                yield number, self.entry(number)

    # Notes

    def note(self, number: int) -> Note | None:
        """Return the outcome of an entry; `None` while it waits."""
        with suppress(ObjectNotFound):
            return self._read(_key(_NOTES, number), Note)
        return None

    def noted(self) -> list[int]:
        """Return the numbers of all notes, ascending."""
        return self._numbers(_NOTES)

    def put_note(self, number: int, note: Note) -> Note:
        """Note an outcome durably; return it, or the one that was noted before."""
        key = _key(_NOTES, number)
        if self._put(key, note):
            return note
        return self._read(key, Note)

    def replace_note(self, number: int, note: Note) -> None:
        """Replace the outcome of an entry that a person has dealt with."""
        self._files.put(_key(_NOTES, number), join_lines([note.encode()]))

    # States

    def states_path(self, write: str) -> str:
        """Return the folder of the states of an entry."""
        return os.path.join(self.path, _STATES, write)

    def remove_states(self, write: str) -> None:
        """Delete the states of an entry."""
        shutil.rmtree(self.states_path(write), ignore_errors=True)

    def remove(self, number: int, write: str) -> None:
        """Delete a noted entry: states, entry, note."""
        self.remove_states(write)
        self._files.delete(_key(_ENTRIES, number))
        self._files.delete(_key(_NOTES, number))

    def remove_unacknowledged(self) -> None:
        """Delete states of saves that were never acknowledged, unless a save is running."""
        lock = self.lock("writing")
        if not lock.acquire(wait=False):
            return
        try:
            present = self._state_folders()
            if present:
                numbers = self.numbers()
                known = {entry.write for _, entry in self.entries(numbers)}
                if len(known) == len(numbers):  # an unreadable entry may own any of them
                    for write in present - known:
                        self.remove_states(write)
        finally:
            lock.release()

    def _state_folders(self) -> set[str]:
        with suppress(FileNotFoundError):
            return set(os.listdir(os.path.join(self.path, _STATES)))
        return set()

    def size_bytes(self, writes: list[str]) -> int:
        """Return the bytes on the disk of the states of entries; linked files count once."""
        sizes: dict[tuple[int, int], int] = {}
        for write in writes:
            for folder, _, names in os.walk(self.states_path(write)):
                for name in names:
                    with suppress(FileNotFoundError):
                        found = os.lstat(os.path.join(folder, name))
                        sizes[found.st_dev, found.st_ino] = found.st_size
        return sum(sizes.values())

    def waiting_bytes(self) -> int:
        """Return the bytes of the states that wait."""
        return self.size_bytes([entry.write for _, entry in self.entries(self.waiting())])

    def backlog(self) -> Backlog:
        """Return what is only here."""
        waiting = [entry for _, entry in self.entries(self.waiting())]
        notes = [self.note(number) for number in self.noted()] if self.exists else []
        outcomes = Counter(note.outcome for note in notes if note is not None)
        return Backlog(
            entries=len(waiting),
            size_bytes=self.size_bytes([entry.write for entry in waiting]),
            oldest_ms=waiting[0].time_ms if waiting else None,
            refused=outcomes["refused"],
            stranded=outcomes["stranded"],
            damaged=outcomes["damaged"],
        )

    # Files

    def _numbers(self, prefix: str) -> list[int]:
        return [parse_number(info.key) for info in self._files.list(prefix)]

    def _put(self, key: str, record: Record) -> bool:
        return self._files.put_if_absent(key, join_lines([record.encode()]))

    def _read(self, key: str, kind: type[_R]) -> _R:
        where = os.path.join(self.path, key)
        line, *_ = split_lines(self._files.get(key), where=where)
        return kind.decode(line, where=where)


def _key(prefix: str, number: int) -> str:
    return f"{prefix}{number:020d}"


def run_folders(journal: Journal) -> Iterator[tuple[str, RunFolder]]:
    """Yield the id of the registry and the journal of each run, by name."""
    for registry_id in _listed(journal.path):
        for run_id in _listed(os.path.join(journal.path, registry_id)):
            yield registry_id, RunFolder(journal, registry_id, run_id)


def _listed(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"the journal cannot be read: {error.strerror}", where=path) from error
