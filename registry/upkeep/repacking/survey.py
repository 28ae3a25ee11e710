"""Find the packs and chunks that the runs of a registry need.

A repack plans from this survey, and `holdfast.registry.upkeep.usage` counts by it. It reads
logs, placements and the tables of packs, but neither manifests nor chunks: a placement says where a
chunk is stored, and the table of its pack how.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdfast.registry.errors import Malformed, RegistryError, StoreUnavailable
from holdfast.registry.history import Epochs, RunLog, list_runs
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import ObjectKey, PackEntry, PackRef, PackTable, Placement
from holdfast.registry.store import Outcome, Store, Workers
from holdfast.registry.upkeep.window import in_batches
from holdfast.registry.values import Digest


class Chunk(NamedTuple):
    """A chunk in one encoding, in whichever pack."""

    digest: Digest  # SHA-256 of its raw bytes
    codec: str  # name in `holdfast.registry.objects.codecs`
    base: Digest | None  # the base of a delta; `None` of any other chunk


class Survey:
    """The packs and chunks that runs need.

    Attributes:
        packs: Every pack that is needed, in the order in which runs and their states name them.
        packs_of: The packs that each state of each run names.
        first_run: The run that names a pack first.
        ranks: By pack and offset, the order in which chunks were first named: 0, 1, 2, ...
        own: By pack and offset, how many states name a chunk as theirs, not as the base of a delta.
        tables: The tables of the packs, by offset.
        condemned: Packs that a sweep condemned and spared: no other run may name them.
    """

    def __init__(
        self,
        store: Store,
        failed: dict[str, RegistryError] | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._store = store
        self._workers = workers or Workers(None, store)
        self._failed = {} if failed is None else failed
        self.packs: dict[ObjectKey, PackRef] = {}
        self.packs_of: dict[str, dict[Place, frozenset[ObjectKey]]] = {}
        self.first_run: dict[ObjectKey, str] = {}
        self.ranks: dict[ObjectKey, dict[int, int]] = {}
        self.own: dict[ObjectKey, dict[int, int]] = {}
        self.tables: dict[ObjectKey, dict[int, PackEntry]] = {}
        self.condemned: set[ObjectKey] = set()
        self._named = 0
        self._starts: list[tuple[int, str]] = []

    def read(self, runs: Iterable[RunManifest]) -> None:
        """Read the placements and tables of packs that runs need."""
        logs = map(_held_places, runs)
        # A fork after its parent: the older run stored the chunks that both of them name.
        wanted: list[tuple[str, Place]] = []
        for _, run_id, places in sorted(logs):
            self.packs_of[run_id] = {}
            wanted += ((run_id, place) for place in places)
        self._workers.each(read_placement, wanted, self._take_placement, pool="small")
        self._workers.each(read_table, self.packs.values(), self._take_table, pool="small")
        epochs = Epochs(self._store)
        self.condemned = epochs.condemned(self.packs, epochs.observe())

    def needed_by(self, runs: Iterable[str]) -> set[ObjectKey]:
        """Return the packs that runs need."""
        return {key for run in runs for named in self.packs_of[run].values() for key in named}

    def run_of(self, rank: float) -> str:
        """Return the run that was the first to name the chunk of this rank."""
        after = bisect_right(self._starts, rank, key=lambda start: start[0])
        return self._starts[after - 1][1]

    def _take_placement(self, wanted: tuple[str, Place], done: Outcome[Placement]) -> None:
        run_id, place = wanted
        if done.error is not None:
            self._failed[run_id] = done.error
        if not self.packs_of[run_id]:
            self._starts.append((self._named, run_id))
        self.packs_of[run_id][place] = self._note(run_id, done.result())

    def _note(self, run_id: str, placement: Placement) -> frozenset[ObjectKey]:
        """Note the chunks of a placement, and return its packs."""
        for pack in placement.packs:
            self.packs.setdefault(pack.key, pack)
            self.first_run.setdefault(pack.key, run_id)
        ranks = [self.ranks.setdefault(pack.key, {}) for pack in placement.packs]
        own = [self.own.setdefault(pack.key, {}) for pack in placement.packs]
        # Bases that are not chunks of the state itself come last.
        bases = len(placement.rows) - len(placement.extra)
        for number, row in enumerate(placement.rows):
            if ranks[row.pack].setdefault(row.offset, self._named) == self._named:
                self._named += 1
            if number < bases:
                own[row.pack][row.offset] = own[row.pack].get(row.offset, 0) + 1
        return frozenset(pack.key for pack in placement.packs)

    def _take_table(self, pack: PackRef, done: Outcome[PackTable]) -> None:
        """Keep a table by offset; note an error in it for every run that needs the pack."""
        try:
            table = {entry.offset: entry for entry in done.result()}
            if not self.ranks[pack.key].keys() <= table.keys():
                raise Malformed(
                    "a placement and its pack name different chunks at one offset",
                    where=pack.key,
                    hint="Run `holdfast verify --deep`; nothing was changed.",
                )
        except RegistryError as error:
            for run_id, packs_of in self.packs_of.items():
                if any(pack.key in named for named in packs_of.values()):
                    self._failed[run_id] = error
            raise
        self.tables[pack.key] = table


def read_placement(store: Store, wanted: tuple[object, Place]) -> Placement:
    """Return the placement of a state; whoever holds the state comes first."""
    return store.placement(wanted[1].placement_key)


def read_table(store: Store, pack: PackRef) -> PackTable:
    """Return the table of a pack."""
    return store.read_table(pack)


def read_runs(store: Store, damaged: dict[str, RegistryError]) -> Iterator[RunManifest]:
    """Yield every run that is not damaged, in the order of their names; note what is damaged."""

    def read(run_id: str) -> RunManifest | None:
        try:
            return RunLog(store, run_id).open()
        except StoreUnavailable:
            raise
        except RegistryError as error:
            damaged[run_id] = error
            return None

    names = [name for name in list_runs(store) if name not in damaged]
    runs = in_batches(store.pools.bulk, read, names)
    return (run for run in runs if run is not None)


def _held_places(run: RunManifest) -> tuple[int, str, list[Place]]:
    places = [place for place in run.places if place.manifest in run.held]
    return run.created_ms, run.run_id, places


def chunk_of(entry: PackEntry) -> Chunk:
    """Return the chunk of an entry in a table."""
    return Chunk(entry.digest, entry.codec, entry.base)
