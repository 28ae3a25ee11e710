"""Notes of collectors: how far each log went, and what the run held, when it was last replayed.

A note shortens the next replay: only later slots and new placements are read. It also proves on any
machine that the log of a run was there. Notes are joined into tables, which are put if absent and
never changed or deleted. Only a collector makes them, from its own replay and never from a
snapshot. A table that cannot be used costs time. Specified in docs/spec.md, section 13.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IntegrityError, Malformed, ObjectNotFound, RolledBack
from holdfast.registry.history import (
    REPLAY_VERSION,
    CommitSlot,
    RunLog,
    Seen,
    TableHeader,
    newer_notes,
    note_sizes,
    read_table,
)
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.objects import LAST, RUNS, ObjectKey, note_key, wrap_frame
from holdfast.registry.store import Store, together
from holdfast.registry.upkeep.shelf import Shelf
from holdfast.registry.values import Digest, Record

#: A table is not longer than this, unless a single note is.
_TABLE_BYTES = 8 * 2**20
#: A table is joined to newer ones that have at least this share of its bytes.
_JOINED_FROM = 0.5
#: One collection in this number reads everything, and compares it with the notes.
_FULL_EVERY = 30
#: A note is made again after this number of slots without a commit.
_SLOTS_APART = 16
#: The most bytes of a note: a longer one would cost more than it saves.
_NOTE_BYTES = 64 * 2**20
#: The longest grace that a note tells.
_LONGEST_S = 2**53
_PLACED = re.compile(rb'"(placements/[^"]+)":')
_LOGGER = logging.getLogger("holdfast")


class Held(Record):
    """The second line of a note: the run before a slot, and the packs of its placements."""

    run: RunManifest  # compact
    packs: dict[str, tuple[str, ...]]  # by the key of the placement
    author: str | None = None  # who put commit 0


@dataclass(frozen=True, slots=True)
class RunNote:
    """A note of one run."""

    seen: Seen
    where: str  # the key of its table
    shelf: Shelf[bytes] | None  # has its second line, if this version of the replay made it

    @property
    def held(self) -> bytes:
        """Its second line; empty if this version of the replay did not make it."""
        return b"" if self.shelf is None else self.shelf.get(self.seen.run) or b""

    @property
    def settled(self) -> int:
        """The slot before which a replay can begin; 0 if it has to begin with the first one."""
        return 0 if self.shelf is None else self.seen.settled

    def is_sealed(self, grace_s: float) -> bool:
        """Return whether it stands for its run in a collection with this grace."""
        is_seal = self.shelf is not None and self.seen.sealed is not None
        graced_s = self.seen.grace_s if is_seal else None
        return graced_s is not None and grace_s <= graced_s

    def replay(self) -> tuple[RunManifest, dict[ObjectKey, tuple[ObjectKey, ...]], str | None]:
        """Return the run before `settled`, the packs of its placements, and who put commit 0."""
        held = Held.decode(self.held, where=self.where)
        if (held.run.run_id, held.run.next_slot) != (self.seen.run, self.settled):
            raise Malformed("a note of another run or slot", where=self.where)
        parse = ObjectKey.parse
        packs = {parse(key): tuple(map(parse, of)) for key, of in held.packs.items()}
        return held.run, packs, held.author

    def placements(self) -> Iterator[bytes]:
        """Yield the records of the placements of which it names the packs."""
        for found in _PLACED.finditer(self.held):
            with suppress(Malformed):
                yield ObjectKey.parse(found[1].decode()).record

    def check(self, slots: int, digest: Digest | None) -> None:
        """Raise if a log is shorter than it was, or another one at the slot of the note."""
        if slots < self.seen.slots or digest != self.seen.digest:
            raise self.lost(f"{slots} slots" if slots < self.seen.slots else "another log")

    def check_log(self, log: RunLog, slots: int) -> Slot:
        """Return the commit that the note names in a log; raise if it is another log."""
        commit = next(log.fetch([self.seen.slot])) if self.seen.slot < slots else None
        self.check(slots, None if commit is None else Digest.of(commit.data))
        assert commit is not None  # its digest was compared
        return commit

    def lost(self, found: str) -> RolledBack:
        """Return the error of a run whose log was lost since."""
        seen = self.seen
        return RolledBack(
            "the log of a run is not the one that a collection has read",
            where=f"{RUNS}{seen.run}/",
            expected=f"at least {seen.slots} slots, and slot {seen.slot} with digest "
            f"{seen.digest.short}, by {self.where}",
            found=found,
            hint="Somebody deleted or replaced it: restore it from a backup of this store. Without "
            "one, `holdfast trust` and `holdfast sync MIRROR REGISTRY` bring the run back from a "
            f"mirror; then `holdfast gc --accept {quoted(seen.run)}` takes its log as it is.",
        )


@dataclass(frozen=True, slots=True)
class _Table:
    number: int
    first: int
    size_bytes: int  # of its content


@dataclass(slots=True)
class Notes:
    """The notes of a registry."""

    #: The note of each run that counts: the one that knows most of its slots.
    by_run: dict[str, RunNote] = field(default_factory=dict)
    newest: int = 0  # the number of the newest table; 0 without one
    since_full: int = 0  # collections that put notes since the last one that read everything
    damaged: dict[str, str] = field(default_factory=dict)  # the tables that cannot be read, by key
    #: Whether no table is lost or cannot be read: the newest note of each run is known.
    is_whole: bool = True
    _tables: list[_Table] = field(default_factory=list)  # newest first
    _held: Shelf[bytes] = field(default_factory=Shelf)  # the second lines of notes, by run

    @classmethod
    def read(cls, store: Store) -> Notes:
        """Read the notes; before the runs are listed, so that the listing has all that they name.

        The newest table says which older ones it replaces. If it cannot be read, those are.
        """
        notes, needed = cls(), LAST
        for number in sorted(note_sizes(store), reverse=True):
            notes.newest = notes.newest or number
            if number > needed:
                continue
            notes.is_whole &= number == needed or notes.newest == number
            try:
                header, lines, size_bytes = read_table(store, number)
            except (IntegrityError, ObjectNotFound) as error:
                _LOGGER.warning("a note of a collection is not used: %s", error)
                notes.damaged[note_key(number)] = str(error)
                continue
            needed = min(needed, header.first - 1)
            notes.is_whole &= header.registry == store.config.id
            if header.registry == store.config.id:
                if not notes._tables:
                    notes.since_full = header.since_full
                notes._tables.append(_Table(number, header.first, size_bytes))
                notes._take(header, lines, note_key(number))
        notes.is_whole &= needed in (0, LAST)
        return notes

    def newer(self, store: Store) -> set[str] | None:
        """Return the runs of which a newer note was put since; `None` if that cannot be told."""
        slots = newer_notes(store, note_sizes(store), self.newest)
        if slots is None:
            return None
        known = {run_id: note.seen.slots for run_id, note in self.by_run.items()}
        return {run_id for run_id, number in slots.items() if number > known.get(run_id, 0)}

    def _take(self, header: TableHeader, lines: list[bytes], where: str) -> None:
        for first, second in zip(lines[::2], lines[1::2], strict=True):
            seen = Seen.decode(first, where=where)
            known = self.by_run.get(seen.run)
            if known is None or known.seen.slots < seen.slots:
                is_held = header.replay == REPLAY_VERSION and bool(second)
                if is_held:
                    self._held[seen.run] = second
                self.by_run[seen.run] = RunNote(seen, where, self._held if is_held else None)

    @property
    def is_full_due(self) -> bool:
        """Whether it is time to read everything, and to compare it with the notes."""
        return self.since_full + 1 >= _FULL_EVERY

    def put(self, store: Store, notes: Iterable[tuple[Seen, bytes]], *, full: bool) -> None:
        """Put new notes, in tables that also have the notes of smaller tables before them.

        `full` says whether everything was read for them.
        """
        first_of_all, told = True, full and self.since_full > 0
        self.since_full = 0 if full or not self._tables else self.since_full + 1
        for some in _parts(notes, also_empty=told):
            first, lines = self.newest + 1, dict(some)
            if first_of_all:
                first = self._join(lines)
            first_of_all = False
            self.newest += 1
            while not self._has_put(store, self.newest, first, lines):
                # Another collector was faster: its table stays, and this one replaces none.
                self.newest = max([self.newest, *note_sizes(store)]) + 1
                first, lines = self.newest, dict(some)

    def _join(self, lines: dict[str, bytes]) -> int:
        """Add the notes of the newest tables, up to a larger one; return the first of them."""
        first, size_bytes = self.newest + 1, sum(map(len, lines.values()))
        joined = set()
        for table in self._tables:
            grown = size_bytes + table.size_bytes
            small = table.size_bytes * _JOINED_FROM <= size_bytes and grown <= _TABLE_BYTES
            if table.number != first - 1 or not small:
                break
            first, size_bytes = table.first, grown
            joined.add(note_key(table.number))
        for run_id, note in self.by_run.items():
            if note.where in joined and run_id not in lines:
                lines[run_id] = _lines(note.seen, note.held)
        return first

    def _has_put(self, store: Store, number: int, first: int, lines: Mapping[str, bytes]) -> bool:
        seals = any(b'"sealed":' in line.partition(b"\n")[0] for line in lines.values())
        header = TableHeader(
            format="holdfast.notes/2" if seals else "holdfast.notes/1",
            registry=store.config.id,
            replay=REPLAY_VERSION,
            first=first,
            since_full=self.since_full,
        )
        content = b"\n".join((header.encode(), *lines.values()))
        return store.backend.put_if_absent(note_key(number), wrap_frame(content))


def _lines(seen: Seen, held: bytes) -> bytes:
    return seen.encode() + b"\n" + held


def _parts(
    notes: Iterable[tuple[Seen, bytes]], *, also_empty: bool
) -> Iterator[list[tuple[str, bytes]]]:
    """Yield notes, as many together as fit into a table."""
    for some in together(notes, lambda one: len(one[1]), _TABLE_BYTES):
        yield [(seen.run, _lines(seen, held)) for seen, held in some]
        also_empty = False
    if also_empty:
        yield []


def of_seal(seen: Seen, slots: int, slot: int, grace_s: float) -> Seen:
    """Return the first line of a note for a run that was sealed since in this slot."""
    graced_s = min(math.floor(grace_s), _LONGEST_S)
    return seen.changed(slots=slots, sealed=slot, grace_s=graced_s)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A run as a collection has replayed it."""

    log: RunLog
    slots: int  # how many slots the log had
    newest: CommitSlot  # the newest one with a commit
    #: The run before the slots within the grace: they may be within a later collection's, too.
    settled: RunManifest

    def note(self, packs: Mapping[ObjectKey, Collection[ObjectKey]]) -> tuple[Seen, bytes]:
        """Return the two lines of a note; `packs` are those of its placements."""
        named = {str(key): tuple(map(str, of)) for key, of in packs.items()}
        held = Held.unchecked(run=self.settled, packs=named, author=self.log.tail.author).encode()
        is_short = self.settled.next_slot > 0 and len(held) <= _NOTE_BYTES
        seen = Seen(
            run=self.log.run_id,
            slots=self.slots,
            slot=self.newest.number,
            digest=self.newest.digest,
            settled=self.settled.next_slot if is_short else 0,
        )
        return seen, held if is_short else b""

    def is_due(self, note: RunNote | None, start: RunManifest | None) -> bool:
        """Return whether the run has changed enough since its note for another one.

        `start` is the run of that note, if the replay began with it.
        """
        if note is None or self.newest.number > note.seen.slot:
            return True
        if start is not None and self.settled.places != start.places:  # after a repack
            return True
        settled = self.settled.next_slot
        begins = note.settled < note.seen.slots <= settled
        return begins or settled >= note.settled + _SLOTS_APART
