"""Use stored chunks of other runs, where the run may name their packs.

The packs of the run's own states are covered by their places (rule W2a of docs/spec.md, section
13); each pack of another run is checked (W2). A chunk in a pack that a sweep condemned counts as
not stored, and is stored again.
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
    """Return the locations of the wanted chunks that the run may name, and of their bases.

    Args:
        store: The registry's objects.
        writer: The writer of the run that is to name them.
        locations: The locations of chunks in states of other runs.
        wanted: The chunks to name.
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
    """Return the locations of both; of two for one chunk, that with the shorter chain of deltas.

    So two chains that cross do not become a longer one.
    """
    better = {
        digest: location
        for digest, location in other.items()
        if digest not in one or len(_chain(digest, other)) < len(_chain(digest, one))
    }
    return {**one, **better}
