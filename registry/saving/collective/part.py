"""One rank's storing: hash the chunks that the rank owns, put the new ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.history.actions import ReportMetrics
from holdfast.registry.history.replay import Slot
from holdfast.registry.objects import PACK_BYTES, ObjectKey, PackRef
from holdfast.registry.pytree import NamedLeaf
from holdfast.registry.saving.collective.agreement import complete_chunks
from holdfast.registry.saving.collective.chunk_table import ChunkTable
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.plan import Part
from holdfast.registry.saving.collective.shards import Layout, whole_bytes, whole_shape
from holdfast.registry.saving.collective.structure import Ints
from holdfast.registry.saving.collective.talk import join
from holdfast.registry.store import Store
from holdfast.registry.values import DIGEST_BYTES, Digest, item_size
from holdfast.registry.writing import Chunk, Writer, is_finite, is_watched, write_packs


@dataclass(frozen=True)
class PartOrder:
    """Rank 0's message to a rank, before the rank stores its chunks."""

    links: str  # the connections of the ranks
    codec: str  # the codec of chunks, a name of `holdfast.registry.objects.codecs`
    watched: Sequence[str]  # path patterns of the tensors to check for NaN and infinity
    epoch: int  # the epoch that rank 0 has observed
    #: The digests of the owned chunks in the base, in order; zeros if the base lacks one.
    known: memoryview


@dataclass(frozen=True)
class PartReport:
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
    def of(cls, header: Mapping[str, Any], columns: Sequence[memoryview]) -> PartReport:
        """Decode the result of `encode`."""
        digests, stored, rows = columns
        packs = [
            PackRef(ObjectKey("packs", Digest.from_hex(name), generation), size)
            for name, generation, size in header["packs"]
        ]
        return cls(digests, header["nonfinite"], ChunkTable.decode(stored, rows, packs))


def write_part(
    store: Store, writer: Writer, group: Group, layout: Layout, part: Part, order: PartOrder
) -> PartReport:
    """Store this rank's chunks that the base does not have."""
    return _PartWriter(store, layout, part, order).write(writer, group)


class _PartWriter:
    """The writing of one rank's part of a state."""

    def __init__(self, store: Store, layout: Layout, part: Part, order: PartOrder) -> None:
        self._store, self._layout, self._part, self._order = store, layout, part, order
        self._items = [item_size(one) for one in layout.structure.dtypes]
        self._leaves = [
            NamedLeaf(leaf.dtype, whole_shape(leaf), whole_bytes(leaf), leaf.path)
            for leaf in layout.leaves
        ]
        self._watched = [is_watched(leaf, order.watched) for leaf in self._leaves]
        self._digests = bytearray(len(part.chunks) * DIGEST_BYTES)
        self._nonfinite: set[int] = set()
        self._memory: dict[int, tuple[Any, Ints]] = {}

    def write(self, writer: Writer, group: Group) -> PartReport:
        writer.hear(self._order.epoch)
        chunks = complete_chunks(group, self._order.links, self._part, self._items, self._memory_of)
        locations = write_packs(self._store, writer, self._groups(chunks), self._order.codec)
        for leaf in self._layout.leaves:
            leaf.release()
        return PartReport(self._digests, sorted(self._nonfinite), ChunkTable.of(locations))

    def _memory_of(self, tensor: int) -> tuple[Any, Ints]:
        found = self._memory.get(tensor)
        if found is None:
            found = self._memory[tensor] = self._layout.memory(tensor)
        return found

    def _groups(self, chunks: Iterator[tuple[int, Ints, memoryview]]) -> Iterator[list[Chunk]]:
        """Yield the new chunks in batches for one pack each; packs never mix components."""
        group: list[tuple[int, Ints, memoryview]] = []
        size, name = 0, ""
        for number, chunk, data in chunks:
            component = self._leaves[int(chunk[0])].path.partition("/")[0]
            if group and (component != name or size + len(data) > PACK_BYTES):
                yield self._fresh(group)
                group, size = [], 0
            group.append((number, chunk, data))
            size, name = size + len(data), component
        if group:
            yield self._fresh(group)

    def _fresh(self, group: Sequence[tuple[int, Ints, memoryview]]) -> list[Chunk]:
        found = self._store.pools.hashing.map(self._hash, group)
        return [chunk for chunk in found if chunk is not None]

    def _hash(self, owned: tuple[int, Ints, memoryview]) -> Chunk | None:
        number, chunk, data = owned
        tensor = int(chunk[0])
        digest = Digest(hashlib.sha256(data).digest())
        at = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        self._digests[at] = digest
        leaf = self._leaves[tensor]
        if self._watched[tensor] and not is_finite(data, leaf.dtype):
            self._nonfinite.add(tensor)
        if bytes(self._order.known[at]) == digest:
            return None
        return Chunk(digest, data, leaf, int(chunk[1]))


def find_write(slots: Iterable[Slot], write: str) -> int | None:
    """Return the number of the checkpoint that a write added or repeated; `None` without one."""
    for slot in slots:
        for _, commit in slot.commits:
            if commit.write != write:
                continue
            repeated = (one.checkpoint for one in commit.actions if isinstance(one, ReportMetrics))
            return next(repeated, commit.n)
    return None
