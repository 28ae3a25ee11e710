"""Stored states against which others are stored: which chunks they hold, and where a new one lies.

Owns the step from chunks on the store to a placed manifest, and the cut: a state made of components
of another one, for which no chunk is stored again. Nothing here commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.registry.history.actions import Place
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.storage.placement import NO_BASE, ChunkRow, PackRef, Placement, Rows
from holdfast.registry.storage.store import Store
from holdfast.registry.storage.threads import results
from holdfast.registry.values.digest import Digest, Digests
from holdfast.registry.writing.object_writer import ChosenKeys, Writer, placed_keys


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where a stored chunk lies, whichever placement said so.

    Attributes:
        pack: The pack.
        offset: Where its stored bytes begin.
        stored_bytes: Their length.
        codec: Number in `holdfast.registry.storage.codecs`.
        base: The chunk that a delta is against.
    """

    pack: PackRef
    offset: int
    stored_bytes: int
    codec: int = 0
    base: Digest | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A state whose objects are all on the store.

    Attributes:
        base: What and where it is; the next state can be stored against it.
        choice: Every object that a commit of it names.
        new_bytes: Bytes of chunks that had to be stored.
        nonfinite: Paths of watched tensors of which NaN or infinity was stored, the first few.
    """

    base: PlacedState
    choice: ChosenKeys
    new_bytes: int
    nonfinite: tuple[str, ...] = ()


def cut_state(store: Store, writer: Writer, base: PlacedState, names: Sequence[str]) -> Written:
    """Make a stored state of some components of another; its chunks stay where they are.

    Args:
        store: The registry's objects.
        writer: Chooses the keys.
        base: The state that is cut.
        names: Components, in the order in which they are to stand.
    """
    _ = writer.epoch  # observed before any key is chosen
    parts = {name: base.manifest.components[name] for name in names}
    manifest = Manifest(base.manifest.kind, parts)
    lists = {digest: base.lists[digest] for digest in manifest.chunk_lists}
    return place_manifest(store, writer, manifest, lists, locations_of([base]), [base])


def place_manifest(
    store: Store,
    writer: Writer,
    manifest: Manifest,
    lists: Mapping[Digest, bytes],
    locations: Mapping[Digest, ChunkLocation],
    bases: Sequence[PlacedState],
    new_bytes: int = 0,
) -> Written:
    """Put the manifest and the placement of a state whose chunks are all on the store.

    Args:
        store: The registry's objects.
        writer: Chooses the keys.
        manifest: What the state is.
        lists: The bytes of its stored digest lists.
        locations: Where each of its chunks lies, bases of deltas included.
        bases: States of this run that cover some of these chunks (W2a).
        new_bytes: Bytes of chunks that were stored for it.
    """
    placement = build_placement(manifest, lists, locations)
    place = put_place(store, writer, manifest, placement)
    choice = ChosenKeys(placed_keys(place, placement), cover(bases))
    return Written(PlacedState(place, manifest, placement, lists), choice, new_bytes)


def put_place(store: Store, writer: Writer, manifest: Manifest, placement: Placement) -> Place:
    """Put a manifest and a placement of it; return the place that names both."""
    manifest_key, placement_key = results(
        [
            store.pools.small.submit(
                writer.put_small, "manifests", manifest.digest, manifest.encode(), Manifest
            ),
            store.pools.small.submit(
                writer.put_small, "placements", placement.digest, placement.encode(), Placement
            ),
        ]
    )
    store.remember(manifest_key, manifest)
    store.remember(placement_key, placement)
    return Place(
        manifest=manifest.digest,
        manifest_generation=manifest_key.generation,
        placement=placement.digest,
        placement_generation=placement_key.generation,
    )


def cover(bases: Iterable[PlacedState]) -> dict[ObjectKey, list[Place]]:
    """Return the objects of stored states, each with the places that cover it (W2a)."""
    covered: dict[ObjectKey, list[Place]] = {}
    for base in bases:
        for key in placed_keys(base.place, base.placement):
            covered.setdefault(key, []).append(base.place)
    return covered


def build_placement(
    manifest: Manifest, lists: Mapping[Digest, bytes], locations: Mapping[Digest, ChunkLocation]
) -> Placement:
    """Return the placement of a manifest, given where every chunk lies.

    Args:
        manifest: The manifest.
        lists: The bytes of each stored digest list.
        locations: Where each chunk lies, bases of deltas included.
    """
    order = list(manifest.all_chunks(lists))
    seen = set(order)
    extra: list[Digest] = []
    for digest in order:
        base = locations[digest].base
        while base is not None and base not in seen:
            seen.add(base)
            extra.append(base)
            base = locations[base].base
    rows_of = {digest: row for row, digest in enumerate([*order, *extra])}
    packs: dict[PackRef, int] = {}
    rows = []
    for digest in rows_of:
        location = locations[digest]
        pack = packs.setdefault(location.pack, len(packs))
        base_row = NO_BASE if location.base is None else rows_of[location.base]
        rows.append(
            ChunkRow(pack, location.offset, location.stored_bytes, location.codec, base_row)
        )
    return Placement(manifest.digest, tuple(packs), Rows(rows), Digests(extra))


def locations_of(bases: Sequence[PlacedState]) -> dict[Digest, ChunkLocation]:
    """Return where every chunk of stored states lies, deltas with all that is below them.

    Of several places of a chunk the one with the fewest differences below it counts, then the
    first. So the chains of different states, however they cross, never join to a longer one.
    """
    locations: dict[Digest, ChunkLocation] = {}
    links: dict[Digest, int] = {}
    for base in bases:
        packs = base.placement.packs
        digests = [*base.manifest.all_chunks(base.lists), *base.placement.extra]
        rows = base.placement.rows
        # A base before what stands on it.
        for number in sorted(range(len(rows)), key=base.placement.links.__getitem__):
            row, digest = rows[number], digests[number]
            below = None if row.base == NO_BASE else digests[row.base]
            count = 0 if below is None else links[below] + 1
            if count < links.get(digest, count + 1):
                locations[digest] = ChunkLocation(
                    packs[row.pack], row.offset, row.stored_bytes, row.codec, below
                )
                links[digest] = count
    return locations
