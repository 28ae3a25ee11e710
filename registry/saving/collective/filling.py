"""Fill boxes of a stored state's tensors: all ranks together, or one rank alone.

If all ranks fill together, each fetches a share of the chunks and sends the others their pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history import StateReader
from holdfast.registry.objects import TensorEntry
from holdfast.registry.saving.collective.exchange import Memory, view_of, within
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.patterns import WrongLayout
from holdfast.registry.saving.collective.plan import PlanPart, make_plan
from holdfast.registry.saving.collective.shards import Boxes, Ints, Structure
from holdfast.registry.saving.collective.talk import Calls, Talk, join
from holdfast.registry.store import together
from holdfast.registry.values import Digest, item_size

# Carry out a plan for loading: read chunks before their round, then send ranks their pieces.


#: Number of rounds with chunks in memory: the round that is being sent, and the next ones.
_ROUNDS_HELD = 4
#: Chunks that are read straight into the target are read in batches of about this size.
#: Between two batches come the chunks that other ranks wait for.
_BATCH_BYTES = 64 * 2**20
#: Fills memory with owned chunks, every byte verified, by their numbers in the part.
Read = Callable[[Mapping[int, Any]], None]


class _NothingRead(Exception):
    """The thread that reads has failed; its error is the one to raise."""


@dataclass(frozen=True)
class _Round:
    """Owned chunks whose pieces travel in one round."""

    chunks: Mapping[int, Any]  # their bytes, by their numbers in the part
    scratch: Any  # memory for chunks that this rank's boxes do not hold whole


class _Spreading:
    """One plan as a rank carries it out: `_read_ahead` in one thread, `_travel` in another.

    A chunk that this rank's box holds whole is read straight into it. Other chunks need memory
    until their pieces are sent, for a few rounds at the same time.
    """

    def __init__(
        self, group: Group, links: str, part: PlanPart, items: list[int], memory: Memory, read: Read
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

    def spread(self) -> None:
        """Fill this rank's boxes, and send the others their pieces of the chunks that it owns.

        A second thread keeps reading while this rank waits for the others.
        """
        with ThreadPoolExecutor(1, "holdfast-load") as pool:
            reading = pool.submit(self._read_ahead)
            try:
                for now in range(self._part.rounds):
                    self._travel(now)
            except BaseException:
                self._is_over = True  # nobody waits for the reader any more
                self._room.put(None)
                reading.result()  # raises the reader's error, if the reader has failed
                raise
            reading.result()

    # Reading

    def _read_ahead(self) -> None:
        """Read all owned chunks: first the chunks that travel, as far as memory allows."""
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

    def _read_rounds(self, now: int) -> int:
        """Read the chunks of the next rounds; return the number of rounds."""
        some = [self._round(now, self._room.get())]
        while now + len(some) < self._part.rounds and not self._room.empty():
            some.append(self._round(now + len(some), self._room.get()))
        self._read({number: data for one in some for number, data in one.chunks.items()})
        for one in some:
            self._ready.put(one)
        return len(some)

    def _near(self) -> Iterator[Mapping[int, Any]]:
        """Yield the chunks that stay on this rank, with their memory."""
        numbers = np.setdiff1d(np.arange(len(self._part.chunks)), self._sent[:, 0]).tolist()
        chunks = ((number, self._in_box(number)) for number in numbers)
        return map(dict, together(chunks, lambda one: len(one[1]), _BATCH_BYTES))

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

    def _travel(self, now: int) -> None:
        """Send the pieces of a round; copy this rank's own pieces and the arriving ones."""
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


@dataclass(frozen=True)
class Box:
    """A part of a stored tensor, and the memory for it."""

    path: str  # its name, for messages
    entry: TensorEntry
    offset: tuple[int, ...]  # the begin of the part, on each axis
    shape: tuple[int, ...]  # its lengths
    view: memoryview  # the memory; flat and writable
    #: Whether the ranks have different parts; if not, every rank has the whole tensor.
    is_sharded: bool = True


class Filling:
    """The boxes that one rank fills."""

    def __init__(self, reader: StateReader, boxes: Sequence[Box]) -> None:
        self._reader = reader
        for one in boxes:
            if one.entry.inline:
                _fill_inline(one)
        self._boxes = [one for one in boxes if one.entry.inline is None and one.entry.nbytes]
        entries = [one.entry for one in self._boxes]
        #: The tensors that are read in chunks, in order.
        self.structure = Structure(
            tuple(one.dtype for one in entries), tuple(one.shape for one in entries)
        )
        self._items = [item_size(one.dtype) for one in entries]
        table = self.structure.table(
            (number, one.offset, one.shape)
            for number, one in enumerate(self._boxes)
            if one.is_sharded
        )
        #: The boxes that this rank has of them.
        self.boxes = Boxes.from_rows(table, len(self._boxes))
        self._memory: dict[int, tuple[Any, Ints]] = {}

    def alone(self) -> None:
        """Fill the boxes; no other rank takes part."""
        wanted: list[tuple[int, int, Any]] = []
        copies: list[tuple[Any, Any]] = []
        size = 0
        for tensor, number, here, shape, inner in self._chunks_met():
            if inner is None:  # the box holds the whole chunk, so the bytes are contiguous
                data = here.reshape(-1)
            else:
                data = np.empty(int(np.prod(shape)), np.uint8)
                copies.append((here, data.reshape(shape)[inner]))
            wanted.append((tensor, number, data))
            size += len(data)
            if size > _BATCH_BYTES:
                self._fetch(wanted, copies)
                size = 0
        self._fetch(wanted, copies)
        self._memory.clear()

    def _chunks_met(self) -> Iterator[tuple[int, int, Any, tuple[int, ...], Any]]:
        """Yield the chunks that this rank's boxes meet.

        For each chunk: its tensor and number, the memory of its part in the box, its shape with an
        axis for the bytes of an element, and the slice of the part; `None` for a whole chunk.
        """
        for tensor, one in enumerate(self._boxes):
            if 0 in one.shape:
                continue
            box, offset = self._memory_of(tensor)
            ends = offset + box.shape[:-1]
            _, numbers, begin, end = self.structure.pieces(tensor, offset[None], ends[None])
            low, high = self.structure.chunk_boxes(tensor, numbers)
            is_whole = ((begin == low) & (end == high)).all(axis=1)
            for at, number in enumerate(numbers.tolist()):
                here = box[within(begin[at] - offset, end[at] - offset)]
                shape = (*(high[at] - low[at]).tolist(), self._items[tensor])
                inner = None if is_whole[at] else within(begin[at] - low[at], end[at] - low[at])
                yield tensor, number, here, shape, inner

    def _fetch(self, wanted: list[tuple[int, int, Any]], copies: list[tuple[Any, Any]]) -> None:
        """Read chunks, copy their parts to the boxes, then clear both lists."""
        self._read(wanted)
        for here, piece in copies:
            here[...] = piece
        wanted.clear()
        copies.clear()

    def together(self, calls: Calls, talk: Talk, settle: Callable[[], None]) -> None:
        """Fill the boxes of all ranks; every rank calls this, and all return together."""
        part, group = self._plan(calls.group, talk), calls.group
        calls.linked(
            talk, "exchanging parts of tensors", lambda: self._spread(group, calls.links, part)
        )
        settle()
        if group.rank:
            talk.report(join({}))
            talk.listen("leading the load")
            return
        talk.gather(join({}), "loading their parts")
        talk.order({"failure": None})

    def _plan(self, group: Group, talk: Talk) -> PlanPart:
        """Have rank 0 plan; return this rank's part."""
        names = Digest.of(repr([one.path for one in self._boxes]).encode()).hex()
        said = join({"tensors": names}, *self.boxes.encode())
        if group.rank:
            talk.report(said)
            talk.listen("leading the load")
            return PlanPart.decode(talk.hear_own("planning a load")[1])
        found = talk.gather(said, "describing their boxes")
        for rank, (header, _) in enumerate(found):
            if header["tensors"] != names:  # such as one that ties two of them
                raise IncompatibleState(
                    "the ranks load into different tensors", where=f"rank {rank}"
                )
        boxes = [Boxes.decode(columns) for _, columns in found]
        try:
            plan = make_plan(self.structure, boxes, loads=True)
        except WrongLayout as error:
            where = self._boxes[error.tensor].path
            raise IncompatibleState(error.what, where=where, found=error.found) from error
        parts = [plan.part(rank) for rank in range(group.size)]
        talk.order({"failure": None})
        for rank, part in enumerate(parts[1:], 1):
            talk.order_one(rank, {}, *part.encode())
        return parts[0]

    def _spread(self, group: Group, links: str, part: PlanPart) -> None:
        def read(wanted: Mapping[int, Any]) -> None:
            named = part.chunks[list(wanted), :2].tolist()
            self._read([(*one, data) for one, data in zip(named, wanted.values(), strict=True)])

        _Spreading(group, links, part, self._items, self._memory_of, read).spread()
        self._memory.clear()

    def _memory_of(self, tensor: int) -> tuple[Any, Ints]:
        """Return the bytes of this rank's box of a tensor, and the begin of the box."""
        found = self._memory.get(tensor)
        if found is None:
            one = self._boxes[tensor]
            found = self.structure.memory(tensor, one.view, one.offset, one.shape)
            self._memory[tensor] = found
        return found

    def _read(self, wanted: Sequence[tuple[int, int, Any]]) -> None:
        """Fill memory with chunks, each given by tensor and number; every byte is verified."""
        first: dict[Digest, Any] = {}
        copies: list[tuple[Any, Any]] = []
        for tensor, number, data in wanted:
            digest = self._reader.chunk_digests(self._boxes[tensor].entry)[number]
            if digest in first:
                copies.append((data, first[digest]))
            else:
                first[digest] = data
        self._reader.read_chunks({digest: memoryview(data) for digest, data in first.items()})
        for data, source in copies:
            data[:] = source


def _fill_inline(box: Box) -> None:
    shape = (*box.entry.shape, item_size(box.entry.dtype))
    whole = np.frombuffer(box.entry.inline or b"", np.uint8).reshape(shape)
    ends = zip(box.offset, box.shape, strict=True)
    part = whole[tuple(slice(begin, begin + length) for begin, length in ends)]
    box.view[:] = np.ascontiguousarray(part).tobytes()
