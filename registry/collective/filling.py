"""Fill boxes of a stored state's tensors: all ranks together, or one rank alone.

Together, every rank fetches a share of the chunks, and sends the others their pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.registry.collective.boxes import Boxes
from holdfast.registry.collective.group import Group, LinksBroken
from holdfast.registry.collective.patterns import WrongLayout
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.planning import make_plan
from holdfast.registry.collective.rounds import within
from holdfast.registry.collective.spreading import spread_chunks
from holdfast.registry.collective.structure import Ints, Structure
from holdfast.registry.collective.talk import Calls, Talk
from holdfast.registry.collective.wire import broken, join, unlinked
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history.state_reader import StateReader
from holdfast.registry.storage.tensor_entry import TensorEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import item_size

#: A rank alone asks for chunks in batches of about this size.
_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Box:
    """A part of a stored tensor, and the memory for it.

    Attributes:
        path: Its name, for messages.
        entry: The tensor.
        offset: The begin of the part, on each axis.
        shape: Its lengths.
        view: The memory; flat and writable.
        is_sharded: Whether the ranks have different parts; otherwise all have the whole tensor.
    """

    path: str
    entry: TensorEntry
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    view: memoryview
    is_sharded: bool = True


class Filling:
    """The boxes that one rank fills.

    Args:
        reader: Reads the state.
        boxes: The boxes, in an order that is the same on all ranks.

    Attributes:
        structure: The tensors that are read in chunks, in order.
        boxes: The boxes that this rank has of them.
    """

    def __init__(self, reader: StateReader, boxes: Sequence[Box]) -> None:
        self._reader = reader
        for one in boxes:
            if one.entry.inline:
                _fill_inline(one)
        self._boxes = [one for one in boxes if one.entry.inline is None and one.entry.nbytes]
        entries = [one.entry for one in self._boxes]
        self.structure = Structure(
            tuple(one.dtype for one in entries), tuple(one.shape for one in entries)
        )
        self._items = [item_size(one.dtype) for one in entries]
        rows = [
            [number, *self._padded(one.offset, 0), *self._padded(one.shape, 1)]
            for number, one in enumerate(self._boxes)
            if one.is_sharded
        ]
        table = np.array(rows, np.int64).reshape(-1, 1 + 2 * self.structure.axes)
        self.boxes = Boxes.from_rows(table, len(self._boxes))
        self._memory: dict[int, tuple[Any, Ints]] = {}

    def _padded(self, lengths: tuple[int, ...], fill: int) -> list[int]:
        return self.structure.padded(lengths, fill)

    def alone(self) -> None:
        """Fill the boxes; no other rank takes part.

        Raises:
            IntegrityError: An object is damaged.
        """
        wanted: list[tuple[int, int, Any]] = []
        copies: list[tuple[Any, Any]] = []
        size = 0
        for tensor, number, here, shape, inner in self._chunks_met():
            if inner is None:  # the box holds all of the chunk, so its bytes are contiguous there
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

        Each is its tensor and number, the memory of its part in the box, its shape with an axis for
        the bytes of an element, and the place of the part in it; `None` if that is all of it.
        """
        for tensor, one in enumerate(self._boxes):
            if 0 in one.shape:
                continue
            box, offset = self._memory_of(tensor)
            ends = offset + np.array(self._padded(one.shape, 1), np.int64)
            _, numbers, begin, end = self.structure.pieces(tensor, offset[None], ends[None])
            low, high = self.structure.chunk_boxes(tensor, numbers)
            is_whole = ((begin == low) & (end == high)).all(axis=1)
            for at, number in enumerate(numbers.tolist()):
                here = box[within(begin[at] - offset, end[at] - offset)]
                shape = (*(high[at] - low[at]).tolist(), self._items[tensor])
                inner = None if is_whole[at] else within(begin[at] - low[at], end[at] - low[at])
                yield tensor, number, here, shape, inner

    def _fetch(self, wanted: list[tuple[int, int, Any]], copies: list[tuple[Any, Any]]) -> None:
        """Read chunks, then copy parts of them to the boxes; forget both."""
        self._read(wanted)
        for here, piece in copies:
            here[...] = piece
        wanted.clear()
        copies.clear()

    def together(self, calls: Calls, talk: Talk, digest: str, settle: Callable[[], None]) -> None:
        """Fill the boxes of all ranks; every rank calls it, and all end it together.

        Args:
            calls: The calls of the ranks.
            talk: This call.
            digest: The digest of what all ranks must have alike, besides the structure.
            settle: Finishes the memory of this rank once its boxes are filled.

        Raises:
            IncompatibleState: The ranks have different digests, or their parts leave gaps.
            IntegrityError: An object is damaged.
            RankFailed: Another rank is dead or late.
        """
        alike = hashlib.sha256(digest.encode() + self.structure.digest).hexdigest()
        self._exchange(calls, talk, self._agree(calls.group, talk, alike), settle)

    def _agree(self, group: Group, talk: Talk, digest: str) -> Part:
        """Compare what the ranks load, and plan; return this rank's part."""
        talk.is_about(digest)
        said = join({"digest": digest}, *self.boxes.encode())
        if group.rank:
            talk.report(said)
            _listen(talk)
            return Part.decode(talk.hear_own("planning a load")[1])
        found = talk.gather(said, "beginning a load")
        for rank, (header, _) in enumerate(found):
            if header["digest"] != digest:
                if talk.has_left(rank):  # it has loaded alone: this rank has missed that
                    talk.go_on(header["digest"])
                raise IncompatibleState(
                    "the ranks load different checkpoints, or into different tensors",
                    where=f"rank {rank}",
                    hint="Give every rank the same checkpoint and a target of the same paths.",
                )
        boxes = [Boxes.decode(columns) for _, columns in found]
        try:
            plan = make_plan(self.structure, boxes, loads=True)
        except WrongLayout as error:
            where = self._boxes[error.tensor].path
            raise IncompatibleState(error.what, where=where, found=error.found) from error
        talk.order({"failure": None})
        for rank in range(1, group.size):
            talk.order_one(rank, {}, *plan.part(rank).encode())
        return plan.part(0)

    def _exchange(self, calls: Calls, talk: Talk, part: Part, settle: Callable[[], None]) -> None:
        """Carry the plan out, and wait until all ranks have."""
        group = calls.group
        try:
            self._spread(group, calls.links, part)
        except LinksBroken as error:
            group.break_links(calls.links)
            if not group.rank:
                talk.say_why(error, "exchanging parts of tensors")
            talk.report(broken(error, group.rank))
            _listen(talk)
            raise unlinked([group.rank], str(error)) from error
        settle()
        if group.rank:
            talk.report(join({}))
            _listen(talk)
            return
        talk.gather(join({}), "loading their parts")
        talk.order({"failure": None})

    def _spread(self, group: Group, links: str, part: Part) -> None:
        def read(wanted: Mapping[int, Any]) -> None:
            named = part.chunks[list(wanted), :2].tolist()
            self._read([(*one, data) for one, data in zip(named, wanted.values(), strict=True)])

        spread_chunks(group, links, part, self._items, self._memory_of, read)
        self._memory.clear()

    def _memory_of(self, tensor: int) -> tuple[Any, Ints]:
        """Return the bytes of this rank's box of a tensor, and the begin of the box."""
        found = self._memory.get(tensor)
        if found is None:
            one = self._boxes[tensor]
            shape = [*self._padded(one.shape, 1), self._items[tensor]]
            box = np.frombuffer(one.view, np.uint8).reshape(shape)
            found = box, np.array(self._padded(one.offset, 0), np.int64)
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


def _listen(talk: Talk) -> None:
    """Wait for rank 0.

    Raises:
        RegistryError: A rank has failed; its error.
    """
    header, _ = talk.hear("leading the load")
    if header["failure"] is not None:
        raise talk.failed(header)
