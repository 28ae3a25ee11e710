"""List the objects and the files of runs in a registry, and find the objects that runs need.

A placement names every pack, so manifests and packs are never opened here. A file that cannot be
read or is not known is an error and never skipped: a collector that overlooks a reference deletes
the object that it names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from math import inf
from threading import Lock
from typing import Any

from holdfast.backends import ObjectInfo
from holdfast.backends.escape import quoted
from holdfast.registry.errors import (
    Hint,
    IntegrityError,
    Malformed,
    MissingObject,
    ObjectNotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.history import Epochs, RunLog, Slots
from holdfast.registry.history.actions import Action, Forget, Place, Recover
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.objects import (
    KINDS,
    RUNS,
    ObjectKey,
    Placement,
    content_bytes,
    is_run_id,
    parse_number,
    records_in,
    slot_key,
    snapshot_slot,
)
from holdfast.registry.store import Outcome, Store, Workers, gaps, in_batches
from holdfast.registry.upkeep.gc_report import Tally
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.sorted_rows import LISTED, SortedRows, object_rows
from holdfast.registry.values import Digest

_FOREIGN = (
    "No file of a registry has this name: move it away, or upgrade if a newer Holdfast put it."
)
#: The keys of one page of a listing of S3.
_PAGE = 1000
#: Names of a listing that are taken together.
_TOGETHER = 2**13
#: Bytes of placements that are kept while runs are read, and of one of them without its packs.
_KNOWN_BYTES, _PLACEMENT_BYTES = 2**27, 512
#: Of placements that unpack to more than this, one is in memory at a time.
_LARGE_BYTES, _TURN = 2**18, Lock()
#: Errors of a run that cannot be read, which an operator may give up.
UNREADABLE = (IntegrityError, UnsupportedFormat)


class Listing:
    """The objects on a store that are in a shard: a row of each, and facts about all of them."""

    def __init__(self, shard: Shard) -> None:
        self.rows = SortedRows(shard=shard)
        self.tally = Tally()
        self.newest_s = 0.0  # when the newest one was put, seconds by the store's clock
        self.highest: ObjectKey | None = None  # the one of the highest generation
        self._lock = Lock()  # of the threads that list parts of it

    def add(self, infos: Sequence[ObjectInfo]) -> None:
        """Take objects of a listing."""
        keys = [_object_key(info) for info in infos]
        rows = object_rows((key.record for key in keys), LISTED)
        rows["size"] = [info.size_bytes for info in infos]
        rows["put_s"] = [info.modified_s for info in infos]
        with self._lock:
            self.rows.add(rows)
            self.tally += Tally(len(rows), int(rows["size"].sum()))
            self.newest_s = max(self.newest_s, *rows["put_s"].tolist())
            known = keys if self.highest is None else [self.highest, *keys]
            self.highest = max(known, key=lambda key: key.generation)


@dataclass(slots=True)
class RunFiles:
    """The files of one run, from a listing."""

    run_id: str
    #: When each slot was put, from slot 0 on, seconds by the store's clock.
    slots_s: list[float] = field(default_factory=list)
    snapshots: list[ObjectInfo] = field(default_factory=list)  # its snapshots, newest first
    newest: int = -1  # slot of the newest snapshot
    beyond: list[ObjectInfo] = field(default_factory=list)  # snapshots of slots that are lost

    def packed(self) -> bytes:
        """Return the times and the newest snapshot in 8 bytes each."""
        return array("d", (self.newest, *self.slots_s)).tobytes()

    @classmethod
    def unpacked(cls, run_id: str, packed: bytes) -> RunFiles:
        """Return the files of a run without the names of its snapshots."""
        newest, *slots_s = array("d", packed)
        return cls(run_id, slots_s, newest=int(newest))


def list_objects(store: Store, shard: Shard | None = None) -> Listing:
    """List every object of a shard; many of a kind are listed in parts, several at once."""
    shard = shard or Shard()
    found = Listing(shard)

    def take(prefix: str, **options: Any) -> list[ObjectInfo]:
        infos, waiting = list[ObjectInfo](), iter(store.backend.list(prefix, **options))
        while some := list(islice(waiting, _TOGETHER)):
            found.add(some)
            infos = some
        return infos

    if not shard.is_all:
        folders = [one for kind in KINDS for one in shard.prefixes(store.backend, kind)]
        for _ in store.pools.bulk.map(take, folders):
            pass
        return found
    firsts = store.pools.bulk.map(partial(take, limit=_PAGE), [f"{k}/" for k in KINDS])
    rest = [part for first in firsts if len(first) == _PAGE for part in _rest(store, first[-1].key)]
    for _ in store.pools.bulk.map(lambda part: take(part[0], start_after=part[1]), rest):
        pass
    return found


def _rest(store: Store, last: str) -> list[tuple[str, str]]:
    """Return prefix and start of the listings that go on after the first page of a kind."""
    kind, folder = last.split("/")[:2]
    if not folder.startswith("0"):  # digests are spread evenly: fewer than 16 pages are left
        return [(f"{kind}/", last)]
    # From the names that are there, since foreign ones must be found as well.
    folders = store.backend.list(f"{kind}/", delimiter=True)
    return [(prefix, last) for prefix in sorted({one.key[: len(kind) + 2] for one in folders})]


def _object_key(info: ObjectInfo) -> ObjectKey:
    try:
        return ObjectKey.parse(info.key)
    except Malformed as error:
        error.hints = Hint.of(_FOREIGN)
        raise


def list_run_ids(store: Store, known: Collection[str] = ()) -> list[str]:
    """Return the ids of all runs."""
    names = []
    for info in store.backend.list(RUNS, delimiter=True):
        name, is_folder = info.key[len(RUNS) :].rstrip("/"), info.key.endswith("/")
        if name not in known and not (is_folder and is_run_id(name)):
            raise Malformed("not a run", where=info.key, hint=_FOREIGN)
        names.append(name)
    return names


def list_by_run(
    store: Store, names: Collection[str] | None = None
) -> Iterator[tuple[str, Iterable[ObjectInfo]]]:
    """Yield each name among the runs with its files, in one listing; or each of `names` in one."""
    if names is None:
        return groupby(store.backend.list(RUNS), key=lambda info: info.key.split("/")[1])

    def files(name: str) -> tuple[str, list[ObjectInfo]]:
        # Also a file of this name, which is no run.
        listed = store.backend.list(f"{RUNS}{name}")
        return name, [info for info in listed if f"{info.key}/".startswith(f"{RUNS}{name}/")]

    return in_batches(store.pools.small, files, sorted(names))


def run_files(
    store: Store, run_id: str, infos: Iterable[ObjectInfo], *, accepts: bool = False
) -> RunFiles:
    """Return the files of one run, from a listing; with `accepts` the log may have lost its end."""
    files = RunFiles(run_id)
    times: dict[int, float] = {}
    for info in infos:
        parts = info.key.split("/")
        if len(parts) != 4 or not is_run_id(run_id) or parts[2] not in ("log", "snapshots"):
            raise Malformed("not a file of a run", where=info.key, hint=_FOREIGN)
        number = parse_number(info.key)
        if parts[2] == "snapshots":
            files.snapshots.append(info)
        else:
            times[number] = info.modified_s
    gap = next(gaps(store.backend, times, partial(slot_key, run_id)), None)
    if gap is not None:
        raise _lost(run_id, gap)
    # Slots that are not in the listing were put while it went on.
    files.slots_s = [times.get(number, inf) for number in range(max(times, default=-1) + 1)]
    while not _has_slot(store, files):
        if not accepts:
            raise _lost(
                run_id,
                len(files.slots_s),
                " Without one, `holdfast sync MIRROR REGISTRY` brings its commits back from a "
                f"mirror; then `holdfast gc --accept {quoted(run_id)}` takes the log as it is.",
            )
        files.beyond.append(files.snapshots.pop(0))
    return files


def _has_slot(store: Store, files: RunFiles) -> bool:
    """Return whether a log has the slot of its newest snapshot: its newest slots may be deleted."""
    files.newest = newest = snapshot_slot(files.snapshots[0].key) if files.snapshots else -1
    if newest >= len(files.slots_s):
        try:
            # It may have been put while the listing went on.
            store.backend.stat(slot_key(files.run_id, newest))
        except ObjectNotFound:
            return False
    return True


def _lost(run_id: str, slot: int, way_out: str = "") -> Malformed:
    return Malformed(
        "a slot of the log is gone",
        where=slot_key(run_id, slot),
        hint=f"It was deleted from outside; put it back from a backup of this store.{way_out}",
    )


class Needs:
    """Finds the objects that runs need, by their placements; objects are told by their records.

    Placements are immutable, so each is read once, however many runs name it, while there is room
    for what it says.
    """

    def __init__(self, workers: Workers, unlisted: Collection[ObjectKey] = ()) -> None:
        self._workers = workers
        self._unlisted = unlisted  # placements that notes name and that a listing did not have
        self._packs: dict[ObjectKey, tuple[Digest, bytes]] = {}  # the records of their packs
        self._room_bytes = _KNOWN_BYTES
        self._lock = Lock()

    def learn(self, place: Place, packs: Iterable[ObjectKey]) -> bool:
        """Take the packs of a placement that was read before; return if it is still there."""
        key = place.placement_key
        if key in self._unlisted:
            return False
        if key not in self._packs:
            self._know(key, (place.manifest, b"".join(pack.record for pack in packs)))
        return True

    def known(self, places: Iterable[Place]) -> dict[ObjectKey, tuple[ObjectKey, ...]]:
        """Return the packs of those placements that were read."""
        found = ((place.placement_key, self._packs.get(place.placement_key)) for place in places)
        return {
            key: tuple(map(ObjectKey.of_record, records_in(known[1])))
            for key, known in found
            if known
        }

    def of(self, run: RunManifest, but: Collection[Place] = ()) -> set[bytes]:
        """Return every object that a run needs, but for some of its places."""
        places = (held_place(run, manifest) for manifest in run.held)
        needed: set[bytes] = set()

        def take(place: Place, packs: Outcome[bytes]) -> None:
            needed.update((place.manifest_key.record, place.placement_key.record))
            needed.update(records_in(packs.result()))

        self._read([place for place in places if place not in but], take)
        return needed

    def of_evicted(self, places: Iterable[Place]) -> set[bytes]:
        """Return the objects of states that may be evicted already.

        Of a state whose placement is gone or damaged, only manifest and placement are returned.
        """
        needed: set[bytes] = set()

        def take(place: Place, packs: Outcome[bytes]) -> None:
            needed.update((place.manifest_key.record, place.placement_key.record))
            if not isinstance(packs.error, IntegrityError):
                needed.update(records_in(packs.result()))

        self._read(places, take)
        return needed

    def _read(
        self, places: Iterable[Place], take: Callable[[Place, Outcome[bytes]], object]
    ) -> None:
        """Take the records of the packs that each place names; read what is not known."""
        unknown = []
        for place in places:
            known = self._packs.get(place.placement_key)
            if known is None:
                unknown.append(place)
            else:
                take(place, _packs_of(place, Outcome(known)))

        def learn(place: Place, found: Outcome[tuple[Digest, bytes]]) -> None:
            if found.value is not None:
                self._know(place.placement_key, found.value)
            take(place, _packs_of(place, found))

        self._workers.each(_read_packs, unknown, learn, pool="small")

    def _know(self, key: ObjectKey, known: tuple[Digest, bytes]) -> None:
        with self._lock:
            if self._packs.setdefault(key, known) is known:
                self._room_bytes -= _PLACEMENT_BYTES + len(known[1])
            while self._room_bytes < 0:
                oldest = self._packs.pop(next(iter(self._packs)))
                self._room_bytes += _PLACEMENT_BYTES + len(oldest[1])


def _read_packs(store: Store, place: Place) -> tuple[Digest, bytes]:
    """Return the manifest of a placement, and the records of its packs."""
    key = place.placement_key
    data = store.read(key)  # not from the handle's cache: the bytes on the store count
    with _TURN if content_bytes(data) > _LARGE_BYTES else nullcontext():
        placement = Placement.decode(data, key.digest, where=str(key))
        return placement.manifest, b"".join(pack.key.record for pack in placement.packs)


def _packs_of(place: Place, found: Outcome[tuple[Digest, bytes]]) -> Outcome[bytes]:
    """Return the packs that a placement names, unless it is that of another manifest."""
    if found.value is None:
        return Outcome(None, found.error)
    manifest, packs = found.value
    if manifest == place.manifest:
        return Outcome(packs)
    where, wanted = place.placement_key, place.manifest
    return Outcome(
        None,
        Malformed("another checkpoint's placement", where=where, expected=wanted, found=manifest),
    )


class KeptPlaces:
    """The places of everything that a log ever named, but for those that a repack replaced."""

    def __init__(self, packed: bytes = b"") -> None:
        first, *lines = packed.split(b"\n")
        self._next_slot = int(first or 0)
        self._by_manifest: dict[Digest, list[Place]] = {}
        for place in (Place.parse(line, where="places of a log") for line in lines):
            self._by_manifest.setdefault(place.manifest, []).append(place)

    def packed(self) -> bytes:
        """Return them as bytes: those of all logs of a mirror do not fit in memory."""
        return b"\n".join((b"%d" % self._next_slot, *(one.encode() for one in self.places)))

    def read(self, log: RunLog) -> None:
        """Read further slots of the log, up to where it was replayed."""
        for slot in log.fetch(range(self._next_slot, log.run.next_slot)):
            for _, line in slot.lines:
                if isinstance(line, Place):
                    known = self._by_manifest.setdefault(line.manifest, [])
                    # Beside a commit, a place may cover less of its state than the one before it.
                    known[len(known) if slot.commits else -1 :] = [line]
        self._next_slot = log.run.next_slot

    @property
    def places(self) -> list[Place]:
        """The places."""
        return [place for some in self._by_manifest.values() for place in some]


def held_place(run: RunManifest, manifest: Digest) -> Place:
    """Return the place of a manifest that a run holds."""
    try:
        return run.by_manifest[manifest]
    except KeyError as error:
        raise MissingObject(
            "a state that the run holds has no place in this registry",
            where=f"{run.run_id}/{manifest.short}",
            hint="Run `holdfast verify` to see what is affected; a mirror can restore it.",
        ) from error


def fold_recent(log: RunLog, recent: Sequence[Slot]) -> set[Place]:
    """Fold in the slots within the grace; return the places of all states held within it.

    These are the states held before the grace, those placed since, and those that an undo or a
    save of the same state named since without a new place. Without recent slots nothing is
    returned: the states that the run holds are needed anyway.
    """
    if not recent:
        return set()
    before = log.run
    needed = {place for place in before.places if place.manifest in before.held}
    needed |= {line for slot in recent for _, line in slot.lines if type(line) is Place}
    now = log.fold(recent)
    actions = [a for slot in recent for _, commit in slot.commits for a in commit.actions]
    named = {manifest for action in actions for manifest in _named(now, action)}
    return needed | {now.by_manifest[manifest] for manifest in named & now.by_manifest.keys()}


def _named(run: RunManifest, action: Action) -> Iterator[Digest]:
    """Yield the manifests that an action names; other digests in it do no harm."""
    if isinstance(action, Recover):
        for record in map(run.by_n.__getitem__, action.checkpoints):
            yield from (record.manifest, *record.companions.values())
    for value in action.as_dict().values():
        values = value.values() if isinstance(value, Mapping) else (value,)
        yield from (one for one in values if isinstance(one, Digest))


def is_forgotten(store: Store, forgotten: Mapping[str, int], run_id: str) -> bool:
    """Return whether an epoch says that a run is forgotten, and its log still ends there.

    `forgotten` is the slot that ends the log of each run, by the newest epoch.
    """
    end = forgotten.get(run_id)
    if end is None or not is_run_id(run_id):
        return end is not None  # no program can write to a run of another name
    with suppress(*UNREADABLE):
        slot = Slots(store, run_id).get(end)
        return slot is not None and any(isinstance(line, Forget) for _, line in slot.lines)
    return False


def given_up(store: Store) -> Mapping[str, bool]:
    """Return the runs that the newest epoch says are forgotten, each with whether that counts."""
    epochs = Epochs(store)
    with suppress(*UNREADABLE):
        forgotten = epochs.header(epochs.newest()).forgotten or {}
        return {name: is_forgotten(store, forgotten, name) for name in forgotten}
    return {}


def with_way_out(error: RegistryError, run_id: str, effect: str) -> RegistryError:
    """Return the error of an unreadable run; its hint says how an operator gives the run up."""
    last = (
        f"If nothing can mend the run, `holdfast gc --forget {quoted(run_id)}` gives it up, and "
        f"{effect}."
    )
    error.hints = Hint.of(error.hints, last)
    return error
