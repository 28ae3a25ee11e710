"""Carry out a plan for loading: read chunks ahead of their round, and send others their pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from holdfast.registry.collective.group import Group
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.rounds import Memory, view_of, within
from holdfast.registry.collective.structure import Ints

#: The rounds whose chunks are in memory at the same time: one that is sent, and the next ones.
_ROUNDS_HELD = 4
#: Chunks that are read straight into the target are asked for in batches of about this size.
#: Between two batches come the chunks that other ranks wait for.
_BATCH_BYTES = 64 * 2**20
#: Fills memory with owned chunks, every byte verified, by their numbers in the part.
Read = Callable[[Mapping[int, Any]], None]


def spread_chunks(
    group: Group, links: str, part: Part, items: list[int], memory: Memory, read: Read
) -> None:
    """Fill this rank's boxes, and send the other ranks their pieces of the chunks that it owns.

    A chunk that this rank's box holds whole is read straight into it. Other chunks need memory
    until their pieces are sent, for a few rounds at the same time. A second thread reads, so that
    this rank reads on while it waits for the others.

    Args:
        group: The ranks.
        links: The name of their connections.
        part: This rank's part of a plan for loading.
        items: Bytes of an element of each tensor.
        memory: Gives the memory of a tensor, which is filled.
        read: Reads owned chunks.

    Raises:
        LinksBroken: Another rank is dead or late, or has failed.
    """
    spreading = _Spreading(group, links, part, items, memory, read)
    with ThreadPoolExecutor(1, "holdfast-load") as pool:
        reading = pool.submit(spreading.read_ahead)
        try:
            for now in range(part.rounds):
                spreading.travel(now)
        except BaseException:
            spreading.stop()
            reading.result()  # raises what has kept this thread from reading, if that is why
            raise
        reading.result()


class _NothingRead(Exception):
    """The thread that reads has failed; its error is the one to raise."""


@dataclass(frozen=True)
class _Round:
    """The owned chunks of which pieces travel in a round.

    Attributes:
        chunks: Their bytes, by their numbers in the part.
        scratch: The memory of those that this rank's boxes do not hold whole.
    """

    chunks: Mapping[int, Any]
    scratch: Any


class _Spreading:
    """One plan as a rank carries it out: `read_ahead` in one thread, `travel` in another."""

    def __init__(
        self, group: Group, links: str, part: Part, items: list[int], memory: Memory, read: Read
    ) -> None:
        self._group, self._links, self._part = group, links, part
        self._items, self._memory, self._read = items, memory, read
        self._axes = (part.chunks.shape[1] - 4) // 2
        is_own = part.takes[:, 1] == group.rank
        self._sent, self._kept = part.takes[~is_own], part.takes[is_own]
        is_whole = (self._kept[:, 3:] == part.chunks[self._kept[:, 0], 4:]).all(axis=1)
        self._inside = set(self._kept[is_whole, 0].tolist())
        self._room: SimpleQueue[Any] = SimpleQueue()  # scratch memory, `None` before its first use
        self._ready: SimpleQueue[_Round | None] = SimpleQueue()
        self._is_over = False
        for _ in range(_ROUNDS_HELD):
            self._room.put(None)

    # Reading

    def read_ahead(self) -> None:
        """Read all owned chunks: those that travel first, as far as there is memory for them."""
        try:
            near = deque(self._near())
            now = 0
            while now < self._part.rounds and not self._is_over:
                if near and self._room.empty():
                    self._read(near.popleft())
                else:
                    now += self._read_rounds(now)
            while near and not self._is_over:
                self._read(near.popleft())
        finally:
            self._ready.put(None)

    def stop(self) -> None:
        """Let the reading end: nobody waits for it."""
        self._is_over = True
        self._room.put(None)

    def _read_rounds(self, now: int) -> int:
        """Read the chunks of the next rounds; return of how many."""
        some = [self._round(now, self._room.get())]
        while now + len(some) < self._part.rounds and not self._room.empty():
            some.append(self._round(now + len(some), self._room.get()))
        self._read({number: data for one in some for number, data in one.chunks.items()})
        for one in some:
            self._ready.put(one)
        return len(some)

    def _near(self) -> Iterator[Mapping[int, Any]]:
        """Yield the chunks of which nothing travels, with their memory."""
        batch: dict[int, Any] = {}
        size = 0
        for number in np.setdiff1d(np.arange(len(self._part.chunks)), self._sent[:, 0]).tolist():
            data = self._in_box(number)
            if batch and size + len(data) > _BATCH_BYTES:
                yield batch
                batch, size = {}, 0
            batch[number] = data
            size += len(data)
        if batch:
            yield batch

    def _round(self, now: int, scratch: Any) -> _Round:
        """Return the chunks of a round with their memory."""
        numbers = np.unique(self._sent[self._sent[:, 2] == now, 0]).tolist()
        sizes = {one: self._size(one) for one in numbers if one not in self._inside}
        if scratch is None or len(scratch) < sum(sizes.values()):
            scratch = np.empty(sum(sizes.values()), np.uint8)
        found, start = {}, 0
        for number in numbers:
            if number in sizes:
                found[number] = scratch[start : start + sizes[number]]
                start += sizes[number]
            else:
                found[number] = self._in_box(number)
        return _Round(found, scratch)

    def _in_box(self, number: int) -> Any:
        """Return the memory of a chunk that this rank's box holds whole: it is contiguous."""
        low, high = self._box_of(number)
        box, offset = self._memory(int(self._part.chunks[number, 0]))
        found = box[within(low - offset, high - offset)]
        assert found.flags.c_contiguous  # a copy would be filled in place of the box
        return found.reshape(-1)

    def _box_of(self, number: int) -> tuple[Ints, Ints]:
        chunk = self._part.chunks[number]
        return chunk[4 : 4 + self._axes], chunk[4 + self._axes :]

    def _size(self, number: int) -> int:
        low, high = self._box_of(number)
        return int((high - low).prod()) * self._items[int(self._part.chunks[number, 0])]

    # Exchanging

    def travel(self, now: int) -> None:
        """Send the pieces of a round, and copy those that arrive and this rank's own."""
        read = self._ready.get()
        if read is None:
            raise _NothingRead
        gives = self._part.gives[self._part.gives[:, 2] == now]
        arrived = self._group.exchange(
            self._links, self._outgoing(now, read), self._incoming(gives)
        )
        self._take_in(gives, arrived)
        for take in self._kept[self._kept[:, 2] == now]:
            number = int(take[0])
            if number in read.chunks and number not in self._inside:  # not in the box already
                tensor = int(self._part.chunks[number, 0])
                self._copy(tensor, take[3:], self._piece(take, read))
        self._room.put(read.scratch)

    def _outgoing(self, now: int, read: _Round) -> dict[int, memoryview]:
        pieces: dict[int, list[Any]] = {}
        for take in self._sent[self._sent[:, 2] == now]:
            piece = self._piece(take, read)
            pieces.setdefault(int(take[1]), []).append(np.ascontiguousarray(piece).reshape(-1))
        return {
            rank: view_of(some[0] if len(some) == 1 else np.concatenate(some))
            for rank, some in pieces.items()
        }

    def _incoming(self, gives: Ints) -> dict[int, int]:
        sizes = (gives[:, 3 + self._axes :] - gives[:, 3 : 3 + self._axes]).prod(axis=1)
        found: dict[int, int] = {}
        for (tensor, source), size in zip(gives[:, :2].tolist(), sizes.tolist(), strict=True):
            found[source] = found.get(source, 0) + size * self._items[tensor]
        return found

    def _take_in(self, gives: Ints, arrived: Mapping[int, memoryview]) -> None:
        used = dict.fromkeys(arrived, 0)
        for give in gives:
            tensor, source = int(give[0]), int(give[1])
            begin, end = give[3 : 3 + self._axes], give[3 + self._axes :]
            shape = (*(end - begin), self._items[tensor])
            start = used[source]
            used[source] = start + int(np.prod(shape))
            flat = np.frombuffer(arrived[source][start : used[source]], np.uint8)
            self._copy(tensor, give[3:], flat.reshape(shape))

    def _piece(self, take: Ints, read: _Round) -> Any:
        number, begin, end = int(take[0]), take[3 : 3 + self._axes], take[3 + self._axes :]
        low, high = self._box_of(number)
        item = self._items[int(self._part.chunks[number, 0])]
        whole = read.chunks[number].reshape(*(high - low), item)
        return whole[within(begin - low, end - low)]

    def _copy(self, tensor: int, to: Ints, piece: Any) -> None:
        box, offset = self._memory(tensor)
        box[within(to[: self._axes] - offset, to[self._axes :] - offset)] = piece
