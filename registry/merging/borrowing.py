"""Chunks that states of other runs hold, as far as a run may name the packs that they lie in.

Of a state of the run itself a placed manifest covers its packs (rule W2a of docs/spec.md, section
13); of another run's each pack is looked at by itself (W2). What lies in a pack that a sweep
condemned counts as stored nowhere and is stored anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.placement import PackRef
from holdfast.registry.storage.store import Store
from holdfast.registry.storage.threads import results
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import Writer
from holdfast.registry.writing.placing import ChunkLocation


def borrow(
    store: Store,
    writer: Writer,
    locations: Mapping[Digest, ChunkLocation],
    wanted: Iterable[Digest],
) -> dict[Digest, ChunkLocation]:
    """Return where those of the wanted chunks lie that may be named, bases of deltas with them.

    Args:
        store: The registry's objects.
        writer: Chooses the keys, for the run that is to name them.
        locations: Where chunks of states of other runs lie.
        wanted: Chunks that are to be named.
    """
    chains = [_chain(digest, locations) for digest in dict.fromkeys(wanted) if digest in locations]
    packs = {locations[digest].pack for chain in chains for digest in chain}
    usable = _usable(store, writer, packs)
    borrowed: dict[Digest, ChunkLocation] = {}
    for chain in chains:
        if all(locations[digest].pack in usable for digest in chain):
            for digest in chain:
                location = locations[digest]
                pack = PackRef(usable[location.pack], location.pack.size_bytes)
                borrowed[digest] = replace(location, pack=pack)
    return borrowed


def _chain(digest: Digest, locations: Mapping[Digest, ChunkLocation]) -> list[Digest]:
    chain = [digest]
    while (below := locations[chain[-1]].base) is not None:
        chain.append(below)
    return chain


def _usable(store: Store, writer: Writer, packs: Iterable[PackRef]) -> dict[PackRef, ObjectKey]:
    _ = writer.epoch  # observed before any key is chosen, and not by several threads at once
    asked = list(packs)
    jobs = [
        store.pools.small.submit(writer.usable, "packs", pack.key.digest, pack.size_bytes)
        for pack in asked
    ]
    found = zip(asked, results(jobs), strict=True)
    return {pack: key for pack, key in found if key is not None}


def shorter(
    one: Mapping[Digest, ChunkLocation], other: Mapping[Digest, ChunkLocation]
) -> dict[Digest, ChunkLocation]:
    """Return the locations of both; of two the one with fewer differences below it, then the first.

    So chains of deltas that cross do not join to longer ones.
    """
    better = {
        digest: location
        for digest, location in other.items()
        if digest not in one or len(_chain(digest, other)) < len(_chain(digest, one))
    }
    return {**one, **better}
