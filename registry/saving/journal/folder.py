"""The journal of one run: numbered files that are put once, and the states of entries."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from holdfast.backends.local import disk, folders
from holdfast.registry.errors import (
    Conflict,
    Fenced,
    IntegrityError,
    Malformed,
    MissingObject,
    ObjectNotFound,
    StorageError,
    StoreFull,
    UnsupportedFormat,
)
from holdfast.registry.history import TRAIN_ON, RunLog
from holdfast.registry.objects import RUNS, join_lines, split_lines
from holdfast.registry.saving.journal.file_lock import FileLock
from holdfast.registry.saving.journal.records import (
    ID_DIGITS,
    Entry,
    JournalId,
    Machine,
    Note,
    Outcome,
    Takeover,
)
from holdfast.registry.saving.journal.registries import PrivateFolder, keep_registry
from holdfast.registry.saving.journal.settings import Journal, this_machine
from holdfast.registry.saving.pending import Backlog
from holdfast.registry.store import Store, open_folder
from holdfast.registry.values import Record

# Paths are strings here, as in the store of folders.
# ruff: noqa: PTH102, PTH112, PTH116, PTH118, PTH120, PTH208

_LOGGER = logging.getLogger("holdfast")
_ID = "journal.json"
_MACHINES, _TAKEOVERS, _ENTRIES, _NOTES = "machines/", "takeovers/", "entries/", "notes/"
_STATES = "states"
#: The files of an entry's states, and their folders.
_OF_STATES = re.compile(
    r"[0-9a-f]{16}/(?:(?:packs|manifests|placements)(?:/[0-9a-f]{2}(?:/[0-9a-f]{64}\.[0-9]+)?)?"
    r"|\.tmp(?:/[0-9]+-[0-9a-f]{16})?|[0-9]{20})"
)
#: Files with other names are not the journal's: it neither reads nor deletes them.
_NUMBER, _WRITE = re.compile(r"[0-9]{20}"), re.compile(r"[0-9a-f]{16}")
_REGISTRY = re.compile(r"[0-9a-f]{32}")
_GIVEN = 4  # files of the reserve that are given up for one note

_R = TypeVar("_R", bound=Record)
_T = TypeVar("_T")


class RunFolder:
    """The journal of one run; `path` is its folder."""

    def __init__(self, journal: Journal, registry_id: str, run_id: str) -> None:
        self.journal = journal
        self.run_id = run_id
        self.path = os.path.join(journal.path, registry_id, run_id)
        self._states = f"{registry_id}/{run_id}/{_STATES}"
        self._files = PrivateFolder(self.path)
        self._is_own = False

    @property
    def exists(self) -> bool:
        """Whether the journal has ever acknowledged anything."""
        return os.path.isdir(os.path.join(self.path, _ENTRIES))

    # Locks

    def lock(self, name: str) -> FileLock:
        """Return a new holder of a lock: `carrying`, `acknowledging` or `writing`."""
        self._prepare()
        return FileLock(os.path.join(self.path, f"lock-{name}"))

    def _prepare(self) -> None:
        """Make the folders for this user alone; refuse other users' folders, and links."""
        root = os.path.realpath(self.journal.path)
        try:
            folders.refuse_links(root, self._states)
            os.close(open_folder(os.path.join(root, self._states.partition("/")[0]), make=True))
            found = os.stat(root)
            if found.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EACCES, "the folder belongs to another user", root)
            if found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                raise PermissionError(errno.EACCES, "every user may rename what is in it", root)
            for path in (self.path, os.path.join(self.path, _STATES)):
                with suppress(FileExistsError):
                    os.mkdir(path, 0o700)
            self._require_name()
            self._files.keep_reserve(_ENTRIES)
        except OSError as error:
            disk.fail(error, root)

    def _require_name(self) -> None:
        """Refuse the folder of a run whose name differs in case alone."""
        if not self._is_own:
            names, own = _listed(os.path.dirname(self.path)), self.run_id
            alike = [name for name in names if name.lower() == own.lower()]
            if alike and own not in alike:
                self.require_own(alike[0])
            self._is_own = True

    def require_own(self, run_id: str) -> None:
        """Refuse what belongs to another run, as on a disk that ignores case."""
        if run_id != self.run_id:
            raise Conflict(
                "this folder of the journal belongs to another run",
                where=self.path,
                expected=self.run_id,
                found=run_id,
                hint="Name another journal for one of the two, or a disk that tells A from a.",
            )

    # Takeovers

    def id(self) -> str:
        """Return the id of this machine, the prefix of its tokens; it is made at first use."""
        return self.ids()[-1]

    def ids(self) -> list[str]:
        """Return the ids of this journal, in the order in which machines started to use it."""
        known, here = list(self._sound(_MACHINES, Machine)), this_machine()
        if known and known[-1].machine == here:
            return [one.id for one in known]
        if known:
            _LOGGER.warning(
                "%s: the journal was copied or moved from another machine. Its saves are carried "
                "from here too, each once; if the other machine goes on with this run, one of the "
                "two is refused",
                self.path,
            )
        self._prepare()
        number = max(self._numbers(_MACHINES), default=0) + 1
        made = secrets.token_hex(8) if known else self._first_id()
        self._put(_key(_MACHINES, number), Machine(id=made, machine=here))
        return self.ids()

    def _first_id(self) -> str:
        """Return the id of a journal that names no machine: of version 1, damaged, or new."""
        with suppress(ObjectNotFound, IntegrityError):
            return self._read(_ID, JournalId).id
        tokens = [one.token for one in self._sound(_TAKEOVERS, Takeover)]
        return tokens[0][:ID_DIGITS] if tokens else secrets.token_hex(8)

    def put_takeover(self, token: str, slot: int) -> int:
        """Note a takeover that is in the registry; from now on other handles are fenced."""
        with self.lock("acknowledging").held():
            number = self.newest_takeover() + 1
            while not self._put(_key(_TAKEOVERS, number), Takeover(token=token, slot=slot)):
                number += 1  # the lock of a network disk may hold for one machine alone
        return number

    def takeover(self, number: int) -> Takeover:
        """Return a takeover."""
        return self._read(_key(_TAKEOVERS, number), Takeover)

    def restore_takeover(self, number: int, found: Collection[Takeover]) -> Takeover:
        """Write a lost takeover again: the first one in the log that no other number has."""
        known = {one.token for one in self._sound(_TAKEOVERS, Takeover)}
        for one in found:
            if one.token not in known:
                self._files.put(_key(_TAKEOVERS, number), join_lines([one.encode()]))
                return one
        raise ObjectNotFound("a takeover is neither in the journal nor in the log", where=self.path)

    def own_takeover(self) -> Takeover | None:
        """Return the newest takeover, if this machine made it and nothing under it is stranded."""
        if not self.exists:
            return None
        self._prepare()
        with suppress(ObjectNotFound, IntegrityError):
            newest = self.takeover(self.newest_takeover())
            under = (self.takeover(one.takeover) for _, one in self._with_outcome("stranded"))
            if newest.token.startswith(self.id()) and newest.token not in [o.token for o in under]:
                return newest
        return None

    def carried(self) -> dict[int, Entry]:
        """Return the carried saves whose states are still here, by the numbers of their commits."""
        found = self._with_outcome("carried")
        return {note.commit: one for note, one in found if note.commit is not None and one.save}

    def _with_outcome(self, outcome: Outcome) -> Iterator[tuple[Note, Entry]]:
        for number, entry in self.entries(self.noted()):
            note = self.note(number)
            if note is not None and note.outcome == outcome:
                yield note, entry

    def newest_takeover(self) -> int:
        """Return the number of the newest takeover, lost ones included; 0 before the first."""
        newest = [entry.takeover for _, entry in self.entries(self.numbers()[-1:])]
        return max([*newest, *self._numbers(_TAKEOVERS)], default=0)

    # Entries

    def acknowledge(self, entry: Entry) -> int:
        """Make an entry durable; return its number.

        Raises `Fenced` if another handle of this machine has taken the run over, and
        `MissingObject` if the journal was removed.
        """
        with self.lock("acknowledging").held():
            newest = self.newest_takeover()
            if newest < entry.takeover:
                removed = "the journal was removed while this handle used it"
                raise MissingObject(removed, where=self.path, hint=TRAIN_ON)
            if newest != entry.takeover:
                raise Fenced(
                    "another trainer of this machine has taken this run over",
                    where=self.run_id,
                    hint="Stop this process; its earlier saves are kept.",
                )
            number = max([*self.numbers(), *self.noted()], default=0) + 1
            while not self._put(_key(_ENTRIES, number), entry):
                number += 1  # as of a takeover
        # `_put` syncs file and folder; the states were made durable before. This copy is not
        # synced: it helps if the file of the entry alone is lost.
        copy = os.path.join(self.states_path(entry.write), f"{number:020d}")
        with suppress(OSError):
            fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PrivateFolder.file_mode)
            with os.fdopen(fd, "wb") as file:
                file.write(join_lines([entry.encode()]))
        return number

    def restore_entries(self) -> None:
        """Write entries whose files are gone or damaged again, from the copies beside their states.

        It needs no lock: states are deleted before their entry, with the copy.
        """
        folders = self._state_folders()  # before the entries are read
        for write in folders - self._writes() if folders else ():
            for number, data in self._copies(write):
                with self.lock("acknowledging").held(), suppress(UnsupportedFormat):
                    try:
                        self.entry(number)
                    except (ObjectNotFound, IntegrityError):
                        self._files.put(_key(_ENTRIES, number), data)
                        _LOGGER.warning(
                            "%s: entry %d of the journal was lost or damaged, and is restored",
                            self.run_id,
                            number,
                        )

    def _copies(self, write: str) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of the sound copy of an entry that is beside its states."""
        with suppress(OSError):
            for name in filter(_NUMBER.fullmatch, os.listdir(self.states_path(write))):
                with suppress(OSError, ObjectNotFound, IntegrityError):
                    key = f"{_STATES}/{write}/{name}"
                    if self._read(key, Entry).write == write:
                        yield int(name), self._files.get(key)

    def _writes(self) -> set[str]:
        return {entry.write for _, entry in self.entries(self.numbers())}

    def numbers(self) -> list[int]:
        """Return the numbers of all entries, ascending."""
        return self._numbers(_ENTRIES)

    def waiting(self) -> list[int]:
        """Return the numbers of the entries without a note, ascending."""
        if not self.exists:
            return []
        # A note is put after its entry, and deleted after it: so the entries are listed twice.
        entries, noted = self.numbers(), set(self.noted())
        there = set(self.numbers()) - noted
        return [number for number in entries if number in there]

    def settled_to(self) -> int:
        """Return the number of the last entry that does not wait; it never goes back."""
        entries = self.numbers() if self.exists else []
        waiting = self.waiting()  # read last: a new entry must not look carried
        return waiting[0] - 1 if waiting else max(entries, default=0)

    def entry(self, number: int) -> Entry:
        """Return an entry; raise `ObjectNotFound` if it was carried and deleted."""
        return self._read(_key(_ENTRIES, number), Entry)

    def entries(self, numbers: list[int]) -> Iterator[tuple[int, Entry]]:
        """Yield entries that can be read and are still there."""
        for number in numbers:
            with suppress(ObjectNotFound, IntegrityError, UnsupportedFormat):
                yield number, self.entry(number)

    # Notes

    def note(self, number: int) -> Note | None:
        """Return the outcome of an entry; `None` while it waits, or if its note is damaged."""
        with suppress(ObjectNotFound, IntegrityError):
            return self._read(_key(_NOTES, number), Note)
        return None

    def outcome_of(self, write: str, before: int) -> Note | None:
        """Return the outcome of a write's entry, if the entry is before a number and kept."""
        older = [number for number in self.numbers() if number < before]
        for number, entry in self.entries(older[::-1]):
            if entry.write == write:
                return self.note(number)
        return None

    def remove_damaged_notes(self) -> None:
        """Delete the notes that cannot be read; the carrier determines their outcomes again."""
        for number in self.noted():
            try:
                self._read(_key(_NOTES, number), Note)
            except IntegrityError:
                self._files.delete(_key(_NOTES, number))
            except (ObjectNotFound, UnsupportedFormat):
                pass

    def noted(self) -> list[int]:
        """Return the numbers of all notes, ascending."""
        return self._numbers(_NOTES)

    def put_note(self, number: int, note: Note) -> Note:
        """Note an outcome durably; return it, or an earlier note of the entry."""
        key = _key(_NOTES, number)
        if self._with_reserve(lambda: self._put(key, note)):
            return note
        return self._read(key, Note)

    def replace_note(self, number: int, note: Note) -> None:
        """Replace the outcome of an entry that a person has pushed or deleted."""
        data = join_lines([note.encode()])
        self._with_reserve(lambda: self._files.put(_key(_NOTES, number), data))

    def _with_reserve(self, put: Callable[[], _T]) -> _T:
        """Put a note; on a full disk free the reserve for it, since a note frees the states."""
        while True:
            try:
                return put()
            except StoreFull:
                if not self._files.give_up_reserve(_GIVEN):
                    raise

    # States

    def states_path(self, write: str) -> str:
        """Return the folder of the states of an entry."""
        return os.path.join(self.path, _STATES, write)

    def remove_states(self, write: str) -> None:
        """Delete the objects of an entry, and nothing else; no link is followed."""
        with suppress(FileNotFoundError), self._opened_states() as held:
            for path, below, names, fd in os.fwalk(write, topdown=False, dir_fd=held):
                for name in (*names, *below):
                    if _OF_STATES.fullmatch(f"{path}/{name}"):
                        # It fails where something else is in a folder, and at a link to one.
                        with suppress(OSError):
                            (os.rmdir if name in below else os.unlink)(name, dir_fd=fd)
            with suppress(OSError):
                os.rmdir(write, dir_fd=held)

    def remove(self, number: int, write: str) -> None:
        """Delete a noted entry: states, entry, note."""
        self.remove_states(write)
        self.remove_entry(number)
        self._files.delete(_key(_NOTES, number))

    def remove_entry(self, number: int) -> None:
        """Delete the file of a noted entry."""
        self._files.delete(_key(_ENTRIES, number))

    def remove_unacknowledged(self) -> None:
        """Restore lost entries; delete states that none has, unless a save is running."""
        self.restore_entries()
        lock = self.lock("writing")
        if not lock.acquire(wait=False):
            return
        try:
            present, known = self._state_folders(), self._writes()
            if len(known) == len(self.numbers()):  # an unreadable entry may own any of them
                for write in present - known:
                    if not [*self._copies(write)]:  # it was acknowledged
                        self.remove_states(write)
        finally:
            lock.release()

    def _state_folders(self) -> set[str]:
        with suppress(FileNotFoundError), self._opened_states() as held:
            return set(filter(_WRITE.fullmatch, os.listdir(held)))
        return set()

    @contextmanager
    def _opened_states(self) -> Iterator[int]:
        try:
            with folders.opened(self.journal.path, self._states) as held:
                yield held
        except OSError as error:  # of a missing folder it is a `FileNotFoundError` too
            disk.fail(error, f"{self.path}/{_STATES}")

    def size_bytes(self, writes: list[str]) -> int:
        """Return the bytes on the disk of the states of entries; linked files count once."""
        sizes: dict[tuple[int, int], int] = {}
        for write in writes:
            for folder, _, names in os.walk(self.states_path(write)):
                for name in names:
                    with suppress(OSError):  # it was deleted, or the disk fails: it takes no room
                        found = os.lstat(os.path.join(folder, name))
                        sizes[found.st_dev, found.st_ino] = found.st_size
        return sum(sizes.values())

    def waiting_bytes(self) -> int:
        """Return the bytes of the waiting states."""
        return self.size_bytes([entry.write for _, entry in self.entries(self.waiting())])

    def backlog(self) -> Backlog:
        """Count the saves that only this journal holds."""
        numbers = self.waiting()
        waiting = [entry for _, entry in self.entries(numbers)]
        notes = [self.note(number) for number in self.noted()] if self.exists else []
        outcomes = Counter(note.outcome for note in notes if note is not None)
        return Backlog(
            entries=len(numbers),
            size_bytes=self.size_bytes([entry.write for entry in waiting]),
            oldest_ms=waiting[0].time_ms if waiting else None,
            refused=outcomes["refused"],
            stranded=outcomes["stranded"],
            damaged=outcomes["damaged"],
        )

    # A copy of the registry's part, to go on without it

    def keep_copy(self, log: RunLog, store: Store) -> None:
        """Keep the configuration of the registry, and the end of the log as it was read last.

        A copy that cannot be kept is no error, and the one before is deleted: it would be too old.
        """
        try:
            log.keep_copy(self._files)
            keep_registry(self.journal, store)
        except StorageError:
            for info in [*self._files.list(RUNS)]:
                self._files.delete(info.key)

    def open_copy(self, log: RunLog) -> bool:
        """Open a log from the copy; return whether that has everything that training goes on from.

        A takeover of this machine that can be continued, and every save that was carried.
        """
        takeover, carried = self.own_takeover(), max(self.carried(), default=-1)
        if takeover is None or not log.open_copy(self._files):
            return False
        return takeover.slot < log.run.next_slot and carried < log.run.commits

    # Files

    def _numbers(self, prefix: str) -> list[int]:
        names = (info.key.removeprefix(prefix) for info in self._files.list(prefix))
        return [int(name) for name in names if _NUMBER.fullmatch(name)]

    def _sound(self, prefix: str, kind: type[_R]) -> Iterator[_R]:
        for number in self._numbers(prefix):
            with suppress(ObjectNotFound, IntegrityError):
                yield self._read(_key(prefix, number), kind)

    def _put(self, key: str, record: Record) -> bool:
        return self._files.put_if_absent(key, join_lines([record.encode()]))

    def _read(self, key: str, kind: type[_R]) -> _R:
        where = os.path.join(self.path, key)
        line, *_ = split_lines(self._files.get(key), where=where)
        try:
            return kind.decode(line, where=where)
        except Malformed as error:  # the digest fits, so the bytes are as they were written
            raise UnsupportedFormat(
                "a newer Holdfast wrote this file of the journal",
                where=where,
                found=error.found,
                hint="Nothing is lost: it waits for a program of that version, and so do the "
                "saves after it.",
            ) from error


def _key(prefix: str, number: int) -> str:
    return f"{prefix}{number:020d}"


def run_folders(journal: Journal, only: str | None = None) -> Iterator[tuple[str, RunFolder]]:
    """Yield the id of the registry and the journal of each run, by name, or of the runs `only`."""
    for registry_id in filter(_REGISTRY.fullmatch, _listed(journal.path)):
        # Of one run no folder of another user is listed.
        for run_id in [only] if only else _listed(os.path.join(journal.path, registry_id)):
            if os.path.isdir(os.path.join(journal.path, registry_id, run_id, _ENTRIES)):
                yield registry_id, RunFolder(journal, registry_id, run_id)


def _listed(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(f"the journal cannot be read: {error.strerror}", where=path) from error
