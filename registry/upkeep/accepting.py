"""Logs that somebody put back and that collections take as they are: what `gc --accept` does.

A mirror or an older backup brings back a log that is not the one that a note has seen, or that
ends before the snapshots of the lost one. Either stops every collection. Specified in docs/spec.md,
section 13.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.registry.errors import NotFound, RolledBack
from holdfast.registry.history import Epochs, RunLog
from holdfast.registry.history.actions import Mark
from holdfast.registry.store import Store
from holdfast.registry.upkeep.run_notes import Notes

#: More slots of repacks than a lost log had behind its last note.
_REPACKS = 16


def accept_logs(
    store: Store, epochs: Epochs, notes: Notes, names: Iterable[str], *, dry_run: bool
) -> list[str]:
    """Let logs count as they are, and drop their notes from `notes`; return those that differed.

    Marks are added until each log is longer than its note has seen: the next note then counts.
    And longer than the lost log was: a note need not tell the marks and repacks behind a seal.
    """
    accepted: list[str] = []
    others: dict[str, RunLog] = {}  # those that are not the ones of their notes
    for name in sorted(set(names)):
        note, log = notes.by_run.get(name), RunLog(store, name)
        newest = max(log.snapshots.listed(), default=-1)  # before the log, which then has its slot
        log.read_to(log.length())
        is_cut = newest >= log.run.next_slot
        if not log.run.commits or not (note or is_cut):
            hint = "Accepted is only a run that a collection has read, and that exists again."
            raise NotFound("no such run", where=name, hint=hint)
        try:
            if note is not None:
                note.check_log(log, log.run.next_slot)
        except RolledBack:
            others[name] = log
        if is_cut or name in others:
            accepted.append(name)
    epoch = _durable_epoch(epochs) if others and not dry_run else 0
    for name in accepted:
        note = notes.by_run.pop(name, None)
        if epoch and note is not None and name in others:
            _lengthen(others[name], note.seen.slots + epoch + _REPACKS, Mark(epoch=epoch))
    return accepted


def _lengthen(log: RunLog, slots: int, mark: Mark) -> None:
    while log.run.next_slot <= slots:
        log.append(lambda _: [mark], caches=False, announces=False)


def _durable_epoch(epochs: Epochs) -> int:
    """Return the newest epoch, for a mark; in a registry without one put an empty sweep."""
    while not epochs.observe():
        epochs.put_sweep(1, (), joins=False)
    epochs.make_durable(newest := epochs.observe())
    return newest
