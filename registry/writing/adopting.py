"""Import states that are already stored: from another registry, a parent run, or an eviction.

Each object gets a key that may be named (`holdfast.registry.writing.object_writer`): an existing
object, or a verified copy. `sync`, a fork and an undone eviction use this.
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

#: Called for each pack, with whether it had to be sent.
OnPack = Callable[[PackRef, bool], object]


def adopt(
    source: Store,
    destination: Store,
    writer: Writer,
    wanted: Sequence[Place],
    on_pack: OnPack | None = None,
) -> tuple[list[Place], ChosenKeys]:
    """Make sure that a registry has placed manifests under keys that may be named.

    Args:
        source: The registry that has them; it may be the destination.
        destination: The registry that gets them.
        writer: Chooses the keys.
        wanted: Their places at the source.
        on_pack: Called for each pack.

    Returns:
        Their places at the destination, and all keys that a commit of them names.

    Raises:
        MissingObject: An object is missing at the source.
        IntegrityError: An object is damaged there; it is not copied.
    """
    _ = writer.epoch  # observed before any key is chosen, and by one thread
    placements = [source.placement(place.placement_key) for place in wanted]
    packs = dict.fromkeys(ref for placement in placements for ref in placement.packs)
    copied: dict[ObjectKey, ObjectKey] = {}
    remaining = iter(packs)
    while batch := list(islice(remaining, _PACKS_IN_FLIGHT)):
        jobs = [destination.pools.bulk.submit(_copy_pack, source, writer, ref) for ref in batch]
        for ref, (key, sent) in zip(batch, results(jobs), strict=True):
            copied[ref.key] = key
            if on_pack is not None:
                on_pack(ref, sent)
    places, keys = [], set[ObjectKey]()
    for place, placement in zip(wanted, placements, strict=True):
        adopted = replace(
            placement,
            packs=tuple(PackRef(copied[ref.key], ref.size_bytes) for ref in placement.packs),
        )
        manifest = source.manifest(place.manifest_key)
        index_chunks(manifest, adopted, read_lists(destination, manifest, adopted))
        places.append(put_place(destination, writer, manifest, adopted))
        keys |= placed_keys(places[-1], adopted)
    return places, ChosenKeys(frozenset(keys))


def _copy_pack(source: Store, writer: Writer, ref: PackRef) -> tuple[ObjectKey, bool]:
    """Return the destination's key of a pack, and whether it had to be sent."""
    present = writer.usable("packs", ref.key.digest, ref.size_bytes)
    if present is not None:
        return present, False
    data = source.read(ref.key)
    # Do not copy a damaged pack. Its bytes are in memory, so the check costs one hash.
    table = open_pack(data, ref.key.digest, where=str(ref.key))
    verify_pack_chunks(data, table, ref.key)
    return writer.put_pack(ref.key.digest, [data], len(data)), True
