"""Read a stored state of a run: its manifest, digest lists and chunks.

If a repack has moved the state meanwhile, the reader finds its new place in the log. It also makes
the error for a state that was collected. Users have a `holdfast.registry.loading.stored.Stored`,
which reads through this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from holdfast.registry.errors import MissingObject, Thinned
from holdfast.registry.history.actions import AddCheckpoint, Evict, Place, Thin
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import format_time
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.objects import NO_BASE, Manifest, Placement, TensorEntry, thinned
from holdfast.registry.store import (
    Cache,
    StateIndex,
    Store,
    Target,
    check_list_lengths,
    decode_manifest,
    fetch_chunks,
    index_chunks,
    read_lists,
    read_tensors,
)
from holdfast.registry.values import Digest, collector_paused

_T = TypeVar("_T")


class PlacedState(NamedTuple):
    """A stored state that was read: another state can be stored against it and share its chunks."""

    place: Place  # the place of its manifest and placement
    manifest: Manifest
    placement: Placement
    lists: Mapping[Digest, bytes]  # the bytes of its stored digest lists


def placed_state(store: Store, place: Place) -> PlacedState:
    """Read a state by its place; of a thinned one, the components that are there."""
    manifest = read_beside(store, place)
    placement = store.placement(place.placement_key)
    lists = read_lists(store, manifest, placement)
    return PlacedState(place, manifest.part(placement.components), placement, lists)


def read_beside(store: Store, place: Place) -> Manifest:
    """Return a manifest, and meanwhile have the store read its placement and keep it."""
    placement = store.pools.small.submit(store.placement, place.placement_key)
    manifest = store.manifest(place.manifest_key)
    placement.exception()  # only waits: who uses the placement gets the error
    return manifest


class StateReader:
    """Reads one stored state; any thread may.

    `chunk_digests` notes its tensor, and the next `index` or `read_chunks` finds the rows of all
    noted ones. For a chunk of another tensor the digests of the whole state are read.
    """

    def __init__(self, store: Store, log: RunLog, digest: Digest, ref: str) -> None:
        self.store = store  # the registry's objects
        self._log = log
        self.ref = ref  # its name, for messages
        self._indexed: tuple[Place, StateIndex] | None = None
        self._lists: dict[Digest, bytes] = {}
        # By identity the tensors noted by `chunk_digests` since the last `index` or `read_chunks`.
        self._asked: dict[int, TensorEntry] = {}
        self.digest = digest  # the state's id
        self.caches: Sequence[Cache] = ()  # where `read_chunks` looks before the store
        self.moved_bytes = 0  # stored bytes that `read_chunks` has read, of one thread

    @property
    def run_id(self) -> str:
        """The run that has, or had, the state."""
        return self._log.run_id

    @property
    def place(self) -> Place:
        """The place of its manifest and placement in this registry."""
        found = self._log.place_of(self.digest)
        if found is None:
            raise MissingObject(
                "the log gives no place for this checkpoint",
                where=self.ref,
                hint="Run `holdfast verify`; a mirror can restore it.",
            )
        return found

    @property
    def manifest(self) -> Manifest:
        """The state's manifest."""
        return self._relocated(lambda place: self.store.manifest(place.manifest_key))

    def begin(self) -> Manifest:
        """Return the manifest for a read of tensors, which needs the placement too."""
        return self._relocated(lambda place: read_beside(self.store, place))

    @property
    def placement(self) -> Placement:
        """Its placement: where its chunks are in this registry."""
        return self._relocated(self._placement)

    def give(
        self, wanted: Callable[[Manifest], Iterable[TensorEntry]]
    ) -> tuple[dict[str, list[str]], list[bytes]]:
        """Return manifest, placement and some tensors' digest lists as bytes, and their names."""

        def read(place: Place) -> tuple[dict[str, list[str]], list[bytes]]:
            coming = self.store.pools.small.submit(self.store.read, place.placement_key)
            data = [self.store.read(place.manifest_key), coming.result()]
            manifest = self._keep(place, *data)
            lists = self._index(place).learn(wanted(manifest)) if manifest.chunk_lists else {}
            keys = [str(place.manifest_key), str(place.placement_key)]
            return {"keys": keys, "lists": [*map(Digest.hex, lists)]}, [*data, *lists.values()]

        return self._relocated(read)

    def keep(self, names: Mapping[str, list[str]], given: Sequence[memoryview]) -> None:
        """Verify and keep what another process was given, where this log has the same place."""
        manifest, placement, *lists = given
        place = self.place
        if names["keys"] != [str(place.manifest_key), str(place.placement_key)]:
            return  # a repack has moved the state: this rank reads it for itself
        self._keep(place, bytes(manifest), bytes(placement))
        for name, data in zip(map(Digest.from_hex, names["lists"]), map(bytes, lists), strict=True):
            if Digest.of(data) == name:
                self._lists[name] = data

    def _keep(self, place: Place, manifest: bytes, placement: bytes) -> Manifest:
        made = decode_manifest(manifest, place.manifest_key)
        self.store.remember(place.manifest_key, made)
        key = place.placement_key
        self.store.remember(key, Placement.decode(placement, key.digest, where=str(key)))
        return made

    def base(self) -> PlacedState:
        """Read manifest, placement and digest lists, so that later states can share chunks."""

        def read(place: Place) -> PlacedState:
            # All by one place: a save may rely only on objects of a current place (W2a).
            base = placed_state(self.store, place)
            index_chunks(base.manifest, base.placement, base.lists)
            return base

        return self._relocated(read)

    def reading(self) -> AbstractContextManager[None]:
        """Pause the cycle collector while a state is read, unless it is large.

        Its views and places are gone afterwards: to look through those of a hundred thousand
        tensors takes as long as reading them.
        """
        return collector_paused(sum(self.placement.rows.columns[2]))

    def check_held(self, names: Iterable[str]) -> None:
        """Refuse components that a thinning gave up, before memory is allocated."""

        def check(place: Place) -> None:
            held = self._placement(place).components
            if held is not None and not set(names) <= set(held):
                raise thinned(held, self.ref, [name for name in names if name not in held])

        names = list(names)
        self._relocated(check)

    def read(self, manifest: Manifest, targets: list[Target]) -> None:
        """Fill memory with tensors, every byte verified."""
        self._relocated(
            lambda place: read_tensors(self.store, manifest, self._placement(place), targets)
        )

    def read_chunks(self, wanted: Mapping[Digest, memoryview]) -> None:
        """Fill memory with chunks, every byte verified."""

        def read(place: Place) -> int:
            rows = self._index_asked(place).holding(wanted)
            return fetch_chunks(self.store, self._placement(place), rows, wanted, self.caches)

        self.moved_bytes += self._relocated(read)

    def index(self) -> None:
        """Index the tensors whose digests were asked for: once, and not in every thread."""
        self._relocated(self._index_asked)

    def _index_asked(self, place: Place) -> StateIndex:
        index = self._index(place)
        asked, self._asked = self._asked, {}
        index.learn([*asked.values()])
        return index

    def chunk_digests(self, entry: TensorEntry) -> Sequence[Digest]:
        """Return the digests of a tensor's chunks, in the order of its grid; note the tensor."""
        if entry.chunk_list is None:
            self._asked[id(entry)] = entry
            return entry.chunks
        return entry.chunk_digests(self._relocated(lambda place: self._index(place).learn([entry])))

    def stored_bytes(self, entries: Iterable[TensorEntry]) -> int:
        """Return the bytes of packs that reading some tensors takes, bases of deltas included."""
        entries = list(entries)
        lists = self._relocated(lambda place: self._index(place).learn(entries))
        index = self._relocated(self._index).chunks
        rows, found = self.placement.rows, set[int]()
        for entry in entries:
            for digest in () if entry.inline is not None else entry.chunk_digests(lists):
                row = index.row(digest)
                while row != NO_BASE and row not in found:
                    found.add(row)
                    row = rows.bases[row]
        return sum(rows[row].stored_bytes for row in found)

    def check_lists(self, manifest: Manifest) -> None:
        """Check the lengths of digest lists against the packs, before memory is allocated."""
        if manifest.chunk_lists:
            self._relocated(lambda place: check_list_lengths(manifest, self._placement(place)))

    def _placement(self, place: Place) -> Placement:
        return self.store.placement(place.placement_key)

    def _index(self, place: Place) -> StateIndex:
        """Return the index of the chunks; it and the lists that it reads are kept."""
        if self._indexed is None or self._indexed[0] != place:
            placement = self._placement(place)
            self._indexed = (place, StateIndex(self.store, self.manifest, placement, self._lists))
        return self._indexed[1]

    def _relocated(self, read: Callable[[Place], _T]) -> _T:
        """Read by the place that the log gives; read again if a repack has moved the state."""
        while True:
            place = self.place
            try:
                return read(place)
            except MissingObject as error:
                run = self._log.refresh()
                if self.place != place:
                    continue
                if isinstance(error, Thinned):
                    error.where = self.ref
                    error.found = describe_thinning(self._log, self.digest) or error.found
                if self.digest in run.held:
                    raise
                evicted = (
                    one for one in self._log.history().evicted if one.manifest == self.digest
                )
                last = max(evicted, key=lambda one: one.n, default=None)
                raise MissingObject(
                    "this state was evicted, and its data was collected",
                    where=self.ref,
                    found=None if last is None else describe_eviction(self._log, last),
                    hint="A mirror that was synced before may still have it.",
                ) from error


def describe_thinning(log: RunLog, manifest: Digest) -> str | None:
    """Return the commit, time and reason of the last thinning of a state; reads the whole log."""
    last, numbers = None, set[int]()
    for commit in log.commits():
        for action in commit.actions:
            if isinstance(action, AddCheckpoint) and action.manifest == manifest:
                numbers.add(commit.n)
            for one in action.thinnings if isinstance(action, Thin) else ():
                if one.checkpoint in numbers:
                    last = commit, one
    if last is None:
        return None
    commit, one = last
    only = ", ".join(one.keep)
    return f"commit {commit.n} of {format_time(commit.time_ms)} kept only {only}: {one.reason}"


def describe_eviction(log: RunLog, record: CheckpointRecord) -> str | None:
    """Return the commit, time and reason of a checkpoint's eviction; `None` while it is kept.

    This reads the whole log.
    """
    if record.evicted is None:
        return None
    last = None
    for commit in log.commits():
        evictions = (e for one in commit.actions if isinstance(one, Evict) for e in one.evictions)
        if any(one.checkpoint == record.n for one in evictions):
            last = commit
    if last is None:  # copied from another registry, with its own history
        return record.evicted
    return f"commit {last.n} of {format_time(last.time_ms)}: {record.evicted}"
