"""Count the bytes that runs and checkpoints use on the store.

Counts stored bytes: chunks as they are encoded, manifests, placements. Each counts for every state
that names it, a delta's base too. A chunk that is stored several times counts once, as a repack
would leave it; the other copies count as `dead_bytes`. Only placements and tables of packs are
read, no chunks, and nothing is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import MissingObject, RegistryError, StoreUnavailable, WorkersFailed
from holdfast.registry.history import kept_ref, stale_snapshots
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import KINDS, RUNS, ObjectKey, Placement, snapshot_prefix
from holdfast.registry.store import Outcome, Store, Workers, missing
from holdfast.registry.upkeep.live import StoredFile, list_objects, place_of
from holdfast.registry.upkeep.repacking.survey import (
    Chunk,
    Survey,
    chunk_of,
    read_placement,
    read_runs,
)
from holdfast.registry.values import Digest

#: Attempts to read the registry before an object that is gone counts as lost.
_ATTEMPTS = 3
_NONE, _MANY = -1, -2


@dataclass(frozen=True, slots=True)
class StateUsage:
    """The bytes that a checkpoint, or anything else that a run holds, uses."""

    #: Its name; a gate or tag of a checkpoint that is not evicted counts with the checkpoint.
    ref: str
    id: Digest | None  # id of the checkpoint; `None` of anything else
    own_bytes: int  # bytes that it alone needs
    shared_bytes: int  # bytes that it needs and something else needs too
    #: Bytes that `gc` and `repack` can free after an eviction of the checkpoint: 0 if a gate or tag
    #: keeps it. `None` of anything else.
    freed_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunUsage:
    """The bytes that a run uses."""

    run: str  # its name
    #: Its checkpoints in log order, then the other states that it holds.
    states: tuple[StateUsage, ...]
    own_bytes: int  # bytes that no other run needs
    shared_bytes: int  # bytes that it needs and another run needs too
    log_bytes: int  # bytes of its log and its two newest snapshots, which stay when it is dropped

    @property
    def freed_bytes(self) -> int:
        """Bytes that `gc` and `repack` can free once the run is dropped, pins and pool included."""
        return self.own_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes that a registry uses; the parts add up to all files on the store.

    Attributes:
        runs: The runs, by name.
        own_bytes: Bytes that exactly one of the states needs.
        shared_bytes: Bytes that several of them need, each byte counted once.
        dead_bytes: In needed packs, bytes of chunks that nothing needs or that another pack has
            too: `repack` drops them.
        unneeded_bytes: Bytes of objects that nothing needs, or not yet, and of snapshots that newer
            ones have replaced: `gc` deletes them.
        table_bytes: Bytes of the tables of contents of needed packs.
        log_bytes: Bytes of the logs of all runs, each with its two newest snapshots.
        other_bytes: Bytes of `registry.json`, epochs and all other files.
        damaged: The errors of the runs that could not be read, by name. They are not among `runs`,
            and objects that only they need count as unneeded here; `gc` deletes nothing until they
            are repaired.
    """

    runs: tuple[RunUsage, ...]
    own_bytes: int
    shared_bytes: int
    dead_bytes: int
    unneeded_bytes: int
    table_bytes: int
    log_bytes: int
    other_bytes: int
    damaged: Mapping[str, RegistryError] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Everything on the store."""
        needed = self.own_bytes + self.shared_bytes + self.table_bytes
        return needed + self.dead_bytes + self.unneeded_bytes + self.log_bytes + self.other_bytes


@dataclass(slots=True)
class _Holder:
    """A checkpoint, or another part of a run that holds states."""

    run: int  # number of its run
    ref: str  # its name
    id: Digest | None  # id of the checkpoint; `None` where it is something else
    places: dict[Place, None] = field(default_factory=dict)  # the places of its states
    is_pinned: bool = False  # whether it is a checkpoint that a gate or tag keeps


def measure(store: Store, *, executor: Executor | None = None) -> Usage:
    """Count the bytes on a store by the states that need them; see `Registry.usage`."""
    workers = Workers(executor, store)
    damaged: dict[str, RegistryError] = {}
    attempts = 0
    while True:
        failed: dict[str, RegistryError] = {}
        try:
            return _measure(store, workers, damaged, failed)
        except (StoreUnavailable, WorkersFailed):
            raise
        except RegistryError as error:
            attempts += 1
            if isinstance(error, MissingObject) and attempts < _ATTEMPTS:
                continue  # evicted meanwhile, and collected since?
            if not failed:
                raise
            damaged |= failed


def _measure(
    store: Store,
    workers: Workers,
    damaged: dict[str, RegistryError],
    failed: dict[str, RegistryError],
) -> Usage:
    """Count once, without the damaged runs."""
    runs: list[str] = []
    holders: list[_Holder] = []

    def noted() -> Iterator[RunManifest]:
        for run in read_runs(store, damaged):
            with _blamed(run.run_id, failed):
                holders.extend(_holders(run, len(runs)))
            runs.append(run.run_id)
            yield run

    survey = Survey(store, failed, workers)
    survey.read(noted())
    # After the logs, so that every object that they need is in the listing.
    files = _list(store)
    for holder in holders:
        with _blamed(runs[holder.run], failed):
            _check_files(holder, files.objects)
    tally = _Tally(len(runs), holders)
    _count(workers, survey, files.objects, tally)
    usage = _sum_up(survey, files, tally, runs)
    return replace(usage, damaged=dict(sorted(damaged.items())))


@contextmanager
def _blamed(run: str, failed: dict[str, RegistryError]) -> Iterator[None]:
    """Note the run that makes the block raise."""
    try:
        yield
    except RegistryError as error:
        failed[run] = error
        raise


def _check_files(holder: _Holder, objects: Mapping[ObjectKey, StoredFile]) -> None:
    for place in holder.places:
        for key in (place.manifest_key, place.placement_key):
            if key not in objects:
                raise missing(key)


def _holders(run: RunManifest, number: int) -> Iterator[_Holder]:
    """Yield the parts of a run that hold states: the checkpoints, then the rest by name."""
    checkpoints: dict[int, _Holder] = {}
    for record in () if run.dropped is not None else run.checkpoints:
        if record.evicted is None:
            holder = _Holder(number, f"{run.run_id}/{kept_ref(record)}", record.manifest)
            for manifest in (record.manifest, *record.companions.values()):
                holder.places[place_of(run, manifest)] = None
            checkpoints[record.n] = holder
    pins = {pin.ref: pin for pin in run.pins if pin.kind in ("gate", "tag")}
    for pin in pins.values():
        if pin.checkpoint in checkpoints:
            checkpoints[pin.checkpoint].is_pinned = True
    heads = {kept_ref(one) for one in run.checkpoints}
    rest: dict[str, _Holder] = {}
    for manifest, refs in run.holders().items():
        for ref in refs:
            name = "/".join(ref.split("/")[:2])
            # Counted already, with its checkpoint.
            if name in pins or name in heads or ref.split("/")[0] in heads:
                continue
            holder = rest.setdefault(name, _Holder(number, f"{run.run_id}/{name}", None))
            holder.places[place_of(run, manifest)] = None
    yield from checkpoints.values()
    yield from rest.values()


@dataclass(slots=True)
class _Files:
    """The files on the store."""

    objects: dict[ObjectKey, StoredFile]
    #: The bytes of each run's log, with the snapshots that stay.
    logs: dict[str, int] = field(default_factory=dict)
    stale_bytes: int = 0  # bytes of snapshots that newer ones have replaced
    other_bytes: int = 0  # bytes of everything else


def _list(store: Store) -> _Files:
    files = _Files(list_objects(store))
    snapshots: dict[str, list[ObjectInfo]] = {}
    for top in store.backend.list(delimiter=True):
        if top.key in {f"{kind}/" for kind in KINDS}:
            continue
        for info in store.backend.list(top.key) if top.key.endswith("/") else (top,):
            if info.key.startswith(RUNS):
                run_id = info.key.split("/")[1]
                files.logs[run_id] = files.logs.get(run_id, 0) + info.size_bytes
                if info.key.startswith(snapshot_prefix(run_id)):
                    snapshots.setdefault(run_id, []).append(info)
            else:
                files.other_bytes += info.size_bytes
    for run_id, listed in snapshots.items():
        stale_bytes = sum(info.size_bytes for info in stale_snapshots(listed))
        files.logs[run_id] -= stale_bytes
        files.stale_bytes += stale_bytes
    return files


class _Tally:
    """Which holders and runs need each chunk and object: exactly one, or several."""

    def __init__(self, runs: int, holders: Iterable[_Holder]) -> None:
        self.holders = list(holders)
        self.needed = array("q", [0] * len(self.holders))  # bytes, by holder
        self.run_needed = array("q", [0] * runs)
        self._numbers: dict[Chunk | ObjectKey, int] = {}
        self._sizes = array("q")
        self._last = array("i")  # the last holder that was found to need it
        self._holder = array("i")  # the one that does, or _MANY
        self._run = array("i")

    def need(self, holder: int, thing: Chunk | ObjectKey, size_bytes: int) -> None:
        """Note that a holder needs a chunk or an object; holders come in the order of runs."""
        number = self._numbers.setdefault(thing, len(self._sizes))
        if number == len(self._sizes):
            self._sizes.append(size_bytes)
            for column in (self._last, self._holder, self._run):
                column.append(_NONE)
        last, run = self._last[number], self.holders[holder].run
        if last == holder:
            return
        self._last[number] = holder
        size_bytes = self._sizes[number]
        self.needed[holder] += size_bytes
        if last == _NONE or self.holders[last].run != run:
            self.run_needed[run] += size_bytes
        self._holder[number] = holder if last == _NONE else _MANY
        if last == _NONE:
            self._run[number] = run
        elif self._run[number] != run:
            self._run[number] = _MANY

    def things(self) -> Iterator[tuple[Chunk | ObjectKey, int, int, int]]:
        """Yield each chunk and object with its size, and its only holder and run or `_MANY`."""
        return zip(self._numbers, self._sizes, self._holder, self._run, strict=True)


def _count(
    workers: Workers,
    survey: Survey,
    objects: Mapping[ObjectKey, StoredFile],
    tally: _Tally,
) -> None:
    needs = [
        (number, place) for number, holder in enumerate(tally.holders) for place in holder.places
    ]

    def take(need: tuple[int, Place], done: Outcome[Placement]) -> None:
        (number, place), placement = need, done.result()
        for key in (place.manifest_key, place.placement_key):
            tally.need(number, key, objects[key].size_bytes)
        tables = [survey.tables[pack.key] for pack in placement.packs]
        for row in placement.rows:
            chunk = chunk_of(tables[row.pack][row.offset])
            tally.need(number, chunk, row.stored_bytes)

    workers.each(read_placement, needs, take, pool="small")


@dataclass(slots=True)
class _Sums:
    """Sums of bytes."""

    own: list[int]  # by holder, bytes that it alone needs
    run_own: list[int]  # by run, bytes that it alone needs
    shared: int = 0  # bytes that several holders need
    chunks: int = 0
    files: int = 0  # bytes of manifests and placements

    def add(self, tally: _Tally) -> None:
        """Add everything up."""
        for thing, size, holder, run in tally.things():
            if isinstance(thing, ObjectKey):
                self.files += size
            else:
                self.chunks += size
            if holder == _MANY:
                self.shared += size
            else:
                self.own[holder] += size
            if run != _MANY:
                self.run_own[run] += size


def _sum_up(
    survey: Survey,
    files: _Files,
    tally: _Tally,
    runs: Sequence[str],
) -> Usage:
    objects, logs = files.objects, files.logs
    sums = _Sums([0] * len(tally.holders), [0] * len(runs))
    sums.add(tally)
    for key in survey.packs:
        if key not in objects:
            raise missing(key)
    packs = sum(objects[key].size_bytes for key in survey.packs)
    unneeded = sum(one.size_bytes for one in objects.values()) - packs - sums.files
    chunks = sum(e.stored_bytes for table in survey.tables.values() for e in table.values())
    return Usage(
        runs=tuple(_run_usages(tally, sums, runs, logs)),
        own_bytes=sum(sums.own),
        shared_bytes=sums.shared,
        dead_bytes=chunks - sums.chunks,
        unneeded_bytes=unneeded + files.stale_bytes,
        table_bytes=packs - chunks,
        log_bytes=sum(logs.values()),
        other_bytes=files.other_bytes,
    )


def _run_usages(
    tally: _Tally, sums: _Sums, runs: Sequence[str], logs: Mapping[str, int]
) -> Iterator[RunUsage]:
    states: list[list[StateUsage]] = [[] for _ in runs]
    for number, one in enumerate(tally.holders):
        own = sums.own[number]
        freed = None if one.id is None else 0 if one.is_pinned else own
        states[one.run].append(StateUsage(one.ref, one.id, own, tally.needed[number] - own, freed))
    for number, run in enumerate(runs):
        own = sums.run_own[number]
        shared = tally.run_needed[number] - own
        yield RunUsage(run, tuple(states[number]), own, shared, logs.get(run, 0))
