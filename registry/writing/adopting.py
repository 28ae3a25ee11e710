"""Import states that are stored: in another registry, a parent run, an eviction or a journal.

Each object gets a key that may be named (`holdfast.registry.writing.object_writer`): an existing
object, or a verified copy. The keys are chosen here; workers copy objects to them.
Sync, repair, a fork, an undone eviction and the carrier of a journal use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import compress

from holdfast.registry.errors import IntegrityError
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import Manifest, ObjectKey, PackRef, Placement, open_pack
from holdfast.registry.store import (
    Claims,
    Outcome,
    Store,
    Workers,
    index_chunks,
    read_lists,
    results,
    verify_pack_chunks,
)
from holdfast.registry.writing.object_writer import (
    ChosenKeys,
    NewPack,
    ObjectWriter,
    placed_keys,
    put_pack,
    put_small,
)
from holdfast.registry.writing.placing import make_place

#: States that are adopted together, and the most bytes that their placements may take in memory.
_STATES_AT_ONCE = 1024
_PLACEMENT_BYTES = 64 * 2**20
#: Placements that are read at once.
_READ_AT_ONCE = 64

#: Called for each pack, with whether it had to be sent.
OnPack = Callable[[PackRef, bool], object]
_Placed = tuple[Place, Placement]


@dataclass(frozen=True, slots=True)
class PackCopy:
    """A pack to copy, as a unit of work."""

    source: PackRef  # the pack at the source
    new: NewPack  # its key at the destination


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A manifest and a placement to put, as a unit of work."""

    manifest: ObjectKey  # the key of the manifest at the source
    placement: Placement  # the placement at the destination; its packs are there
    generation: int  # the epoch that the writer has observed: both get keys of it


def adopt(
    source: Store,
    destination: Store,
    writer: ObjectWriter,
    wanted: Sequence[Place],
    on_pack: OnPack | None = None,
    workers: Workers | None = None,
    *,
    verifies: bool = True,
    claims: Claims | None = None,
) -> tuple[list[Place], ChosenKeys]:
    """Make sure that a registry has placed manifests under keys that may be named.

    `claims` are shared by threads that copy at once, so that each pack is sent once.
    """
    writer.observe()  # before any key is chosen, and by one thread
    adoption = _Adoption(workers or Workers(None, source, destination, writes=True), writer)
    adoption.verifies = verifies
    if adoption.verifies:
        adoption.covered = _newest_packs(destination, writer.log.run)
    for some in _together(source, wanted):
        packs = dict.fromkeys(ref for _, placement in some for ref in placement.packs)
        with claims.of(ref.key.digest for ref in packs) if claims else nullcontext():
            adoption.copy_packs(destination, packs, on_pack)
        adoption.put_states(some)
    return adoption.places, ChosenKeys(frozenset(adoption.keys))


def _together(source: Store, wanted: Sequence[Place]) -> Iterator[list[_Placed]]:
    """Yield states that are adopted together, with their placements at the source."""
    some: list[_Placed] = []
    held = 0
    for start in range(0, len(wanted), _READ_AT_ONCE):
        few = wanted[start : start + _READ_AT_ONCE]
        keys = [place.placement_key for place in few]
        read = Workers(None, source).all(Store.placement, keys, pool="small")
        for placed in zip(few, read, strict=True):
            some.append(placed)
            held += placed[1].content_bytes
        if len(some) >= _STATES_AT_ONCE or held >= _PLACEMENT_BYTES:
            yield some
            some, held = [], 0
    if some:
        yield some


def _newest_packs(store: Store, run: RunManifest) -> set[ObjectKey]:
    """Return the packs of a run's newest checkpoint; none if they cannot be told."""
    newest = run.latest()
    place = None if newest is None else run.by_manifest.get(newest.manifest)
    with suppress(IntegrityError):  # what is being repaired here may be this very placement
        return {pack.key for pack in store.placement(place.placement_key).packs} if place else set()
    return set()


class _Adoption:
    """The objects of one adoption."""

    def __init__(self, workers: Workers, writer: ObjectWriter) -> None:
        self.verifies = True  # whether packs that are there are read before a state relies on them
        #: Packs that need not be read, since the run's newest checkpoint relies on them.
        self.covered: set[ObjectKey] = set()
        self._workers = workers
        self._writer = writer
        self._keys_of: dict[ObjectKey, ObjectKey] = {}
        self.places: list[Place] = []  # the places of the adopted states at the destination
        self.keys: set[ObjectKey] = set()  # all keys that they name

    def copy_packs(
        self, destination: Store, packs: Iterable[PackRef], on_pack: OnPack | None
    ) -> None:
        """Copy packs, except those that the destination has."""
        new = [ref for ref in packs if ref.key not in self._keys_of]
        copies: list[PackCopy] = []
        for ref, present in zip(
            new, Workers(None, destination).all(self._usable, new), strict=True
        ):
            if present is None:
                copies.append(PackCopy(ref, self._writer.new_pack(ref.key.digest)))
            else:
                self._keys_of[ref.key] = present
                if on_pack is not None:
                    on_pack(ref, False)

        def take(copy: PackCopy, done: Outcome[bool]) -> None:
            self._writer.note_pack(copy.new, is_ours=done.result())
            self._keys_of[copy.source.key] = copy.new.key
            if on_pack is not None:
                on_pack(copy.source, True)

        self._workers.each(copy_pack, copies, take, size_of=lambda copy: copy.source.size_bytes)

    def _usable(self, _: Store, ref: PackRef) -> ObjectKey | None:
        key = self._writer.usable("packs", ref.key.digest, ref.size_bytes)
        if key is None or not self.verifies or key in self.covered:
            return key
        if self._writer.verifies(PackRef(key, ref.size_bytes)):
            return key
        return self._writer.verified(ref.key.digest, ref.size_bytes)

    def put_states(self, some: Iterable[_Placed]) -> None:
        """Put manifests and placements of states whose packs are there."""
        generation = self._writer.observe()
        units = (
            StateCopy(place.manifest_key, _moved(placement, self._keys_of), generation)
            for place, placement in some
        )

        def take(unit: StateCopy, done: Outcome[tuple[Place, tuple[ObjectKey, ...]]]) -> None:
            place, ours = done.result()
            self._writer.note_small(ours)
            self.places.append(place)
            self.keys |= placed_keys(place, unit.placement)

        self._workers.each(put_state, units, take)


def _moved(placement: Placement, keys: Mapping[ObjectKey, ObjectKey]) -> Placement:
    packs = tuple(PackRef(keys[ref.key], ref.size_bytes) for ref in placement.packs)
    return replace(placement, packs=packs)


def copy_pack(source: Store, destination: Store, unit: PackCopy) -> bool:
    """Copy a pack; return whether this call put it."""
    key = unit.source.key
    data = source.read(key)
    # Do not copy a damaged pack. Its bytes are in memory, so the check costs one hash.
    table = open_pack(data, key.digest, where=str(key))
    verify_pack_chunks(data, table, key)
    return put_pack(destination, unit.new, [data], len(data))


def put_state(
    source: Store, destination: Store, unit: StateCopy
) -> tuple[Place, tuple[ObjectKey, ...]]:
    """Put a manifest and its placement; return their place, and the keys that this call put."""
    manifest, placement = source.manifest(unit.manifest), unit.placement
    index_chunks(manifest, placement, read_lists(destination, manifest, placement))
    manifest_key = ObjectKey("manifests", manifest.digest, unit.generation)
    placement_key = ObjectKey("placements", placement.digest, unit.generation)
    small = destination.pools.small
    is_ours = results(
        [
            small.submit(put_small, destination, manifest_key, manifest.encode(), Manifest),
            small.submit(put_small, destination, placement_key, placement.encode(), Placement),
        ]
    )
    destination.remember(manifest_key, manifest)
    destination.remember(placement_key, placement)
    return make_place(manifest_key, placement_key), tuple(
        compress((manifest_key, placement_key), is_ours)
    )
