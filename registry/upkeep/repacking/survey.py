"""Find the packs and chunks that the runs of a registry need.

A repack plans from this survey, and `holdfast.registry.upkeep.usage` counts by it. It reads
logs, placements and the tables of packs, but neither manifests nor chunks: a placement says where a
chunk is stored, and the table of its pack how.

A row says from which holder to which one a chunk is needed without a gap, in
`holdfast.registry.upkeep.sorted_rows`: no more chunks are in memory than one holder needs.
`Tally` adds up such rows; a repack puts them into its `catalog`, which makes a `Survey` of a batch
of packs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from holdfast.registry.errors import Archived, Malformed, RegistryError, StoreUnavailable
from holdfast.registry.history import RunLog, list_runs
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import ObjectKey, PackEntry, PackRef, PackTable, Placement
from holdfast.registry.store import Outcome, Store, Workers, in_batches, missing
from holdfast.registry.upkeep.live import given_up
from holdfast.registry.upkeep.sorted_rows import (
    LISTED,
    Rows,
    SortedRows,
    grouped,
    keys_of,
    object_rows,
    starts,
)
from holdfast.registry.values import Digest

VERIFY_DEEP = "Run `holdfast verify --deep`; nothing was changed."
#: Bits of an offset in a pack; those above it number the packs of one run, up to a bound.
_OFFSET_BITS = 40
_PACKS = 2**16
#: Where a chunk is, and from which holder to which one it is needed.
LIFE = np.dtype(
    [
        ("key", "u8", 4),  # the pack's digest
        ("generation", "u8"),
        ("pack_bytes", "u8"),
        ("offset", "u8"),
        ("size", "u8"),
        ("rank", "u8"),  # the first holder, and the row in its placements
        ("own", "u4"),  # how often it is named, not counting as the base of a delta
        ("last", "u4"),
    ]
)
#: The same by what it is: a chunk in an encoding, or an object.
_NEED = np.dtype(
    [("key", "u8", 2), ("kind", "u1"), ("size", "u8"), ("first", "u4"), ("last", "u4")]
)
_DIGEST, _KEY = struct.Struct(">QQQQ"), struct.Struct(">QQ")
_CHUNK, _ARCHIVED, _FILE = range(3)
#: What rows of objects say: a holder needs this manifest or placement; this pack is needed.
_IS_FILE, _IS_PACK = 2, 4


class Chunk(NamedTuple):
    """A chunk in one encoding, in whichever pack."""

    digest: Digest  # SHA-256 of its raw bytes
    codec: str  # name in `holdfast.registry.objects.codecs`
    base: Digest | None  # the base of a delta; `None` of any other chunk


@dataclass(slots=True)
class Survey:
    """The packs of a batch that runs need, and their chunks."""

    #: The packs, in the order in which runs and their states name them.
    packs: dict[ObjectKey, PackRef] = field(default_factory=dict)
    #: The packs of the batch that each state names, for all states of each run that names any.
    packs_of: dict[str, dict[Place, frozenset[ObjectKey]]] = field(default_factory=dict)
    first_run: dict[ObjectKey, str] = field(default_factory=dict)  # the run that names a pack first
    #: By pack and offset, the order in which chunks were first named: even numbers, of which the
    #: bits from the 33rd on number the state.
    ranks: dict[ObjectKey, dict[int, int]] = field(default_factory=dict)
    #: By pack and offset, how many states name a chunk as theirs, not as the base of a delta.
    own: dict[ObjectKey, dict[int, int]] = field(default_factory=dict)
    #: The tables of the packs, by offset.
    tables: dict[ObjectKey, dict[int, PackEntry]] = field(default_factory=dict)
    #: Packs that a sweep condemned and spared: no other run may name them.
    condemned: set[ObjectKey] = field(default_factory=set)
    within: set[ObjectKey] = field(default_factory=set)  # packs that may be rewritten
    is_recoded: bool = False  # whether chunks may get another encoding
    #: Chunks whose encoding stays, because packs outside of the batch depend on them.
    fixed: set[Digest] = field(default_factory=set)
    #: Gets the new places of states, by run and old place.
    moved: dict[tuple[str, Place], Place] = field(default_factory=dict)
    runs_of: Sequence[str] = ()  # the run of each state, by its number

    def run_of(self, rank: int) -> str:
        """Return the run that was the first to name the chunk of this rank."""
        return self.runs_of[rank >> 33]


@dataclass(slots=True)
class Holder:
    """A checkpoint, or another part of a run that holds states."""

    run: int  # number of its run, or of the group that is counted
    ref: str  # its name
    id: Digest | None  # id of the checkpoint; `None` where it is something else
    places: dict[Place, None] = field(default_factory=dict)  # the places of its states
    is_pinned: bool = False  # whether it is a checkpoint that a gate or tag keeps
    phase: str = ""  # of a checkpoint
    run_id: str = ""


@contextmanager
def blamed(run: str, failed: dict[str, RegistryError]) -> Iterator[None]:
    """Note the run that makes the block raise."""
    try:
        yield
    except RegistryError as error:
        failed[run] = error
        raise


class Lives:
    """The chunks of the newest holder, each with the holder from which on all have needed it."""

    def __init__(self, out: SortedRows) -> None:
        self._out = out
        self._packs: dict[PackRef, int] = {}
        self._taken = list[tuple[Rows, Rows, Rows]]()
        self._run = self._holder = -1
        self._codes, self._sizes, self._ranks, self._own = (np.empty(0, "u8") for _ in range(4))

    def take(self, run: int, holder: int, placement: Placement) -> None:
        """Take the chunks of a holder, or further ones; holders come in their order."""
        if holder != self._holder:
            self.step(run, holder)
        known = (self._packs.setdefault(pack, len(self._packs)) for pack in placement.packs)
        numbers = np.fromiter(known, "u8") << np.uint64(_OFFSET_BITS)
        pack, offset, stored = (np.asarray(column) for column in placement.rows.columns[:3])
        if len(offset) and int(offset.max()) >> _OFFSET_BITS:
            raise Malformed("a chunk far behind the end of any pack", found=int(offset.max()))
        # Bases that are not chunks of the state itself come last.
        own = np.arange(len(offset)) < len(offset) - len(placement.extra)
        self._taken.append((numbers[pack] | offset, stored.astype("u8"), own))

    def step(self, run: int = -1, holder: int = -1) -> None:
        """Fold in what the newest holder needs, and go on to another one, or to the end."""
        none = np.empty(0, "u8")
        taken = zip((none, none, none), *self._taken, strict=True)
        codes, sizes, own = map(np.concatenate, taken)
        codes, index, group = np.unique(codes, return_index=True, return_inverse=True)
        own = np.bincount(group, own, len(codes)).astype("u8")
        sizes, ranks = sizes[index], index.astype("u8") | np.uint64(max(self._holder, 0) << 32)
        at = np.searchsorted(self._codes, codes)
        at[at == len(self._codes)] = 0
        stays = self._codes[at] == codes if len(self._codes) else np.zeros(len(codes), bool)
        sizes[stays], ranks[stays] = self._sizes[at[stays]], self._ranks[at[stays]]
        own[stays] += self._own[at[stays]]
        gone = np.ones(len(self._codes), bool)
        gone[at[stays]] = False
        self._end(gone, self._holder - 1)
        self._codes, self._sizes, self._ranks, self._own = codes, sizes, ranks, own
        self._taken = []
        if run != self._run or len(self._packs) > _PACKS:
            self._end(np.ones(len(codes), bool), self._holder)
            self._packs.clear()
            self._codes = self._sizes = self._ranks = self._own = none
        self._run, self._holder = run, holder

    def _end(self, which: Rows, last: int) -> None:
        """Write the rows of chunks that the next holder does not need."""
        if not which.any():
            return
        codes, refs = self._codes[which], list(self._packs)
        numbers, index = np.unique(codes >> np.uint64(_OFFSET_BITS), return_inverse=True)
        packs = np.zeros(len(numbers), LIFE)
        named = [refs[number] for number in numbers.tolist()]
        packs["key"] = [_DIGEST.unpack(pack.key.digest) for pack in named]
        packs["generation"] = [pack.key.generation for pack in named]
        packs["pack_bytes"] = [pack.size_bytes for pack in named]
        rows = packs[index]
        rows["offset"] = codes & np.uint64(2**_OFFSET_BITS - 1)
        rows["size"], rows["rank"] = self._sizes[which], self._ranks[which]
        rows["own"], rows["last"] = self._own[which], last
        self._out.add(rows)


class Tally:
    """Which holders and runs need each chunk and object: exactly one, or several."""

    def __init__(
        self, runs: Sequence[str], holders: Sequence[Holder], failed: dict[str, RegistryError]
    ) -> None:
        self.runs, self.holders, self._failed = runs, holders, failed
        self._run_of = np.array([holder.run for holder in holders], "i8")
        self._lives, self._needs = SortedRows(LIFE, "rank"), SortedRows(_NEED, "first")
        #: Bytes by holder: what it needs, and of that what it alone needs; the same by run.
        self.needed, self.own = np.zeros(len(holders) + 1, "i8"), np.zeros(len(holders), "i8")
        self.run_needed, self.run_own = np.zeros(len(runs), "i8"), np.zeros(len(runs), "i8")
        self.shared = 0  # bytes that several holders need
        self.by_kind = [0, 0, 0]  # bytes of chunks, of those in archived packs, and of files
        self.packs = self.tables = 0  # bytes of needed packs, and of the chunks in their tables

    def read(self, workers: Workers) -> None:
        """Read the placements of all holders."""
        lives = Lives(self._lives)

        def take(need: tuple[int, Place], done: Outcome[Placement]) -> None:
            holder = self.holders[need[0]]
            with blamed(holder.run_id, self._failed):
                lives.take(holder.run, need[0], done.result())

        needs = (
            (number, place) for number, holder in enumerate(self.holders) for place in holder.places
        )
        workers.each(read_placement, needs, take, pool="small")
        lives.step()

    def need_files(self, objects: SortedRows) -> None:
        """Find the listed sizes of needed manifests, placements and packs."""
        for number, holder in enumerate(self.holders):
            keys = (k for one in holder.places for k in (one.manifest_key, one.placement_key))
            objects.add(object_rows((key.record for key in keys), _IS_FILE, number))
        for part in objects:
            at = np.flatnonzero(starts(part, "key"))
            heads, told = grouped(part)
            listed, packs = told & LISTED > 0, told & _IS_PACK > 0
            self.packs += int(heads["size"][listed & packs].sum())
            for head in heads[~listed]:
                (key,) = keys_of(head[None])
                number = int(head["size"])
                if head["what"] != _IS_FILE:
                    raise missing(key)
                with blamed(self.holders[number].run_id, self._failed):
                    raise missing(key)
            group = np.repeat(np.arange(len(at)), np.diff(at, append=len(part)))
            named = part["what"] == _IS_FILE
            holders = part["size"][named]
            rows = np.zeros(len(holders), _NEED)
            hashed = [_key_of(key.record) for key in keys_of(part[named])]
            rows["key"] = np.array(hashed, "u8").reshape(-1, 2)
            rows["kind"], rows["size"] = _FILE, heads["size"][group[named]]
            rows["first"] = rows["last"] = holders
            self._needs.add(rows)

    def resolve(self, workers: Workers, objects: SortedRows) -> None:
        """Find by the tables of packs which chunk is where, and note the packs."""
        for units in by_pack(self._lives):

            def take(
                pack: PackRef, done: Outcome[PackTable], units: Mapping[PackRef, Rows] = units
            ) -> None:
                self._take_table(pack, units[pack], done)

            workers.each(Store.read_table, units, take, pool="small")
            objects.add(object_rows((pack.key.record for pack in units), _IS_PACK))

    def _take_table(self, pack: PackRef, rows: Rows, done: Outcome[PackTable]) -> None:
        needs = np.zeros(len(rows), _NEED)
        needs["first"] = first_holders(rows)
        needs["size"], needs["last"] = rows["size"], rows["last"]
        keys: dict[int, tuple[int, ...]] = {}
        try:
            table = done.result()
            for offset in dict.fromkeys(rows["offset"].tolist()):
                if (entry := table.at(offset)) is None:
                    raise unlike_table(pack)
                keys[offset] = _chunk_key(entry)
            if len(table):
                self.tables += table[-1].offset + table[-1].stored_bytes
        except Archived:  # nothing tells which of its chunks other packs have
            keys = {one: _key_of(f"{pack.key} {one}".encode()) for one in rows["offset"].tolist()}
            needs["kind"] = _ARCHIVED
        except RegistryError as error:
            for number in set(first_holders(rows).tolist()):
                self._failed[self.holders[number].run_id] = error
            raise
        needs["key"] = [keys[offset] for offset in rows["offset"].tolist()]
        self._needs.add(needs)

    def add_up(self) -> None:
        """Add everything up."""
        change = np.zeros(len(self.holders) + 1, "i8")
        for rows in self._needs:
            things = starts(rows, "key")
            at = np.flatnonzero(things)
            group = np.cumsum(things) - 1
            first, run = rows["first"].astype("i8"), self._run_of[rows["first"]]
            size = rows["size"][at].astype("i8")[group]  # as its first holder has it
            # Lives that overlap: the same chunk in two packs, or in two states of a holder.
            apart = group * (len(self.holders) + 1)
            last = np.maximum.accumulate(rows["last"] + apart) - apart
            begins = things.copy()
            begins[1:] |= first[1:] > last[:-1]
            ends = np.append(begins[1:], True)
            np.add.at(change, first[begins], size[begins])
            np.subtract.at(change, last[ends] + 1, size[ends])
            in_run = things | (np.diff(run, prepend=-1) != 0)
            np.add.at(self.run_needed, run[in_run], size[in_run])
            kind, size, first = rows["kind"][at], size[at], first[at]
            last = last[np.append(at[1:], len(rows)) - 1]
            for one in range(len(self.by_kind)):
                self.by_kind[one] += int(size[kind == one].sum())
            alone, in_one = first == last, self._run_of[first] == self._run_of[last]
            self.shared += int(size[~alone].sum())
            np.add.at(self.own, first[alone], size[alone])
            np.add.at(self.run_own, self._run_of[first[in_one]], size[in_one])
        self.needed = np.cumsum(change)


def by_pack(lives: SortedRows) -> Iterator[dict[PackRef, Rows]]:
    """Yield rows of lives by pack, not too many at a time."""
    for rows in lives:
        # Every generation of a pack is one of its own.
        rows = rows[np.lexsort([rows["offset"], rows["generation"], *rows["key"].T[::-1]])]
        begins = np.flatnonzero(starts(rows, "key", "generation"))
        yield {
            _pack_of(rows[start]): rows[start:end]
            for start, end in zip(begins, [*begins[1:], len(rows)], strict=True)
        }


def first_holders(rows: Rows) -> Rows:
    """Return the numbers of the holders that begin lives."""
    found: Rows = (rows["rank"] >> np.uint64(32)).astype("i8")
    return found


def _key_of(name: bytes) -> tuple[int, ...]:
    """Return the key of a row: 16 bytes of a digest."""
    return _KEY.unpack_from(hashlib.sha256(name).digest())


def _chunk_key(entry: PackEntry) -> tuple[int, ...]:
    """Return the key of a chunk in one encoding, in whichever pack."""
    return _key_of(b"".join([entry.digest, entry.codec.encode(), b" ", entry.base or b""]))


def _pack_of(row: np.void) -> PackRef:
    key = ObjectKey("packs", Digest(row["key"].astype(">u8").tobytes()), int(row["generation"]))
    return PackRef(key, int(row["pack_bytes"]))


def read_placement(store: Store, wanted: tuple[object, Place]) -> Placement:
    """Return the placement of a state; whoever holds the state comes first."""
    return store.placement(wanted[1].placement_key)


def unlike_table(pack: PackRef) -> Malformed:
    """Return the error for a placement that names a chunk which the table of its pack has not."""
    return Malformed(
        "a placement and its pack name different chunks at one offset",
        where=pack.key,
        hint=VERIFY_DEEP,
    )


def read_runs(store: Store, damaged: dict[str, RegistryError]) -> Iterator[RunManifest]:
    """Yield every run that is not damaged, in the order of their names; note what is damaged.

    What an operator gave up is passed over: collections do not wait for it.
    """
    passed = cache(lambda: given_up(store))

    def read(run_id: str) -> RunManifest | None:
        try:
            return RunLog(store, run_id).open()
        except StoreUnavailable:
            raise
        except RegistryError as error:
            if not passed().get(run_id):
                damaged[run_id] = error
            return None

    names = [name for name in list_runs(store) if name not in damaged]
    runs = in_batches(store.pools.bulk, read, names)
    return (run for run in runs if run is not None)


def chunk_of(entry: PackEntry) -> Chunk:
    """Return the chunk of an entry in a table."""
    return Chunk(entry.digest, entry.codec, entry.base)
