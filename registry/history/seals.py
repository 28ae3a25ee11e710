"""Seals as readers see them: whether the logs of sealed runs can have grown, for all runs at once.

Before a commit behind a seal a writer puts a marker, and a collector notes a newer seal before it
removes that marker. So the markers, and then the newer notes, show every run that may have changed.
`holdfast.registry.upkeep` puts seals and notes. Specified in docs/spec.md, sections 13 and 35.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Literal

from holdfast.registry.errors import AccessDenied, IntegrityError, Malformed, ObjectNotFound
from holdfast.registry.history.slots import End, LogEnd, still_ends
from holdfast.registry.objects import (
    ACTIVE,
    NOTES,
    note_key,
    parse_marker,
    parse_number,
    unwrap_frame,
)
from holdfast.registry.store import Store
from holdfast.registry.values import DigestField, Field, Record

#: Of so few runs each log is asked: the listings would take as many requests.
_FEW = 3


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


class Seals:
    """The seals of a registry, listed before logs are read.

    Attributes:
        newest: The newest table of notes; `None` if it was not listed.
    """

    def __init__(self, store: Store, ends: Iterable[LogEnd], runs: int) -> None:
        """List what tells of the runs that ended so, if there are enough `runs` to be read."""
        self._store = store
        self.newest: int | None = None
        self._announced: set[str] | None = None
        self._noted: Mapping[str, int] | None = None
        if runs > _FEW:
            since = [one.notes for one in ends if one.sealed is not None and one.notes is not None]
            with suppress(AccessDenied):  # then each log is asked
                if since:  # the markers first: a newer note stands before a marker is removed
                    self._announced = self._list_markers()
                self.newest, self._noted = newer_notes(store, min(since, default=None))

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


def newer_notes(store: Store, after: int | None) -> tuple[int, Mapping[str, int] | None]:
    """Return the newest table, and how many slots the tables after one know of each run.

    The second is `None` if that cannot be told: a table is lost, damaged or of another registry.
    """
    newest = needed = max(note_numbers(store), default=0)
    if after is None or newest < after:
        return newest, None
    found: dict[str, int] = {}
    for number in range(newest, after, -1):
        if number > needed:
            continue  # a newer table replaces it
        try:
            header, lines, _ = read_table(store, number)
            seen = [Seen.decode(line, where=note_key(number)) for line in lines[::2]]
        except (IntegrityError, ObjectNotFound):
            return newest, None
        if header.registry != store.config.id:
            return newest, None
        needed = header.first - 1
        for one in seen:
            found[one.run] = max(found.get(one.run, 0), one.slots)
    return newest, found


def note_numbers(store: Store) -> Iterator[int]:
    """Yield the numbers of the tables of notes."""
    for info in store.backend.list(NOTES):
        with suppress(Malformed):  # `verify` reports it
            yield parse_number(info.key)


def read_table(store: Store, number: int) -> tuple[TableHeader, list[bytes], int]:
    """Return the header of a table, the lines of its notes, and its size in bytes."""
    where = note_key(number)
    content = unwrap_frame(store.backend.get(where), where=where)
    first, *lines = content.split(b"\n")
    header = TableHeader.decode(first, where=where)
    if header.first > number or len(lines) % 2:
        raise Malformed("a table of notes that contradicts itself", where=where)
    return header, lines, len(content)
