"""The end of a log: the slots that a handle read last, and the head that this machine has seen.

A log can lose its newest slots, be set back to an older copy, or be replaced by the log of another
registry. A commit after such a change would be in no log, or after a gap (W4 of docs/spec.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.registry.errors import NotFound, ObjectNotFound, RolledBack
from holdfast.registry.history.replay import RunManifest, Slot, link_after
from holdfast.registry.objects import CONFIG, slot_key
from holdfast.registry.store import Store, read_config
from holdfast.registry.values import Digest


@dataclass(slots=True)
class Tail:
    """The newest slots that were read."""

    newest: Digest | None = None  # digest of the newest one
    slot: Slot | None = None  # the newest one
    committed: int | None = None  # the newest one that holds a commit
    committed_digest: Digest | None = None  # digest of that one
    #: Digest of the last commit of the seen head, once a slot has given it.
    link: Digest | None = None

    def take(self, slot: Slot, seen_commits: int) -> None:
        """Note a further slot; `seen_commits` is the number of commits of the seen head."""
        self.newest, self.slot = Digest.of(slot.data), slot
        if slot.commits:
            self.committed, self.committed_digest = slot.number, self.newest
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
        self._is_checked = self.head is None

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
        self._is_checked = True
        self.note(run, tail)

    def note(self, run: RunManifest, tail: Tail) -> None:
        """Remember the head of the log, if the log was checked against the seen head."""
        if self._heads is not None and run.head is not None and self._is_checked:
            self._heads.note(self._run_id, run.next_slot, run.commits, run.head, tail.committed)


class Look(NamedTuple):
    """A running check of the newest slot that was read."""

    next_slot: int  # the slot after that one
    outcome: Future[None]  # its result: an error unless the slot is unchanged


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
