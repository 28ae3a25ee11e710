"""Every chunk of the packs that runs need, on disk; packs are planned from it batch by batch.

Placements and tables are read once into a temporary SQLite database. Its queries find the packs
that a plan may rewrite, and cut them into batches. A batch brings together packs that have a chunk
in common, and the bases of deltas that may get another encoding, as far as its bound allows.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np

from holdfast.registry.errors import Archived, RegistryError
from holdfast.registry.history import Epochs
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import ObjectKey, PackEntry, PackRef, PackTable, Placement
from holdfast.registry.store import Outcome, Store, Workers
from holdfast.registry.upkeep.repacking.survey import (
    LIFE,
    Lives,
    Survey,
    blamed,
    by_pack,
    first_holders,
    read_placement,
    unlike_table,
)
from holdfast.registry.upkeep.shelf import space
from holdfast.registry.upkeep.sorted_rows import Rows, SortedRows, starts
from holdfast.registry.values import Digest

#: Chunks in the tables of the packs of a batch; more only where a single pack has more.
BATCH_CHUNKS = 2**17
#: `rank` and `own` are NULL where no state names the chunk in this pack.
_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;
CREATE TABLE packs (
    id INTEGER PRIMARY KEY, key BLOB, size INT, first INT, chunks INT, held INT, dead INT,
    is_asked INT DEFAULT 0, is_recoded INT DEFAULT 0
);
CREATE TABLE chunks (
    pack INT, digest BLOB, offset INT, stored INT, raw INT, codec TEXT, base BLOB, proof BLOB,
    rank INT, own INT, PRIMARY KEY (pack, offset)
) WITHOUT ROWID;
CREATE TABLE needs (pack INT, first INT, last INT);
"""
#: Bytes that a chunk may waste in a pack: no state names it there, or another pack has it too.
_INDEXES = """
CREATE INDEX by_digest ON chunks (digest);
CREATE INDEX by_base ON chunks (base) WHERE base IS NOT NULL;
CREATE INDEX by_pack ON needs (pack);
CREATE INDEX by_place ON needs (first);
CREATE TABLE twice AS SELECT digest FROM chunks GROUP BY digest HAVING COUNT(*) > 1;
"""
_DEAD = """
SELECT SUM(stored), pack FROM twice CROSS JOIN chunks USING (digest) WHERE own IS NOT NULL
GROUP BY pack
"""
_ASKED = """
UPDATE packs SET is_asked = 1 WHERE id IN (SELECT pack FROM needs WHERE first BETWEEN ? AND ?)
"""
#: Packs with chunks that may get another encoding: a base that no state names, a delta on one, a
#: chunk in several encodings, one of another codec than is asked for, and a chain to be cut.
_RECODED = """
UPDATE packs SET is_recoded = 1 WHERE id IN (
    SELECT pack FROM chunks WHERE own = 0
    UNION SELECT b.pack FROM chunks a CROSS JOIN chunks b ON b.base = a.digest
        WHERE a.own = 0 AND b.own IS NOT NULL
    UNION SELECT pack FROM chunks WHERE own IS NOT NULL AND codec <> :codec
    UNION SELECT pack FROM chunks WHERE own IS NOT NULL AND base IS NOT NULL AND :cuts
    UNION SELECT pack FROM (
        SELECT digest FROM twice CROSS JOIN chunks USING (digest) WHERE own IS NOT NULL
        GROUP BY digest HAVING MIN(codec) <> MAX(codec) OR COUNT(DISTINCT ifnull(base, '')) > 1
    ) CROSS JOIN chunks USING (digest)
)
"""
_SEEDS = """
SELECT id, is_recoded, chunks FROM packs
WHERE is_asked AND (is_recoded OR size < ? OR dead > 0 AND dead >= ? * held) ORDER BY first
"""
#: Packs with a chunk of another pack; where encodings change, also those with bases and deltas.
_NEAR = """
SELECT id, max(follows), chunks FROM (
    SELECT b.pack AS id, :follows AS follows
    FROM chunks a CROSS JOIN chunks b ON b.digest = a.digest WHERE a.pack = :pack
    UNION SELECT b.pack, 1 FROM chunks a CROSS JOIN chunks b ON b.digest = a.base
    WHERE :follows AND a.pack = :pack AND b.own IS NOT NULL
    UNION SELECT b.pack, 1 FROM chunks a CROSS JOIN chunks b ON b.base = a.digest
    WHERE :follows AND a.pack = :pack AND a.own = 0 AND b.own IS NOT NULL
) JOIN packs USING (id) GROUP BY id LIMIT :most
"""
#: Chunks that other packs have too, and bases of deltas there.
_FIXED = """
SELECT a.digest, b.pack FROM chunks a CROSS JOIN chunks b ON b.digest = a.digest
WHERE a.pack = :pack AND a.own IS NOT NULL AND b.own IS NOT NULL
UNION SELECT a.digest, b.pack FROM chunks a CROSS JOIN chunks b ON b.base = a.digest
WHERE a.pack = :pack AND a.own = 0 AND b.own IS NOT NULL
"""
#: The packs that states begin or cease to name, by the number of a state.
_Changes = Mapping[int, set[ObjectKey]]


class Catalog:
    """The packs and chunks that runs need."""

    def __init__(self, store: Store, workers: Workers, failed: dict[str, RegistryError]) -> None:
        self._store, self._workers, self._failed = store, workers, failed
        #: The runs, older ones first, each with the numbers of its places.
        self.runs: dict[str, range] = {}
        self._places: list[Place] = []
        self._runs_of: list[str] = []  # by the number of a place
        self._moved: dict[tuple[str, Place], Place] = {}  # places that batches have replaced
        # A temporary file, gone with the connection, and that with the catalog.
        self._db = sqlite3.connect("", check_same_thread=False)
        finalize(self, self._db.close)
        self._db.executescript(_TABLES)

    def read(self, runs: Iterable[RunManifest]) -> None:
        """Read the placements and tables of packs that runs need."""
        # A fork after its parent: the older run stored the chunks that both of them name.
        for _, run_id, places in sorted(map(_held_places, runs)):
            self.runs[run_id] = range(len(self._places), len(self._places) + len(places))
            self._places += places
            self._runs_of += [run_id] * len(places)
        rows = SortedRows(LIFE, "rank")
        lives, numbers = Lives(rows), {run_id: n for n, run_id in enumerate(self.runs)}

        def take(unit: tuple[int, Place], done: Outcome[Placement]) -> None:
            run_id = self._runs_of[unit[0]]
            with blamed(run_id, self._failed):
                lives.take(numbers[run_id], unit[0], done.result())

        self._workers.each(read_placement, enumerate(self._places), take, pool="small")
        lives.step()
        with space():
            for units in by_pack(rows):
                take_table = partial(self._take_table, units)
                self._workers.each(Store.read_table, units, take_table, pool="small")
            self._db.executescript(_INDEXES)
            wasted = self._db.execute(_DEAD)
            self._db.executemany("UPDATE packs SET dead = dead + ? WHERE id = ?", wasted)

    def _take_table(
        self, units: Mapping[PackRef, Rows], pack: PackRef, done: Outcome[PackTable]
    ) -> None:
        """Keep a table; note an error in it for every run that needs the pack."""
        rows = units[pack]
        rows = rows[np.lexsort([rows["rank"], rows["offset"]])]
        at = np.flatnonzero(starts(rows, "offset"))
        offsets, ranks = rows["offset"][at].tolist(), rows["rank"][at].tolist()
        own = np.add.reduceat(rows["own"], at).tolist()
        named = dict(zip(offsets, zip(ranks, own, strict=True), strict=True))
        try:
            table = list(done.result())  # each entry is made once
            if not named.keys() <= {entry.offset for entry in table}:
                raise unlike_table(pack)
        except Archived:  # its run is whole
            raise
        except RegistryError as error:
            for number in set(first_holders(rows).tolist()):
                self._failed[self._runs_of[number]] = error
            raise
        held = sum(entry.stored_bytes for entry in table)
        dead = sum(entry.stored_bytes for entry in table if entry.offset not in named)
        one = (pack.key.record, pack.size_bytes, min(ranks), len(table), held, dead)
        into = "INSERT INTO packs (key, size, first, chunks, held, dead) VALUES (?, ?, ?, ?, ?, ?)"
        number = self._db.execute(into, one).lastrowid
        self._db.executemany(
            "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((number, *e, *named.get(e.offset, (None, None))) for e in table),
        )
        needs = ((number, first, last) for first, last in _stretches(rows))
        self._db.executemany("INSERT INTO needs VALUES (?, ?, ?)", needs)

    def batches(
        self, runs: Iterable[str], codec: str | None, cuts: bool, small: int, min_dead: float
    ) -> Iterator[list[int]]:
        """Yield batches of packs: all that a plan can rewrite, with those that are like them."""
        with space():
            ranges = (self.runs[run_id] for run_id in runs)
            self._db.executemany(_ASKED, ((one.start, one.stop - 1) for one in ranges))
            self._db.execute(_RECODED, {"codec": codec, "cuts": cuts})
            taken = bytearray(1 + self._db.execute("SELECT COUNT(*) FROM packs").fetchone()[0])
            batch, left = list[int](), BATCH_CHUNKS
            for seed in self._db.execute(_SEEDS, (small, min_dead)):
                if batch and seed[2] > left and not taken[seed[0]]:
                    yield batch
                    batch, left = [], BATCH_CHUNKS
                waiting, seen = deque([seed]), {seed[0]}
                while waiting:
                    pack, follows, size = waiting.popleft()
                    if taken[pack] or (batch and size > left):
                        continue
                    taken[pack] = True
                    batch.append(pack)
                    left -= size
                    asked = {"pack": pack, "follows": follows, "most": BATCH_CHUNKS}
                    for one in self._db.execute(_NEAR, asked):
                        if one[0] not in seen:
                            seen.add(one[0])
                            waiting.append(one)
            if batch:
                yield batch

    def survey(self, batch: Collection[int]) -> Survey:
        """Return the packs of a batch."""
        found, inside = Survey(runs_of=self._runs_of, moved=self._moved), set(batch)
        find = "SELECT first, key, size, is_asked, is_recoded FROM packs WHERE id = ?"
        packs = sorted((*self._db.execute(find, [one]).fetchone(), one) for one in batch)
        begins, ends = (defaultdict[int, set[ObjectKey]](set) for _ in range(2))
        for first, record, size, is_asked, is_recoded, pack in packs:
            key = ObjectKey.of_record(record)
            found.packs[key] = PackRef(key, size)
            found.first_run[key] = found.run_of(2 * first)
            found.within |= {key} if is_asked else set()
            found.is_recoded |= bool(is_recoded)
            rows = self._db.execute("SELECT * FROM chunks WHERE pack = ?", [pack]).fetchall()
            found.tables[key] = {row[2]: _entry(row) for row in rows}
            named = sorted((2 * row[8], row[2], row[9]) for row in rows if row[8] is not None)
            found.ranks[key] = {offset: rank for rank, offset, _ in named}
            found.own[key] = {offset: own for _, offset, own in named if own}
            fixed = self._db.execute(_FIXED, {"pack": pack})
            found.fixed |= {Digest(one) for one, other in fixed if other not in inside}
            needs = self._db.execute("SELECT first, last FROM needs WHERE pack = ?", [pack])
            for begun, end in needs:
                begins[begun].add(key)
                ends[end + 1].add(key)
        self._find_places(found, begins, ends)
        epochs = Epochs(self._store)
        found.condemned = epochs.condemned(found.packs, epochs.observe())
        return found

    def _find_places(self, found: Survey, begins: _Changes, ends: _Changes) -> None:
        """Find the packs that each state of each run names."""
        for run_id in dict.fromkeys(self._runs_of[first] for first in sorted(begins)):
            places, named = found.packs_of.setdefault(run_id, {}), frozenset[ObjectKey]()
            for number in self.runs[run_id]:
                if number in begins or number in ends:  # states in a row share one set
                    named = frozenset(named - ends.get(number, set()) | begins.get(number, set()))
                place = self._places[number]
                self._places[number] = self._moved.pop((run_id, place), place)
                places[self._places[number]] = named


def _stretches(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield from which place to which one a pack is named without a gap."""
    order = np.argsort(first_holders(rows))
    first, last = first_holders(rows)[order], np.maximum.accumulate(rows["last"][order])
    at = np.flatnonzero(np.append(True, first[1:] > last[:-1]))
    yield from zip(first[at].tolist(), last[np.append(at[1:], len(rows)) - 1].tolist(), strict=True)


def _entry(row: Sequence[Any]) -> PackEntry:
    digest, below, of_stored = (row[n] and Digest(row[n]) for n in (1, 6, 7))
    return PackEntry._make((digest, *row[2:6], below, of_stored))


def _held_places(run: RunManifest) -> tuple[int, str, list[Place]]:
    places = [place for place in run.places if place.manifest in run.held]
    return run.created_ms, run.run_id, places
