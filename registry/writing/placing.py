"""Place a state whose chunks are stored: put its manifest and its placement.

Also owns the locations of the chunks of stored states, and the cut: a state made of components of
another one, for which no chunk is stored again. Nothing here commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from holdfast.registry.history import PlacedState
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import (
    NO_BASE,
    Manifest,
    ObjectKey,
    PackRef,
    Placement,
    Rows,
    thinned,
)
from holdfast.registry.store import Store, results
from holdfast.registry.values import Digest, Digests, collector_paused
from holdfast.registry.writing.object_writer import ChosenKeys, ObjectWriter, placed_keys


class ChunkLocation(NamedTuple):
    """The location of a stored chunk."""

    pack: PackRef
    offset: int  # the start of its stored bytes
    stored_bytes: int  # their length
    codec: int = 0  # number in `holdfast.registry.objects.codecs`
    base: Digest | None = None  # the base, if it is a delta


@dataclass(frozen=True, slots=True)
class Written:
    """A state whose objects are all on the store."""

    state: PlacedState  # the state and its place; the next state can be stored against it
    chosen: ChosenKeys  # the keys of all objects that a commit of it names
    new_bytes: int  # stored bytes of its new chunks
    #: Paths of watched tensors that hold NaN or infinity, the first few.
    nonfinite: tuple[str, ...] = ()


def cut_state(
    store: Store, writer: ObjectWriter, base: PlacedState, names: Sequence[str]
) -> Written:
    """Make a stored state of some components of another one; no chunk is stored again."""
    writer.observe()  # before any key is chosen
    held = base.manifest.components
    if base.placement.components is not None and not held.keys() >= set(names):
        raise thinned([*held], base.manifest.digest.short, names)
    parts = {name: held[name] for name in names}
    manifest = Manifest(base.manifest.kind, parts)
    lists = {digest: base.lists[digest] for digest in manifest.chunk_lists}
    placement = build_placement(manifest, lists, locations_of([base]))
    return place_manifest(store, writer, manifest, placement, lists, [base])


def place_manifest(
    store: Store,
    writer: ObjectWriter,
    manifest: Manifest,
    placement: Placement,
    lists: Mapping[Digest, bytes],
    bases: Sequence[PlacedState],
    new_bytes: int = 0,
) -> Written:
    """Put the manifest and the placement of a state whose chunks are all on the store."""
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
    place = make_place(manifest_key, placement_key)
    chosen = ChosenKeys(placed_keys(place, placement), cover(bases))
    return Written(PlacedState(place, manifest, placement, lists), chosen, new_bytes)


def make_place(manifest: ObjectKey, placement: ObjectKey) -> Place:
    """Return the place that names these objects."""
    return Place(
        manifest=manifest.digest,
        manifest_generation=manifest.generation,
        placement=placement.digest,
        placement_generation=placement.generation,
    )


def cover(bases: Iterable[PlacedState]) -> dict[ObjectKey, list[Place]]:
    """Return the keys of the objects of stored states, each with the places that cover it (W2a)."""
    covered: dict[ObjectKey, list[Place]] = {}
    for base in bases:
        for key in placed_keys(base.place, base.placement):
            covered.setdefault(key, []).append(base.place)
    return covered


def build_placement(
    manifest: Manifest, lists: Mapping[Digest, bytes], locations: Mapping[Digest, ChunkLocation]
) -> Placement:
    """Return the placement of a manifest."""
    order = manifest.distinct_chunks(lists)
    found = [*map(locations.__getitem__, order)]
    seen = set(order)
    extra: list[Digest] = []
    for location in found:
        base = location.base
        while base is not None and base not in seen:
            seen.add(base)
            extra.append(base)
            base = locations[base].base
    found += map(locations.__getitem__, extra)
    refs, offsets, stored, codecs, bases = zip(*found, strict=True) if found else ((),) * 5
    rows_of = {digest: row for row, digest in enumerate([*order, *extra])} if any(bases) else {}
    packs: dict[PackRef, int] = {}
    numbers = []
    number, last = 0, None
    for ref in refs:  # most rows are in the pack of the row before
        number = number if ref is last else packs.setdefault(ref, len(packs))
        numbers.append(number)
        last = ref
    base_rows = [NO_BASE if base is None else rows_of[base] for base in bases]
    rows = Rows.of_columns([numbers, offsets, stored, codecs, base_rows])
    return Placement(manifest.digest, tuple(packs), rows, Digests(extra))


@collector_paused()
def locations_of(bases: Sequence[PlacedState]) -> dict[Digest, ChunkLocation]:
    """Return the locations of all chunks of stored states, with the bases of their deltas.

    Of several locations of a chunk the one with the shortest chain of deltas is returned, then that
    of a state without deltas, then the first one. So chains of different states never join to a
    longer chain.
    """
    locations: dict[Digest, ChunkLocation] = {}
    made: Any = partial(tuple.__new__, ChunkLocation)
    plain = [base for base in bases if not base.placement.rows.has_deltas]
    for base in reversed(plain):  # the first one comes last, and stays
        pack, *others = base.placement.rows.columns[:4]
        refs = map(base.placement.packs.__getitem__, pack)
        found = map(made, zip(refs, *others, repeat(None), strict=False))
        locations.update(zip(_digests(base), found, strict=True))
    links = dict.fromkeys(locations, 0)
    for base in (base for base in bases if base.placement.rows.has_deltas):
        packs, rows, digests = base.placement.packs, base.placement.rows, _digests(base)
        # Bases before their deltas.
        for number in sorted(range(len(rows)), key=base.placement.depths.__getitem__):
            row, digest = rows[number], digests[number]
            base_digest = None if row.base == NO_BASE else digests[row.base]
            count = 0 if base_digest is None else links[base_digest] + 1
            if count < links.get(digest, count + 1):
                locations[digest] = ChunkLocation(
                    packs[row.pack], row.offset, row.stored_bytes, row.codec, base_digest
                )
                links[digest] = count
    return locations


def _digests(base: PlacedState) -> list[Digest]:
    """Return the chunk of each row of a placement."""
    return [*base.manifest.distinct_chunks(base.lists), *base.placement.extra]
