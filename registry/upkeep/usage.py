"""Count the bytes that runs and checkpoints use on the store.

Counts stored bytes: chunks as they are encoded, manifests, placements. Each counts for every state
that names it, a delta's base too. A chunk that is stored several times counts once, as a repack
would leave it; the other copies count as `dead_bytes`. Only placements and tables of packs are
read, no chunks, and nothing is written. The table of an archived pack cannot be read: the chunks
that placements name count, and all its other bytes as its table.

The memory does not grow with chunks and objects, but with states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import (
    MissingObject,
    RegistryError,
    StoreFull,
    StoreUnavailable,
    WorkersFailed,
)
from holdfast.registry.history import kept_ref, stale_snapshots
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import KINDS, RUNS, snapshot_prefix
from holdfast.registry.store import Store, Workers
from holdfast.registry.upkeep.live import Listing, held_place, list_objects
from holdfast.registry.upkeep.repacking.survey import Holder, Tally, blamed, read_runs
from holdfast.registry.values import Digest

#: Attempts to read the registry before an object that is gone counts as lost.
_ATTEMPTS = 3


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
    #: Whether it was dropped and `gc` frees it only after the delay of the registry.
    is_hidden: bool = False

    @property
    def needed_bytes(self) -> int:
        """Bytes that it needs, also where another run needs them too."""
        return self.own_bytes + self.shared_bytes

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


#: Returns the group of a run, a phase and a ref; the phase is empty for what is no checkpoint.
Group = Callable[[RunManifest, str, str], str]


def measure(store: Store, *, executor: Executor | None = None, by: Group | None = None) -> Usage:
    """Count the bytes on a store by the states that need them; see `Registry.usage`.

    With `by`, what is counted as a run is a group of states; it has no log.
    """
    workers = Workers(executor, store)
    damaged: dict[str, RegistryError] = {}
    attempts = 0
    while True:
        failed: dict[str, RegistryError] = {}
        try:
            return _measure(store, workers, damaged, failed, by)
        except (StoreFull, StoreUnavailable, WorkersFailed):
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
    by: Group | None,
) -> Usage:
    """Count once, without the damaged runs."""
    runs: dict[str, int] = {}
    hidden: set[str] = set()
    holders: list[Holder] = []
    for run in read_runs(store, damaged):
        with blamed(run.run_id, failed):
            found = list(_holders(run))
        if by is None:
            runs[run.run_id] = len(runs)
            hidden |= {run.run_id} if run.is_hidden else set()
        for one in found:
            one.run = runs.setdefault(by(run, one.phase, one.ref) if by else run.run_id, len(runs))
        holders += found
    holders.sort(key=lambda one: one.run)  # those of a group one after another
    tally = Tally(list(runs), holders, failed)
    tally.read(workers)
    # After the logs, so that every object that they need is in the listing.
    files = _list(store)
    tally.resolve(workers, files.objects.rows)
    tally.need_files(files.objects.rows)
    tally.add_up()
    return replace(_sum_up(tally, files, hidden), damaged=dict(sorted(damaged.items())))


def _holders(run: RunManifest) -> Iterator[Holder]:
    """Yield the parts of a run that hold states: the checkpoints, then the rest by name."""
    checkpoints: dict[int, Holder] = {}
    for record in () if run.holds_nothing else run.checkpoints:
        if record.evicted is None:
            holder = Holder(0, f"{run.run_id}/{kept_ref(record)}", record.manifest)
            holder.phase, holder.run_id = record.phase, run.run_id
            for manifest in (record.manifest, *record.companions.values()):
                holder.places[held_place(run, manifest)] = None
            checkpoints[record.n] = holder
    pins = {pin.ref: pin for pin in run.pins if pin.kind in ("gate", "tag")}
    for pin in pins.values():
        if pin.checkpoint in checkpoints:
            checkpoints[pin.checkpoint].is_pinned = True
    heads = {kept_ref(one) for one in run.checkpoints}
    rest: dict[str, Holder] = {}
    for manifest, refs in run.holders().items():
        for ref in refs:
            name = "/".join(ref.split("/")[:2])
            # Counted already, with its checkpoint.
            if name in pins or name in heads or ref.split("/")[0] in heads:
                continue
            holder = rest.setdefault(name, Holder(0, f"{run.run_id}/{name}", None))
            holder.run_id = run.run_id
            holder.places[held_place(run, manifest)] = None
    yield from checkpoints.values()
    yield from rest.values()


@dataclass(slots=True)
class _Files:
    """The files on the store."""

    objects: Listing
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


def _sum_up(tally: Tally, files: _Files, hidden: Collection[str]) -> Usage:
    total = files.objects.tally.size_bytes
    chunks, archived, small = tally.by_kind
    held = tally.tables + archived
    return Usage(
        runs=tuple(_run_usages(tally, files.logs, hidden)),
        own_bytes=int(tally.own.sum()),
        shared_bytes=tally.shared,
        dead_bytes=held - chunks - archived,
        unneeded_bytes=total - tally.packs - small + files.stale_bytes,
        table_bytes=tally.packs - held,
        log_bytes=sum(files.logs.values()),
        other_bytes=files.other_bytes,
    )


def _run_usages(
    tally: Tally, logs: Mapping[str, int], hidden: Collection[str]
) -> Iterator[RunUsage]:
    states: list[list[StateUsage]] = [[] for _ in tally.runs]
    for one, own, needed in zip(
        tally.holders, tally.own.tolist(), tally.needed.tolist(), strict=False
    ):
        freed = None if one.id is None else 0 if one.is_pinned else own
        states[one.run].append(StateUsage(one.ref, one.id, own, needed - own, freed))
    for run, held, own, needed in zip(
        tally.runs, states, tally.run_own.tolist(), tally.run_needed.tolist(), strict=True
    ):
        yield RunUsage(run, tuple(held), own, needed - own, logs.get(run, 0), run in hidden)
