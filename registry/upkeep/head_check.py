"""Check the logs that a verification reads against heads and notes of earlier readings.

This machine remembers some heads; others are in a file that an auditor keeps. Commits are the same
in every registry, so the file of a registry also works for its mirrors. The notes of collectors lie
in the registry, for every machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IntegrityError, InvalidInput, Malformed, RolledBack
from holdfast.registry.objects import ACTIVE, parse_marker
from holdfast.registry.store import Store
from holdfast.registry.store.heads import MAX_FILE_BYTES, Head, HeadLines, Heads, HeadsFile
from holdfast.registry.upkeep.findings import Finding, Vouched
from holdfast.registry.upkeep.histories import History
from holdfast.registry.upkeep.live import given_up
from holdfast.registry.upkeep.run_notes import Notes, RunNote
from holdfast.registry.upkeep.signature_check import SignatureCheck

_FULL = (
    "Collections take the run for finished, and may delete what this commit needs: run `holdfast "
    "gc --full` before any other. The marker was lost, as in a copy of a store that was in use."
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The heads of one source."""

    source: str  # the name of the source, for messages
    heads: Mapping[str, Head]
    epoch: int  # the highest epoch
    advice: str  # what to do if the registry differs from the heads
    is_of_this: bool  # whether they are heads of this registry and not of a mirror


class HeadCheck:
    """Heads that a verification expects, and signatures of them if the reader gives keys."""

    def __init__(
        self,
        store: Store,
        path: str | os.PathLike[str] | None = None,
        signatures: SignatureCheck | None = None,
    ) -> None:
        self._store = store
        self._signatures = signatures
        self._seen = list(_remembered(store.heads))
        if path is not None:
            file = read_heads(path)
            advice = (
                f"The registry differs from {os.fspath(path)}: find out who changed it, and "
                "restore the log from a backup. If the change was intended, write the file again."
            )
            is_of_this = file.registry == store.config.id
            seen = _Seen(os.fspath(path), file.heads, file.epoch, advice, is_of_this)
            self._seen.append(seen)
        self._heads: dict[str, Head] = {}

    @property
    def vouched(self) -> Sequence[Vouched]:
        """Who vouches for which commits of each run that was checked."""
        return () if self._signatures is None else self._signatures.vouched

    def commits_of(self, run_id: str) -> frozenset[int]:
        """Return the numbers of commits after which the link of a run is needed."""
        heads = (seen.heads.get(run_id) for seen in self._seen)
        signed = self._signatures.commits_of(run_id) if self._signatures else frozenset[int]()
        return signed.union(head.commits for head in heads if head is not None)

    def check(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each source whose head the run does not continue."""
        run_id, head = history.run_id, history.head
        if self._signatures is not None:
            self._signatures.take(history)
        findings = [
            Finding("head", run_id, message, (run_id,), seen.advice)
            for seen in self._seen
            if (message := _difference(history, seen)) is not None
        ]
        yield from findings
        if head is None or findings:
            return
        self._heads[run_id] = head
        if self._store.heads is not None and not history.findings:
            self._store.heads.note(run_id, head.slots, head.commits, head.head, head.slot)

    def check_registry(self, run_ids: Iterable[str], epoch: int) -> Iterator[Finding]:
        """Yield runs that are gone, a log of epochs that is too short, and what is not signed."""
        if self._signatures is not None:
            yield from self._signatures.check()
        there = set(run_ids)
        for seen in self._seen:
            for run_id in sorted(seen.heads.keys() - there):
                commits = seen.heads[run_id].commits
                message = f"the run is gone; {seen.source} has seen {commits} commits of it"
                yield Finding("head", run_id, message, (run_id,), seen.advice)
            if seen.is_of_this and epoch < seen.epoch:
                message = (
                    f"the log of epochs ends at {epoch}; {seen.source} has seen epoch {seen.epoch}"
                )
                advice = f"Let nobody write. {seen.advice}"
                yield Finding("epoch", "epochs/", message, advice=advice)

    def write(self, path: str | os.PathLike[str], epoch: int) -> None:
        """Write the heads of the runs that were checked to a file."""
        target, heads = Path(path), HeadLines()
        for _, head in sorted(self._heads.items()):
            heads.add(head)
        file = HeadsFile(self._store.config.id, self._store.backend.url, epoch, heads)
        staged = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            staged.write_bytes(file.encode())
            staged.replace(target)
        except OSError as error:
            with suppress(OSError):
                staged.unlink()
            raise InvalidInput(
                "the file of heads cannot be written", where=target, found=error.strerror or error
            ) from error


class NoteCheck:
    """The notes of collectors; made before the runs are listed."""

    def __init__(self, store: Store) -> None:
        self._notes = Notes.read(store)
        #: The runs that an operator gave up: their notes count no more, and what is wrong with
        #: those that collections pass over is known.
        self.forgotten = given_up(store)
        self._store = store
        self._behind: dict[str, int] = {}  # the newest slot with a commit, where a seal is older

    def slot_of(self, run_id: str) -> int | None:
        """Return the slot of a run whose digest a note has."""
        note = self._notes.by_run.get(run_id)
        return None if note is None else note.seen.slot

    def check(self, history: History) -> Iterator[Finding]:
        """Yield a finding if the log of a run is not the one that a collection has read."""
        note = self._notes.by_run.get(history.run_id)
        if note is None or history.run_id in self.forgotten:
            return
        slot = None if history.head is None else history.head.slot
        if slot is not None and _seals_before(note, slot):
            self._behind[history.run_id] = slot
        try:
            note.check(history.slots, history.digest)
        except RolledBack as error:
            yield _lost(error, history.run_id)

    def check_registry(self, run_ids: Iterable[str]) -> Iterator[Finding]:
        """Yield runs that are gone, and tables of notes that cannot be read."""
        gone = self._notes.by_run.keys() - set(run_ids) - set(self.forgotten)
        for run_id in sorted(gone):
            yield _lost(self._notes.by_run[run_id].lost("no such run"), run_id)
        yield from self._unannounced()
        for key, message in self._notes.damaged.items():
            advice = "Collections read the runs of this table from their first slots again."
            yield Finding("notes", key, message, advice=advice, severity="note")

    def _unannounced(self) -> Iterator[Finding]:
        """Yield runs that collections take for finished, although commits follow their seals.

        A marker is there before such a commit, and until a newer note is.
        """
        for info in self._store.backend.list(ACTIVE) if self._behind else ():
            with suppress(Malformed):  # `file_names` reports it
                self._behind.pop(parse_marker(info.key)[0], None)
        newer = Notes.read(self._store).by_run if self._behind else {}
        for run_id, slot in sorted(self._behind.items()):
            if run_id in newer and _seals_before(newer[run_id], slot):
                message = f"no marker says that slot {slot} follows the seal of the run"
                yield Finding("notes", run_id, message, (run_id,), _FULL)


def _seals_before(note: RunNote, slot: int) -> bool:
    return note.seen.sealed is not None and note.seen.sealed < slot


def _lost(error: RolledBack, run_id: str) -> Finding:
    message = f"{error.what}: expected {error.expected}, found {error.found}"
    advice = (
        f"Nothing is collected before. {error.hint} If nothing can mend it: `holdfast gc --forget "
        f"{quoted(run_id)}`."
    )
    return Finding("head", run_id, message, (run_id,), advice)


def read_heads(path: str | os.PathLike[str]) -> HeadsFile:
    """Read an auditor's file."""
    where = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            "the file of heads cannot be read", where=where, found=error.strerror or error
        ) from error
    try:
        if len(data) > MAX_FILE_BYTES:
            raise InvalidInput("longer than a file of heads may be", where=where)
        return HeadsFile.decode(data, where=where)
    except IntegrityError as error:
        raise InvalidInput(
            "not a file of heads, or changed since it was written",
            where=where,
            found=error.what,
            hint="`holdfast verify --write-heads FILE` writes one.",
        ) from error


def _remembered(heads: Heads | None) -> Iterator[_Seen]:
    if heads is not None:
        advice = (
            "Find out who changed the registry, and restore the log from a backup. If the change "
            f"was intended, run `holdfast trust {heads.url}`."
        )
        yield _Seen("this machine", heads.all(), heads.epoch, advice, is_of_this=True)


def _difference(history: History, seen: _Seen) -> str | None:
    """Say how a log differs from a head; `None` if it continues from the head."""
    expected = seen.heads.get(history.run_id)
    if expected is None:
        return None
    if history.commits < expected.commits:
        return (
            f"the log has {history.commits} commits; {seen.source} has seen {expected.commits}: "
            "its end is gone"
        )
    if history.links.get(expected.commits) != expected.head:
        return f"commit {expected.commits - 1} is not the one that {seen.source} has seen"
    if seen.is_of_this and history.slots < expected.slots:
        return (
            f"the log has {history.slots} slots; {seen.source} has seen {expected.slots}: "
            "its end is gone"
        )
    return None
