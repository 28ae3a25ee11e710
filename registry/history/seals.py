"""Seals as readers see them: whether the logs of sealed runs can have grown, for all runs at once.

Before a commit behind a seal a writer puts a marker, and a collector notes a newer seal before it
removes that marker. So the markers, and then the newer notes, show every run that may have changed.
A run that nobody has changed can also be shown as its note tells it, without reading its log.
`holdfast.registry.upkeep` puts seals and notes. Specified in docs/spec.md, sections 13 and 35.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

from holdfast.registry.errors import AccessDenied, IntegrityError, Malformed, ObjectNotFound
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import PartedRun, RecentRun, RunManifest, Slot, advance
from holdfast.registry.history.slots import End, LogEnd, Look, still_ends
from holdfast.registry.history.snapshots import REPLAY_VERSION, is_coherent
from holdfast.registry.objects import (
    ACTIVE,
    LAST,
    NOTES,
    note_key,
    parse_marker,
    parse_number,
    unwrap_frame,
)
from holdfast.registry.store import Store
from holdfast.registry.values import DigestField, Field, Record, canonical

#: Of so few runs each log is asked: the listings would take as many requests.
_FEW = 3
#: The bytes of notes that are read, at most, for each run that would have to be opened otherwise.
_BYTES_FOR_A_RUN = 64 * 2**10

_T = TypeVar("_T")


class TableHeader(Record):
    """The first line of a table."""

    #: Version 2 has notes of seals; programs that do not know them do not read its tables.
    format: Literal["holdfast.notes/1", "holdfast.notes/2"] = "holdfast.notes/1"
    registry: str  # the id of the registry
    replay: int  # the version of the replay that made what its notes say of runs
    first: Annotated[int, Field(ge=1)]  # it has the notes of all tables from this one on
    #: Collections that put notes since the last one that read everything.
    since_full: Annotated[int, Field(ge=0)]


class Seen(Record):
    """The first line of a note: how far the log of a run went."""

    run: str
    slots: Annotated[int, Field(ge=1)]  # number of its slots
    slot: Annotated[int, Field(ge=0)]  # the newest one with a commit
    digest: DigestField  # digest of that slot; the commits before it are chained to it
    #: The slot before which the run held what the second line says; 0 where there is nothing.
    settled: Annotated[int, Field(ge=0)]
    #: The slot with its newest seal, if nothing but marks and that seal follows what was replayed.
    sealed: Annotated[int, Field(ge=0)] | None = None
    grace_s: Annotated[int, Field(ge=0)] | None = None  # that of the collection that sealed it


class NotedLog(RunLog):
    """A sealed run as its note shows it; whatever goes on from it opens the log first."""

    def __init__(self, store: Store, seen: Seen, held: bytes, notes: int) -> None:
        """Take it from the two lines of a note; `notes` is the newest table that was listed."""
        super().__init__(store, seen.run)
        self._end: LogEnd | None = LogEnd.unchecked(
            run=seen.run, slots=seen.slots, size_bytes=0, sealed=seen.sealed, notes=notes
        )
        # No text has these bytes: in one, a quotation mark is escaped. Nor has a dict with keys of
        # users, whose values are no lists, true or false.
        self._run = held[held.index(b',"run":') + len(b',"run":') : -1]
        if held.startswith(start := b'{"author":'):
            author = held[len(start) : held.index(b',"packs":')]
            self.tail.author = str(canonical.parse(author, where=seen.run))
        self.run = self._parsed()
        if (self.run.run_id, self.run.next_slot) != (seen.run, seen.settled):
            raise Malformed("a note of another run or slot", where=seen.run)
        head, commits = self.seen.head, (self.run.commits, self.run.head)
        if head and ((head.commits, head.head) != commits or head.slots > seen.slots):
            raise Malformed("a note of other commits than this machine has seen", where=seen.run)

    def _parsed(self) -> RunManifest:
        """Return the run of the note; its checkpoints and places follow when they are needed."""
        line, end = self._run, self._run.index(b'],"commits":')
        kept = sum(line.count(b'"superseded":%b' % one, 0, end) for one in (b"false", b"true"))
        if kept:
            at = line.rindex(b'"places":[')
            line = b"{" + line[end + 2 : at] + line[line.index(b'],"pool":', at) + 2 :]
        fields = canonical.parse(line, where=self.run_id)
        if not isinstance(fields, dict):
            raise Malformed("a note without a run", where=self.run_id)
        found = RecentRun.of(fields | {"floor": LAST, "older": kept, "parts": []})
        if not is_coherent(found):
            raise Malformed("a note that contradicts itself", where=self.run_id)
        return PartedRun.of_snapshot(found, self._whole) if kept else RunManifest.of(fields)

    def _whole(self, _: RecentRun, slots: Sequence[Slot], after: RecentRun) -> RunManifest:
        """Return the run with all records; if the note does not have them as it should, the log."""
        with suppress(IntegrityError, ValueError):
            whole = RunManifest.parse(self._run, where=self.run_id)
            if is_coherent(whole):
                return advance(whole, slots)
        return self._replayed(after, RunManifest.empty(self.run_id)).compact()

    def end(self, notes: int | None) -> LogEnd | None:
        """Return how the log ended."""
        return self._end or super().end(notes)

    def open(self, *, check_head: bool = True) -> RunManifest:
        """Read the log itself."""
        end, self._end = self._end, None
        try:
            return super().open(check_head=check_head)
        except BaseException:
            self._end = end
            raise

    def refresh(self) -> RunManifest:
        """Read the log itself to the head."""
        return self.open() if self._end else super().refresh()

    def look(self) -> Look:
        """Start a check of the newest slot, once the log itself was read."""
        if self._end:
            self.open()
        return super().look()


class Seals:
    """The seals of a registry, listed before logs are read.

    Attributes:
        newest: The newest table of notes; `None` if it was not listed.
    """

    def __init__(self, store: Store, ends: Iterable[LogEnd], runs: int, unknown: int = 0) -> None:
        """List markers and notes, unless only few runs are asked for.

        Of `runs` runs those in `ends` ended so when they were read, and `unknown` were never read.
        """
        self._store = store
        self.newest: int | None = None
        self._announced: set[str] | None = None
        self._noted: Mapping[str, int] | None = None
        self._sizes: Mapping[int, int] = {}
        if runs > _FEW:
            since = [one.notes for one in ends if one.sealed is not None and one.notes is not None]
            with suppress(AccessDenied):  # then each log is asked
                # The markers first: a newer note stands before a marker is removed.
                if since or unknown > _FEW:
                    self._announced = self._list_markers()
                self._sizes = note_sizes(store)
                self.newest = max(self._sizes, default=0)
                if since:
                    self._noted = newer_notes(store, self._sizes, min(since))

    def still(self, ends: Sequence[End]) -> list[End | None]:
        """Return how these logs end now; `None` where a commit may have been added, or lost.

        The logs of the runs that are not sealed are asked, one listing each.
        """
        found: dict[str, End | None] = {**self.quiet(ends)}
        asked = [one for one in ends if one.run not in found]
        for one, end in zip(asked, self._store.pools.small.map(self._ask, asked), strict=True):
            found[one.run] = end
        return [found[one.run] for one in ends]

    def quiet(self, ends: Iterable[End]) -> dict[str, End]:
        """Return how the logs of runs end to which nobody can have committed, by run."""
        return {one.run: one.changed(notes=self.newest) for one in ends if self._is_quiet(one)}

    def is_announced(self, name: str) -> bool:
        """Return whether a marker says that somebody may have committed to a sealed run."""
        return self._announced is not None and name in self._announced

    def noted(self, names: Collection[str], make: Callable[[NotedLog], _T]) -> dict[str, _T]:
        """Return what `make` makes of the runs that nobody has changed since they were noted.

        The tables are read one by one. Runs without a result have to be opened.
        """
        if self._announced is None or not self.newest or len(names) <= _FEW:
            return {}
        wanted, most_bytes = {*names} - self._announced, len(names) * _BYTES_FOR_A_RUN
        slots, found, first_of_all = dict[str, int](), dict[str, _T](), 0
        with suppress(AccessDenied, IntegrityError, ObjectNotFound):
            for number, header, lines in _tables(self._store, self._sizes, most_bytes=most_bytes):
                logs = dict[str, NotedLog]()
                for first, second in zip(lines[::2], lines[1::2], strict=True):
                    seen = Seen.decode(first, where=note_key(number))
                    if seen.run in wanted and seen.slots > slots.get(seen.run, 0):
                        slots[seen.run] = seen.slots
                        found.pop(seen.run, None)  # an older note, of a slower collector
                        if header.replay == REPLAY_VERSION and seen.sealed is not None:
                            with suppress(IntegrityError, ValueError):
                                logs[seen.run] = NotedLog(self._store, seen, second, self.newest)
                found |= zip(logs, self._store.pools.bulk.map(make, logs.values()), strict=True)
                first_of_all = header.first
        return found if first_of_all == 1 else {}

    def _ask(self, end: End) -> End | None:
        found = still_ends(self._store, end)
        return None if found is None else found.changed(notes=self.newest)

    def _is_quiet(self, end: LogEnd) -> bool:
        """Return whether nobody can have committed since the log ended so."""
        if end.sealed is None or end.notes is None or self._announced is None:
            return False
        if self._noted is None or self._noted.get(end.run, 0) > end.slots:
            return False
        head = None if self._store.heads is None else self._store.heads.seen(end.run)
        return end.run not in self._announced and (head is None or head.slots <= end.slots)

    def _list_markers(self) -> set[str] | None:
        try:
            return {parse_marker(info.key)[0] for info in self._store.backend.list(ACTIVE)}
        except Malformed:
            return None  # `verify` reports it


def newer_notes(store: Store, sizes: Mapping[int, int], after: int) -> Mapping[str, int] | None:
    """Return how many slots the listed tables after one know of each run.

    `None` if that cannot be told: a table is lost, damaged or of another registry.
    """
    found: dict[str, int] = {}
    try:
        for number, _, lines in _tables(store, sizes, after):
            for one in (Seen.decode(line, where=note_key(number)) for line in lines[::2]):
                found[one.run] = max(found.get(one.run, 0), one.slots)
    except (IntegrityError, ObjectNotFound):
        return None
    return found if max(sizes, default=0) >= after else None


def _tables(
    store: Store, sizes: Mapping[int, int], after: int = 0, *, most_bytes: float = math.inf
) -> Iterator[tuple[int, TableHeader, list[bytes]]]:
    """Yield the listed tables after one that none replaces, the newest first; fetch one ahead."""

    def begin(number: int) -> Future[tuple[TableHeader, list[bytes], int]] | None:
        nonlocal most_bytes
        most_bytes -= sizes.get(number, 0)
        is_next = number > after and most_bytes >= 0
        return store.pools.small.submit(read_table, store, number) if is_next else None

    reading = begin(number := max(sizes, default=0))
    while reading is not None:
        header, lines, _ = reading.result()
        if header.registry != store.config.id:
            raise Malformed("a table of notes of another registry", where=note_key(number))
        reading = begin(header.first - 1)
        yield number, header, lines
        number = header.first - 1


def note_sizes(store: Store) -> Mapping[int, int]:
    """Return the numbers of the tables of notes, each with the size of its file."""
    found: dict[int, int] = {}
    for info in store.backend.list(NOTES):
        with suppress(Malformed):  # `verify` reports it
            found[parse_number(info.key)] = info.size_bytes
    return found


def read_table(store: Store, number: int) -> tuple[TableHeader, list[bytes], int]:
    """Return the header of a table, the lines of its notes, and its size in bytes."""
    where = note_key(number)
    content = unwrap_frame(store.backend.get(where), where=where)
    first, *lines = content.split(b"\n")
    header = TableHeader.decode(first, where=where)
    if header.first > number or len(lines) % 2:
        raise Malformed("a table of notes that contradicts itself", where=where)
    return header, lines, len(content)
