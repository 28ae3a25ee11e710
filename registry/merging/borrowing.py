"""Chunks that states of other runs hold, as far as a run may name the packs that they lie in.

Of a state of the run itself a placed manifest covers its packs (rule W2a of docs/spec.md, section
13); of another run's each pack is looked at by itself (W2). What lies in a pack that a sweep
condemned counts as stored nowhere and is stored anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from registry.storage.keys import ObjectKey
from registry.storage.placement import PackRef
from registry.storage.store import Store
from registry.storage.threads import results
from registry.values.digest import Digest
from registry.writing.object_writer import Writer
from registry.writing.placing import Spot


def borrow(
    store: Store, writer: Writer, spots: Mapping[Digest, Spot], wanted: Iterable[Digest]
) -> dict[Digest, Spot]:
    """Return where those of the wanted chunks lie that may be named, bases of deltas with them.

    Args:
        store: The registry's objects.
        writer: Chooses the keys, for the run that is to name them.
        spots: Where chunks of states of other runs lie.
        wanted: Chunks that are to be named.
    """
    chains = [_chain(digest, spots) for digest in dict.fromkeys(wanted) if digest in spots]
    packs = {spots[digest].pack for chain in chains for digest in chain}
    usable = _usable(store, writer, packs)
    borrowed: dict[Digest, Spot] = {}
    for chain in chains:
        if all(spots[digest].pack in usable for digest in chain):
            for digest in chain:
                spot = spots[digest]
                pack = PackRef(usable[spot.pack], spot.pack.size_bytes)
                borrowed[digest] = replace(spot, pack=pack)
    return borrowed


def _chain(digest: Digest, spots: Mapping[Digest, Spot]) -> list[Digest]:
    chain = [digest]
    while (below := spots[chain[-1]].base) is not None:
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


def shorter(one: Mapping[Digest, Spot], other: Mapping[Digest, Spot]) -> dict[Digest, Spot]:
    """Return the spots of both; of two the one with fewer differences below it, then the first.

    So chains of deltas that cross do not join to longer ones.
    """
    better = {
        digest: spot
        for digest, spot in other.items()
        if digest not in one or len(_chain(digest, other)) < len(_chain(digest, one))
    }
    return {**one, **better}
