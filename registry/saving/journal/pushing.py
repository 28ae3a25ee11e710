"""Push saves that never entered their run into a fork of the run; list and delete such saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.registry.errors import (
    Conflict,
    Hint,
    IntegrityError,
    NotFound,
    ObjectNotFound,
    UnsupportedFormat,
)
from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import AddCheckpoint
from holdfast.registry.saving.journal.entry_saves import LogScan, PushedSave
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import Entry, Note
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.writing import Committer

#: Outcomes of saves that never enter their run.
OUTSIDE = ("stranded", "refused", "damaged")


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of a journal."""

    number: int
    entry: Entry | None  # the entry; `None` if its file is damaged, or of a newer version
    outcome: str  # its outcome, or `waiting`
    reason: str | None  # why it is not in its run
    size_bytes: int  # bytes of its states on the disk


def listed(folder: RunFolder, *, kept: bool = False) -> Iterator[Listed]:
    """Yield the entries that the registry lacks; with `kept` also carried entries kept here."""
    for number in folder.numbers() if folder.exists else []:
        note = folder.note(number)
        if note is not None and note.outcome not in OUTSIDE + ("carried",) * kept:
            continue
        try:
            entry: Entry | None = folder.entry(number)
        except (IntegrityError, UnsupportedFormat):
            entry = None
        except ObjectNotFound:
            continue  # it was carried meanwhile
        size = 0 if entry is None else folder.size_bytes([entry.write])
        outcome = "waiting" if note is None else note.outcome
        yield Listed(number, entry, outcome, None if note is None else note.reason, size)


def fork_point(log: RunLog, folder: RunFolder, entry: Entry) -> int | None:
    """Return the number of the last checkpoint before the foreign takeover that strands an entry.

    Without such a takeover it is the last checkpoint of the log; `None` if there is none. What was
    evicted or thinned since is passed over: no fork can begin there.
    """
    scan = LogScan(log, entry.search_from, folder.ids())
    scan.read_to(log.run)
    foreign = scan.foreign(scan.takeover_of(folder, entry))
    end = next((slot for slot, _, _ in foreign), log.run.next_slot)
    commits = (commit for slot in log.fetch(range(end)) for _, commit in slot.commits)
    added = (one.n for one in commits if any(isinstance(a, AddCheckpoint) for a in one.actions))
    kept = (one for one in map(log.run.by_n.get, added) if one and one.evicted is None)
    return max((one.n for one in kept if log.run.holds_whole(one.manifest)), default=None)


def rescue(committer: Committer, folder: RunFolder) -> list[Listed]:
    """Commit every save that a journal has for a lost registry to a run of another registry.

    The waiting saves then never enter their own run.
    """
    lock = folder.lock("carrying")
    if not lock.acquire(wait=False):
        raise Conflict(
            "a program is carrying these saves now",
            where=folder.path,
            hint="End it first. If it succeeds, its registry is not lost.",
        )
    try:
        folder.restore_entries()
        found = [one for one in listed(folder, kept=True) if one.outcome != "damaged"]
        return push(committer, folder, found)
    finally:
        lock.release()


def push(
    committer: Committer, folder: RunFolder, found: Iterable[Listed] | None = None
) -> list[Listed]:
    """Commit saves of a journal, by default the stranded and refused ones, to another run.

    Saves that the run already has are skipped, so an interrupted push can be repeated. A damaged
    one is an error once the others are pushed.
    """
    pushed: list[Listed] = []
    damage: IntegrityError | ObjectNotFound | None = None
    outside = (one for one in list(listed(folder)) if one.outcome in ("stranded", "refused"))
    for one in outside if found is None else found:
        if one.entry is None:
            continue
        if one.entry.save is not None and one.size_bytes:
            states = EntryStates(folder, one.entry.write, committer.store)
            try:
                states.check_whole(one.entry.places)
            except (IntegrityError, ObjectNotFound) as error:
                damage = damage or error
                if one.outcome == "waiting":  # it never enters its own run either
                    folder.replace_note(one.number, Note(outcome="damaged", reason=str(error)))
                continue
            committer.commit(PushedSave(committer.writer, one.entry.save, states))
            pushed.append(one)
        folder.replace_note(
            one.number,
            Note(
                outcome="pushed",
                reason=f"into the run {committer.log.run_id} of {committer.store.backend.url}",
            ),
        )
        folder.remove_states(one.entry.write)
    if damage is not None:
        damage.hints = Hint.of(f"{len(pushed)} other saves were pushed.", damage.hints)
        raise damage
    return pushed


def delete(folder: RunFolder, number: int) -> Listed:
    """Delete the bytes of a save that never enters its run."""
    for one in listed(folder):
        if one.number != number:
            continue
        if one.outcome == "waiting":
            raise Conflict(
                "this save waits to be carried",
                where=f"{folder.run_id}: entry {number}",
                hint="`holdfast journal push` adds it to its run.",
            )
        if one.entry is not None:
            folder.remove_states(one.entry.write)
        folder.replace_note(number, Note(outcome="deleted", reason=one.reason))
        if one.outcome == "damaged":  # the entries after it are carried, and must not find it
            folder.remove_entry(number)
        return one
    raise NotFound(
        "no such save in the journal",
        where=f"{folder.run_id}: entry {number}",
        hint="`holdfast journal ls` lists them.",
    )
