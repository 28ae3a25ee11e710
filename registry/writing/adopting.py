"""Making stored states one's own: what another run, another registry or an eviction left behind.

Each object gets a key that may be named (`holdfast.registry.writing.object_writer`): the one that
is there, or a verified copy of it. `holdfast.registry.sync` brings runs from another registry, a
fork takes over what its parent holds, an eviction that is undone comes back through here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from holdfast.registry.history.actions import Place
from holdfast.registry.storage.fetching import verify_pack_chunks
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.pack import open_pack
from holdfast.registry.storage.placement import PackRef
from holdfast.registry.storage.reading import index_chunks, read_lists
from holdfast.registry.storage.store import Store
from holdfast.registry.storage.threads import results
from holdfast.registry.writing.object_writer import ChosenKeys, Writer, placed_keys
from holdfast.registry.writing.placing import put_place

#: Packs held in memory at once on their way from store to store.
_PACKS_IN_FLIGHT = 4

#: Told of each pack, and whether it had to be sent.
Counted = Callable[[PackRef, bool], object]


def adopt(
    source: Store,
    destination: Store,
    writer: Writer,
    wanted: Sequence[Place],
    counted: Counted | None = None,
) -> tuple[list[Place], ChosenKeys]:
    """Make sure that placed manifests lie in a registry under keys that may be named.

    Args:
        source: Where they lie; may be the destination itself.
        destination: Where they are to lie.
        writer: Chooses the keys.
        wanted: Their places at the source.
        counted: Told of each pack.

    Returns:
        Their places at the destination, and every key that naming them names.

    Raises:
        MissingObject: Something is gone at the source.
        IntegrityError: Something is damaged there; it is not passed on.
    """
    _ = writer.epoch  # observed before any key is chosen, and not by several threads at once
    placements = [source.placement(place.placement_key) for place in wanted]
    packs = dict.fromkeys(ref for placement in placements for ref in placement.packs)
    copied: dict[ObjectKey, ObjectKey] = {}
    waiting = iter(packs)
    while batch := list(islice(waiting, _PACKS_IN_FLIGHT)):
        jobs = [destination.pools.bulk.submit(_copy_pack, source, writer, ref) for ref in batch]
        for ref, (key, sent) in zip(batch, results(jobs), strict=True):
            copied[ref.key] = key
            if counted is not None:
                counted(ref, sent)
    places, keys = [], set[ObjectKey]()
    for place, placement in zip(wanted, placements, strict=True):
        moved = replace(
            placement,
            packs=tuple(PackRef(copied[ref.key], ref.size_bytes) for ref in placement.packs),
        )
        manifest = source.manifest(place.manifest_key)
        index_chunks(manifest, moved, read_lists(destination, manifest, moved))
        places.append(put_place(destination, writer, manifest, moved))
        keys |= placed_keys(places[-1], moved)
    return places, ChosenKeys(frozenset(keys))


def _copy_pack(source: Store, writer: Writer, ref: PackRef) -> tuple[ObjectKey, bool]:
    """Return the destination's key of a pack, and whether it had to be sent."""
    present = writer.usable("packs", ref.key.digest, ref.size_bytes)
    if present is not None:
        return present, False
    data = source.read(ref.key)
    # A damaged pack must not spread; its bytes are in memory, so checking costs one hash.
    table = open_pack(data, ref.key.digest, where=str(ref.key))
    verify_pack_chunks(data, table, ref.key)
    return writer.put_pack(ref.key.digest, [data], len(data)), True
