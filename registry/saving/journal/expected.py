"""The expected run: the run as this machine last read it, followed by the waiting entries.

A save is checked against it before it is acknowledged; a checkpoint that only this machine has is
restored from it. Its commit numbers are provisional: other writers may come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from holdfast.registry.errors import Conflict, IntegrityError, InvalidInput, ObjectNotFound
from holdfast.registry.history import RunLog, decode_plain
from holdfast.registry.history.actions import Action
from holdfast.registry.history.replay import Forgotten, RunManifest
from holdfast.registry.saving.journal.entry_saves import EntryToken, expected_save, require_line
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.log_scan import LogScan
from holdfast.registry.saving.journal.records import Entry, SaveFields
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.store import Store
from holdfast.registry.writing import after_commit


class ExpectedRun:
    """A run with entries that are not in it yet.

    Attributes:
        run: The run after the entries.
        numbers: The commit number of the checkpoint of each write, provisional for entries.
        entries: The entries of checkpoints with their numbers, by provisional commit number.
        last_entries: For each of these checkpoints, the last entry of every stream to which it, or
            one before it that is not in the run yet, appends.
    """

    def __init__(self, run: RunManifest) -> None:
        self.run = run
        self.numbers: dict[str, int] = {}
        self.entries: dict[int, tuple[int, Entry]] = {}
        self.last_entries: dict[int, dict[str, Mapping[str, Any]]] = {}
        self._newest: int | None = None

    def add(self, number: int, entry: Entry, n: int | None, actions: Sequence[Action]) -> None:
        """Add an entry with its actions for this run; `n` is the commit of its checkpoint."""
        if n is not None:
            self.numbers[entry.write] = n
            if n == self.run.commits:
                self.entries[n] = number, entry
        self.run = after_commit(self.run, actions, entry.signature)

    def append(self, n: int, resumed: int | None, fields: SaveFields) -> None:
        """Note the streams to which a checkpoint appends."""
        before = self._newest if resumed is None else resumed
        found = {} if before is None else self.last_entries.get(before, {})
        new = {
            name: decode_plain(entries)[-1] for name, entries in fields.streams.items() if entries
        }
        self._newest, self.last_entries[n] = n, {**found, **new}


def expect(folder: RunFolder, log: RunLog, store: Store) -> ExpectedRun:
    """Return the expected run, by its log as read so far.

    Entries that will be refused, stranded or damaged are skipped.
    """
    try:
        return _expect(folder, log, store, log.run)
    except Forgotten:
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
            yield number, folder.entry(number)


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
    token = EntryToken(run.run_id, None)
    token.continue_from(resumed, fields.keeps)
    save = expected_save(states, token, entry, fields, run)
    save.check(run)
    actions = save.actions(run)
    expected.add(number, entry, save.outcome, actions)
    if save.outcome == run.commits:  # not a save that repeats a checkpoint
        expected.append(save.outcome, resumed, fields)
