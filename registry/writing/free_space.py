"""Check that a state fits into the free space of its store, before anything is written.

A state that would fit is never refused. Its stored size is known only after hashing: chunks may be
stored already, in a base or in a pack of another run. If the whole state is smaller than the free
space, nothing else is checked. Otherwise it is hashed once before the save, and refused as soon as
its new packs exceed the free space. The size of encoded chunks is not known in advance; their packs
are checked one by one when they are put
(`holdfast.registry.writing.object_writer`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence

from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.pytree import ArrayLeaf, FlatState
from holdfast.registry.storage.chunking import INLINE_BYTES, grid
from holdfast.registry.storage.codecs import RAW
from holdfast.registry.storage.pack import TRAILER_BYTES, PackTable, raw_entries
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import Writer, check_room
from holdfast.registry.writing.placing import locations_of
from holdfast.registry.writing.saving import cut_groups, group_name


def check_state_fits(
    store: Store, writer: Writer, state: FlatState, bases: Sequence[PlacedState], codec: str
) -> None:
    """Refuse a state that cannot fit.

    Args:
        store: The registry's objects.
        writer: Knows which packs exist.
        state: The state.
        bases: Checkpoints whose chunks may be used again.
        codec: The codec of chunks, a name of `holdfast.registry.storage.codecs`.

    Raises:
        StoreFull: It needs more bytes than are free; nothing was written.
    """
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
    """Yield each chunk: the name of its pack group, its length, and its leaf, start and stop."""
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
