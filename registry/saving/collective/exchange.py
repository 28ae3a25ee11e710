"""The work of each rank in a save: exchange pieces, hash the owned chunks, put the new ones.

`ChunkOrder` and `ChunkReport` are the messages before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from holdfast.registry.objects import PACK_BYTES, ObjectKey, PackRef
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.plan import PlanPart
from holdfast.registry.saving.collective.shards import Ints, Layout, whole_leaf
from holdfast.registry.saving.collective.state_end import ChunkTable
from holdfast.registry.saving.collective.talk import join
from holdfast.registry.store import together
from holdfast.registry.values import DIGEST_BYTES, Digest, item_size
from holdfast.registry.writing import Chunk, StateWriter, is_finite, is_watched, write_packs


@dataclass(frozen=True)
class ChunkOrder:
    """Rank 0's message to a rank, before the rank stores its chunks."""

    links: str  # the connections of the ranks
    codec: str  # the codec of chunks, a name of `holdfast.registry.objects.codecs`
    watched: Sequence[str]  # path patterns of the tensors to check for NaN and infinity
    epoch: int  # the epoch that rank 0 has observed
    #: The digests of the owned chunks in the base, in order; zeros if the base lacks one.
    known: memoryview


@dataclass(frozen=True)
class ChunkReport:
    """A rank's answer: the chunks that it stored."""

    digests: Any  # the digests of its chunks, in the order of its part of the plan, 32 bytes each
    nonfinite: Sequence[int]  # numbers of the tensors with NaN or infinity in its chunks
    stored: ChunkTable  # the chunks that it has stored

    def encode(self) -> bytes:
        """Return the report as a message; every key was seen, or its put acknowledged (CS2)."""
        named = [
            [one.key.digest.hex(), one.key.generation, one.size_bytes] for one in self.stored.packs
        ]
        header = {"packs": named, "nonfinite": list(self.nonfinite)}
        return join(header, self.digests, *self.stored.encode())

    @classmethod
    def of(cls, header: Mapping[str, Any], columns: Sequence[memoryview]) -> ChunkReport:
        """Decode the result of `encode`."""
        digests, stored, rows = columns
        packs = [
            PackRef(ObjectKey("packs", Digest.from_hex(name), generation), size)
            for name, generation, size in header["packs"]
        ]
        return cls(digests, header["nonfinite"], ChunkTable.decode(stored, rows, packs))


class ChunkStoring:
    """The storing of the chunks that one rank owns in a state, and that the base does not have."""

    def __init__(
        self, writer: StateWriter, layout: Layout, part: PlanPart, order: ChunkOrder
    ) -> None:
        self._writer, self._layout, self._part, self._order = writer, layout, part, order
        self._items = [item_size(one) for one in layout.structure.dtypes]
        self._leaves = [whole_leaf(leaf) for leaf in layout.leaves]
        self._watched = [is_watched(leaf, order.watched) for leaf in self._leaves]
        self._digests = bytearray(len(part.chunks) * DIGEST_BYTES)
        self._nonfinite: set[int] = set()
        self._memory = cache(layout.memory)

    def write(self, group: Group) -> ChunkReport:
        """Exchange pieces with the other ranks, and put the chunks."""
        store, objects = self._writer.store, self._writer.objects
        objects.hear(self._order.epoch)
        chunks = complete_chunks(group, self._order.links, self._part, self._items, self._memory)
        locations = write_packs(store, objects, self._batches(chunks), self._order.codec)
        for leaf in self._layout.leaves:
            leaf.release()
        return ChunkReport(self._digests, sorted(self._nonfinite), ChunkTable.of(locations))

    def _batches(self, chunks: Iterator[tuple[int, Ints, memoryview]]) -> Iterator[list[Chunk]]:
        """Yield the new chunks in batches for one pack each; packs never mix components."""

        def component(owned: tuple[int, Ints, memoryview]) -> str:
            return self._leaves[int(owned[1][0])].path.partition("/")[0]

        for batch in together(chunks, lambda one: len(one[2]), PACK_BYTES, component):
            found = self._writer.store.pools.hashing.map(self._hash, batch)
            yield [chunk for chunk in found if chunk is not None]

    def _hash(self, owned: tuple[int, Ints, memoryview]) -> Chunk | None:
        number, chunk, data = owned
        tensor = int(chunk[0])
        digest = Digest.of(data)
        at = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        self._digests[at] = digest
        leaf = self._leaves[tensor]
        if self._watched[tensor] and not is_finite(data, leaf.dtype):
            self._nonfinite.add(tensor)
        if bytes(self._order.known[at]) == digest:
            return None
        return Chunk(digest, data, leaf, int(chunk[1]))


# Carry out a plan for saving, round by round: send pieces to the owners of their chunks.

#: Returns the bytes of this rank's box of a tensor, with one more axis for the bytes of an
#: element, and the begin of the box.
Memory = Callable[[int], tuple[Any, Ints]]


def complete_chunks(
    group: Group, links: str, part: PlanPart, items: list[int], memory: Memory
) -> Iterator[tuple[int, Ints, memoryview]]:
    """Yield each chunk that this rank owns, with a copy of its bytes; all ranks iterate together.

    Chunks come round by round, each with its number in the part; the part has another order.
    """
    axes = (part.chunks.shape[1] - 4) // 2
    for now in range(max(part.rounds, 1)):
        arrived: dict[int, memoryview] = {}
        takes = part.takes[part.takes[:, 2] == now]
        if now < part.rounds:
            arrived = _exchange(group, links, part, now, items, memory)
        used = dict.fromkeys(arrived, 0)
        cuts = np.searchsorted(takes[:, 0], np.arange(len(part.chunks) + 1))
        for number in np.flatnonzero(part.chunks[:, 3] == now).tolist():
            chunk = part.chunks[number]
            tensor, low, high = int(chunk[0]), chunk[4 : 4 + axes], chunk[4 + axes :]
            item = items[tensor]
            data = np.empty((*(high - low), item), np.uint8)
            for take in takes[cuts[number] : cuts[number + 1]]:
                source, begin, end = int(take[1]), take[3 : 3 + axes], take[3 + axes :]
                if source == group.rank:
                    box, offset = memory(tensor)
                    piece = box[within(begin - offset, end - offset)]
                else:
                    shape = (*(end - begin), item)
                    size = int(np.prod(shape))
                    start = used[source]
                    used[source] = start + size
                    flat = np.frombuffer(arrived[source][start : start + size], np.uint8)
                    piece = flat.reshape(shape)
                data[within(begin - low, end - low)] = piece
            yield number, chunk, view_of(data)


def _exchange(
    group: Group, links: str, part: PlanPart, now: int, items: list[int], memory: Memory
) -> dict[int, memoryview]:
    axes = (part.gives.shape[1] - 3) // 2
    outgoing: dict[int, list[Any]] = {}
    for give in part.gives[part.gives[:, 2] == now]:
        tensor, begin, end = int(give[0]), give[3 : 3 + axes], give[3 + axes :]
        box, offset = memory(tensor)
        piece = np.ascontiguousarray(box[within(begin - offset, end - offset)])
        outgoing.setdefault(int(give[1]), []).append(piece.reshape(-1))
    incoming: dict[int, int] = {}
    takes = part.takes[(part.takes[:, 2] == now) & (part.takes[:, 1] != group.rank)]
    for take in takes:
        size = int((take[3 + axes :] - take[3 : 3 + axes]).prod())
        size *= items[int(part.chunks[int(take[0]), 0])]
        incoming[int(take[1])] = incoming.get(int(take[1]), 0) + size
    joined = {rank: view_of(np.concatenate(some)) for rank, some in outgoing.items()}
    return group.exchange(links, joined, incoming)


def within(begin: Ints, end: Ints) -> tuple[slice, ...]:
    """Return the slices of a box."""
    return tuple(slice(int(a), int(b)) for a, b in zip(begin, end, strict=True))


def view_of(data: Any) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(data.reshape(-1))
