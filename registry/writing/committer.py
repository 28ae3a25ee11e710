"""The one loop that carries a change of a run through, and the writing of its states.

A `Committer` belongs to one handle of a run. It checks the log, lets the change write its objects,
and puts its lines into the next slot. It starts again if a sweep has condemned an object, or the
run has changed. `holdfast.registry.writing.change` defines a change. The rules for objects are in
`holdfast.registry.writing.object_writer`, those for slots in `holdfast.registry.history.log`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar

from holdfast.registry import pytree
from holdfast.registry.errors import Conflict, Damaged, IntegrityError, MissingObject
from holdfast.registry.history import PlacedState, Races, RunLog, StateReader
from holdfast.registry.history.actions import Line, Place
from holdfast.registry.history.replay import Forgotten, RunManifest
from holdfast.registry.objects import INLINE_BYTES, TRAILER_BYTES, PackTable, grid, raw_entries
from holdfast.registry.objects.codecs import RAW
from holdfast.registry.pytree import ArrayLeaf, FlatState
from holdfast.registry.store import Store, read_lists
from holdfast.registry.values import Digest, ProcessLock, collector_paused
from holdfast.registry.writing.adopting import adopt
from holdfast.registry.writing.change import Actions, Change, Composed, Stale
from holdfast.registry.writing.deltas import Trials
from holdfast.registry.writing.object_writer import ChosenKeys, Condemned, Writer, check_room
from holdfast.registry.writing.placing import Written, cut_state, locations_of
from holdfast.registry.writing.saving import cut_groups, group_name, write_state
from holdfast.registry.writing.storing import Storing, codec_and_distance

# Check that a state fits into the free space of its store, before anything is written.


def check_state_fits(
    store: Store, writer: Writer, state: FlatState, bases: Sequence[PlacedState], codec: str
) -> None:
    """Refuse a state that cannot fit."""
    free_bytes = store.backend.free_bytes()
    if codec != RAW or free_bytes is None or _size_bytes(state) <= free_bytes:
        return
    needed_bytes = 0
    for pack_bytes in _new_packs(store, writer, state, locations_of(bases).keys()):
        needed_bytes += pack_bytes
        check_room(store.backend, needed_bytes)


def _size_bytes(state: FlatState) -> int:
    return sum(leaf.nbytes for part in state.components for leaf in part.leaves)


def _new_packs(
    store: Store, writer: Writer, state: FlatState, stored: Collection[Digest]
) -> Iterator[int]:
    """Yield the sizes of the packs that a save would send."""
    seen: set[Digest] = set(stored)
    for group in cut_groups(_chunks(state)):
        views = [leaf.buffer()[start:stop] for leaf, start, stop in group]
        fresh: dict[Digest, int] = {}
        for digest, view in zip(store.pools.hashing.map(_hash, views), views, strict=True):
            if digest not in seen:
                seen.add(digest)
                fresh[digest] = len(view)
        for leaf, _, stop in group:
            if stop == leaf.nbytes:
                leaf.release()
        if fresh:
            table = PackTable(raw_entries([*fresh], [*fresh.values()])).encode()
            size_bytes = sum(fresh.values()) + len(table) + TRAILER_BYTES
            if writer.usable("packs", Digest.of(table), size_bytes) is None:
                yield size_bytes


def _chunks(state: FlatState) -> Iterator[tuple[str, int, tuple[ArrayLeaf, int, int]]]:
    """Yield each chunk: the name of its kind of pack, its length, and its leaf, start and stop."""
    for part in state.components:
        for leaf in part.leaves:
            if leaf.nbytes <= INLINE_BYTES:
                continue
            start = 0
            for size in grid(leaf.dtype, leaf.shape).sizes():
                yield group_name(part), size, (leaf, start, start + size)
                start += size


def _hash(view: memoryview) -> Digest:
    return Digest(hashlib.sha256(view).digest())


#: Checkpoints whose chunks a save can use again.
MAX_BASES = 8
#: States that a handle remembers, so that it need not read them again: bases of its states and of
#: their companions.
_KEPT_BASES = 3 * MAX_BASES
#: What a sweep has condemned is written again this often; so is, after this time, what other
#: writers have overtaken.
_ATTEMPTS = 5
_PATIENCE_S = 60.0

_T = TypeVar("_T")


class Committer:
    """Writes states of one run, and commits changes of it.

    Attributes:
        store: The registry's objects.
        log: The run's log.
        writer: Chooses the keys.
        await_earlier: Called before a commit: waits for saves that were acknowledged before it and
            are not in the log yet. Without a journal there are none.
    """

    def __init__(self, store: Store, log: RunLog) -> None:
        self.store = store
        self.log = log
        self.writer = Writer(store, log)
        self.await_earlier: Callable[[], None] = _nothing
        self._bases: dict[Digest, PlacedState] = {}
        self._trials = Trials()
        self._lock = ProcessLock()

    def commit(self, change: Change | Actions, *, waits: bool = True) -> RunManifest:
        """Carry a change through: its objects first, then its lines in one slot."""
        if waits:
            self.await_earlier()
        if not isinstance(change, Change):
            change = Composed(change)
        # A change that writes no objects need not wait for a running save.
        with self._lock.here() if change.writes else nullcontext():
            races, overtaken = Races(_PATIENCE_S), 0
            while overtaken < _ATTEMPTS:
                try:
                    run = self._attempt(change)
                except Stale:
                    overtaken += not races.lose()
                    continue
                if run is None:
                    overtaken += 1
                    continue
                for base in change.bases():
                    if run.is_placed(base.place):
                        self._keep(base)
                return run
        raise Conflict(
            f"sweeps or other writers overtook this {change.noun} {_ATTEMPTS} times in a row",
            where=self.log.run_id,
            hint=f"{change.given_up}; try again, and let collectors run less often.",
        )

    def _attempt(self, change: Change) -> RunManifest | None:
        """Write the objects of a change and put its slot; return `None` to write them again.

        Races for the slot are not counted here: `RunLog.append` asks for the lines again.
        """
        if change.writes:
            self._recalling(lambda: change.check(self.log.run))
        read = self.log.run.next_slot
        look = self.log.look()  # while objects are sent
        try:
            chosen = self._recalling(change.write) if change.writes else ChosenKeys()
        except MissingObject:
            look.outcome.result()
            if not self._has_moved(change, read):
                raise
            return None
        try:
            return self.writer.commit(partial(_lines, change), chosen, look)
        except Condemned:
            # There was a sweep since the keys were chosen; it may have condemned bases too.
            self._bases.clear()
        return None

    def _recalling(self, act: Callable[[], _T]) -> _T:
        """Call a function that may need the records of evicted checkpoints."""
        for _ in range(_ATTEMPTS):
            with suppress(Forgotten):
                return act()
            # Once is enough, unless another thread refreshes the run and makes it compact again.
            self.log.recall()
        return act()

    def _has_moved(self, change: Change, read: int) -> bool:
        """Return whether the run, or the source of a change, has changed meanwhile."""
        is_different = change.read_again()
        run = self.log.refresh()
        if run.next_slot == read:
            return is_different
        # If a state was evicted and collected meanwhile, the error of the change says it better.
        with suppress(Stale):
            try:
                _lines(change, run)
            except Forgotten:
                _lines(change, self.log.history())
        return True

    def write(
        self,
        state: FlatState,
        bases: Sequence[PlacedState],
        storing: Storing | None = None,
        watched: Sequence[str] = (),
    ) -> Written:
        """Put a state on the store."""
        codec, every = codec_and_distance(storing or Storing(), self.store.config)
        check_state_fits(self.store, self.writer, state, bases, codec)
        return write_state(
            self.store,
            self.writer,
            state,
            bases,
            codec,
            every,
            self._trials,
            watched,
        )

    def write_plain(self, state: object) -> Written:
        """Put a state on the store that shares no chunks with checkpoints."""
        with collector_paused():
            flat = state if isinstance(state, FlatState) else pytree.flatten(state)
        pytree.await_devices(flat)
        return self.write(flat, ())

    def adopt(
        self, source: Store, places: Sequence[Place], *, proves: bool = True
    ) -> list[Written]:
        """Import stored states of another registry, a parent run or an eviction.

        Without `proves` packs that are there are not read: a fork's saves look at what they need.
        """
        adopted, chosen = adopt(source, self.store, self.writer, places, proves=proves)
        return [Written(self._placed(place), chosen, 0) for place in adopted]

    def _placed(self, place: Place) -> PlacedState:
        manifest = self.store.manifest(place.manifest_key)
        placement = self.store.placement(place.placement_key)
        return PlacedState(place, manifest, placement, read_lists(self.store, manifest, placement))

    def cut(self, manifest: Digest, names: Sequence[str]) -> Written:
        """Make a state of some components of a stored one; no chunk is stored again."""
        return cut_state(self.store, self.writer, self.proven(manifest), names)

    def proven(self, manifest: Digest) -> PlacedState:
        """Return a state of the run; its packs are read if nothing shows that they are sound."""
        base = self.base(manifest)
        if not self.writer.trusts(base):
            for pack in base.placement.packs:
                if not self.writer.proves(pack):
                    raise Damaged(
                        "a pack has other bytes than its name promises",
                        where=f"{self.store.backend.url}/{pack.key}",
                        hint="Nothing was committed. `holdfast repair` can bring it from a mirror.",
                    )
        return base

    def base(self, manifest: Digest) -> PlacedState:
        """Return a state of the run with its place."""
        reader = StateReader(self.store, self.log, manifest, f"{self.log.run_id}/{manifest.short}")
        kept = self._bases.get(manifest)
        if kept is None or kept.place != reader.place:
            kept = reader.base()
        self._keep(kept)
        return kept

    def _keep(self, base: PlacedState) -> None:
        self._bases.pop(base.manifest.digest, None)
        self._bases[base.manifest.digest] = base
        while len(self._bases) > _KEPT_BASES:
            del self._bases[next(iter(self._bases))]

    def choose_bases(self, wanted: Iterable[Digest]) -> list[PlacedState]:
        """Return the first `MAX_BASES` of these states that are usable as bases."""
        held = self.log.run.held
        bases: dict[Digest, PlacedState] = {}
        for manifest in wanted:
            if len(bases) == MAX_BASES:
                break
            if manifest in bases or manifest not in held:
                continue
            try:
                base = self.base(manifest)
            except IntegrityError:
                continue  # a damaged state is no base; its chunks are stored again
            if self.writer.trusts(base):
                bases[manifest] = base
        return list(bases.values())


def _nothing() -> None:
    """Wait for nothing."""


def _lines(change: Change, run: RunManifest) -> Sequence[Line | bytes] | None:
    change.check(run)
    return change.lines(run)
