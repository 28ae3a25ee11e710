"""Logs that somebody put back and that collections take as they are: what `gc --accept` does.

A mirror or an older backup brings back a log that is not the one that a note has seen. The note
stops every collection until there is one with more slots. Specified in docs/spec.md, section 13.
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
    accepted: dict[str, RunLog] = {}
    for name in sorted(set(names)):
        note, log = notes.by_run.get(name), RunLog(store, name)
        log.read_to(log.length())
        if note is None or not log.run.commits:
            hint = "Accepted is only a run that a collection has read, and that exists again."
            raise NotFound("no such run", where=name, hint=hint)
        try:
            note.check_log(log, log.run.next_slot)
        except RolledBack:
            accepted[name] = log
    epoch = _durable_epoch(epochs) if accepted and not dry_run else 0
    for name, log in accepted.items():
        note = notes.by_run.pop(name)
        if epoch:
            _lengthen(log, note.seen.slots + epoch + _REPACKS, Mark(epoch=epoch))
    return [*accepted]


def _lengthen(log: RunLog, slots: int, mark: Mark) -> None:
    while log.run.next_slot <= slots:
        log.append(lambda _: [mark], caches=False, announces=False)


def _durable_epoch(epochs: Epochs) -> int:
    """Return the newest epoch, for a mark; in a registry without one put an empty sweep."""
    while not epochs.observe():
        epochs.put_sweep(1, (), joins=False)
    epochs.make_durable(newest := epochs.observe())
    return newest
