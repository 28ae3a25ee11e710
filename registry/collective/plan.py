"""Who stores which chunk, and which bytes travel for that: the plan of a layout.

Pure arithmetic on boxes, in NumPy: a chunk of the grid is a box of its tensor, and so is what a
rank has of it. Specified in docs/spec.md, section 43.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from holdfast.registry.collective.structure import Ints, Structure
from holdfast.registry.storage.chunking import grid
from holdfast.registry.values.dtypes import item_size

#: The most bytes that a rank sends, and that it receives, in one round.
ROUND_BYTES = 16 * 2**20


class WrongLayout(Exception):
    """The parts of a tensor do not make it whole.

    Attributes:
        tensor: The number of the tensor.
        what: The problem.
        found: What was found.
    """

    def __init__(self, tensor: int, what: str, found: str) -> None:
        super().__init__(what)
        self.tensor, self.what, self.found = tensor, what, found


@dataclass(frozen=True)
class Part:
    """What one rank does in the plan of a layout. The columns of each table are named in order.

    Attributes:
        rounds: The exchanges.
        chunks: Tensor, number in the tensor, number of all, round, begin, end of each owned chunk.
        takes: Owned chunk, rank, round, begin, end of each piece of those.
        gives: Tensor, rank, round, begin, end of each piece for the chunks of other ranks.
    """

    rounds: int
    chunks: Ints
    takes: Ints
    gives: Ints

    def encode(self) -> list[bytes]:
        """Return the tables as bytes."""
        head = np.array([self.rounds, self.chunks.shape[1], self.takes.shape[1]], np.int64)
        return [head.tobytes(), *(t.tobytes() for t in (self.chunks, self.takes, self.gives))]

    @classmethod
    def decode(cls, columns: Sequence[memoryview]) -> Self:
        """Read what `encode` has made."""
        head, chunks, takes, gives = (np.frombuffer(one, np.int64) for one in columns)
        rounds, wide, narrow = head.tolist()
        tables = chunks.reshape(-1, wide), takes.reshape(-1, narrow), gives.reshape(-1, narrow)
        return cls(rounds, *tables)


@dataclass(frozen=True)
class Plan:
    """The plan of a layout for all ranks.

    Attributes:
        structure: The tensors.
        ranks: The number of ranks.
        owner: The owner of each chunk.
        round: The round after which each chunk is complete.
        rounds: The exchanges.
        pieces: For each piece its chunk, and the rank that gives it, or gets it when loading.
        low: The begins of the pieces.
        high: Their ends.
    """

    structure: Structure
    ranks: int
    owner: Ints
    round: Ints
    rounds: int
    pieces: Ints
    low: Ints
    high: Ints

    def tensor_of(self, chunks: Ints) -> Ints:
        """Return the tensor of each chunk."""
        return np.searchsorted(self.structure.first, chunks, side="right") - 1

    def owned_by(self, rank: int) -> Ints:
        """Return the numbers of the chunks that a rank owns, in order."""
        order, ends = self._by_owner
        return order[ends[rank] : ends[rank + 1]]

    @cached_property
    def _by_owner(self) -> tuple[Ints, Ints]:
        return _grouped(self.owner, self.ranks)

    @cached_property
    def _taken(self) -> tuple[Ints, Ints]:
        return _grouped(self.owner[self.pieces[:, 0]], self.ranks)

    @cached_property
    def _given(self) -> tuple[Ints, Ints]:
        of, source = self.pieces[:, 0], self.pieces[:, 1]
        moved = np.flatnonzero(source != self.owner[of])
        order, ends = _grouped(source[moved], self.ranks)
        return moved[order], ends

    def part(self, rank: int) -> Part:
        """Return what a rank does."""
        mine = self.owned_by(rank)
        tensors = self.tensor_of(mine)
        numbers = mine - self.structure.first[tensors]
        low = np.zeros((len(mine), self.structure.axes), np.int64)
        high = np.zeros_like(low)
        for tensor in np.unique(tensors):
            at = tensors == tensor
            low[at], high[at] = self.structure.chunk_boxes(int(tensor), numbers[at])
        chunks = np.column_stack([tensors, numbers, mine, self.round[mine], low, high])
        of, source = self.pieces[:, 0], self.pieces[:, 1]
        taken, given = (
            order[ends[rank] : ends[rank + 1]] for order, ends in (self._taken, self._given)
        )
        return Part(
            self.rounds,
            chunks,
            self._table(np.searchsorted(mine, of[taken]), source[taken], taken),
            self._table(self.tensor_of(of[given]), self.owner[of[given]], given),
        )

    def _table(self, of: Ints, rank: Ints, at: Ints) -> Ints:
        return np.column_stack(
            [of, rank, self.round[self.pieces[at, 0]], self.low[at], self.high[at]]
        )

    @property
    def moved_bytes(self) -> int:
        """The bytes that travel between ranks."""
        of, source = self.pieces[:, 0], self.pieces[:, 1]
        moved = source != self.owner[of]
        items = np.array([item_size(one) for one in self.structure.dtypes] or [0], np.int64)
        volume = (self.high[moved] - self.low[moved]).prod(axis=1)
        return int((volume * items[self.tensor_of(of[moved])]).sum())


def _grouped(ranks: Ints, count: int) -> tuple[Ints, Ints]:
    """Return indices in the order of their ranks, and where those of each rank begin."""
    order = np.argsort(ranks, kind="stable")
    return order, np.searchsorted(ranks[order], np.arange(count + 1))


def make_plan(structure: Structure, layouts: Sequence[Ints], *, loads: bool = False) -> Plan:
    """Return the plan of a layout.

    Args:
        structure: The tensors.
        layouts: For each rank a table with a row for each tensor that is sharded: tensor, offset,
            extent. A tensor without a row is whole on every rank.
        loads: Whether the pieces travel from the owner of a chunk to every rank that has them, and
            not from one of those ranks to the owner.

    Raises:
        WrongLayout: The parts of a tensor overlap or leave gaps, or only some ranks shard it.
    """
    return _Planning(structure, len(layouts), loads=loads).plan(layouts)


class _Planning:
    """The making of one plan: chunk by chunk, pieces of a tensor at once."""

    def __init__(self, structure: Structure, ranks: int, *, loads: bool) -> None:
        self._structure, self._ranks, self._loads = structure, ranks, loads
        total = int(structure.first[-1])
        self._owner = np.zeros(total, np.int64)
        self._round = np.zeros(total, np.int64)
        self._owned = np.zeros(ranks, np.int64)
        self._sent = np.zeros(ranks, np.int64)
        # Of chunks that a rank owns, and of pieces of others: the present round, its bytes so far.
        self._turn = np.zeros((2, ranks), np.int64)
        self._fill = np.zeros((2, ranks), np.int64)
        self._rounds = 0
        self._found: list[tuple[Ints, Ints, Ints, Ints]] = []

    def plan(self, layouts: Sequence[Ints]) -> Plan:
        structure = self._structure
        rank = np.repeat(np.arange(len(layouts)), [len(one) for one in layouts])
        width = 1 + 2 * structure.axes
        rows = np.concatenate(layouts) if layouts else np.zeros((0, width), np.int64)
        order = np.argsort(rows[:, 0], kind="stable")
        rank, rows = rank[order], rows[order]
        ends = np.searchsorted(rows[:, 0], np.arange(len(structure.shapes) + 1))
        for tensor in range(len(structure.shapes)):
            at = slice(int(ends[tensor]), int(ends[tensor + 1]))
            if at.start == at.stop and not self._loads:
                self._add_whole(tensor)
            elif at.start == at.stop:
                self._add_sharded(tensor, np.arange(self._ranks), self._everywhere(tensor))
            else:
                self._add_sharded(tensor, rank[at], rows[at, 1:])
        chunk, source, low, high = (
            np.concatenate(column) if column else np.zeros(0, np.int64)
            for column in (list(zip(*self._found, strict=True)) or [()] * 4)
        )
        axes = structure.axes
        return Plan(
            structure,
            self._ranks,
            self._owner,
            self._round,
            self._rounds,
            np.column_stack([chunk, source]).astype(np.int64),
            low.reshape(-1, axes),
            high.reshape(-1, axes),
        )

    def _sizes(self, tensor: int) -> tuple[int, ...]:
        return grid(self._structure.dtypes[tensor], self._structure.shapes[tensor]).sizes()

    def _add_whole(self, tensor: int) -> None:
        first = int(self._structure.first[tensor])
        sizes = self._sizes(tensor)
        for number, size in enumerate(sizes, first):
            self._own(number, int(self._owned.argmin()), size)
        numbers = np.arange(len(sizes))
        low, high = self._structure.chunk_boxes(tensor, numbers)
        self._found.append((numbers + first, self._owner[numbers + first], low, high))

    def _everywhere(self, tensor: int) -> Ints:
        """Return the rows of a tensor that is whole on every rank."""
        shape = self._structure.padded(self._structure.shapes[tensor], 1)
        row = [0] * self._structure.axes + shape
        return np.tile(np.array(row, np.int64), (self._ranks, 1))

    def _own(self, chunk: int, owner: int, size: int) -> None:
        self._owner[chunk] = owner
        self._owned[owner] += size
        self._round[chunk] = self._turn[0, owner]

    def _add_sharded(self, tensor: int, rank: Ints, rows: Ints) -> None:
        boxes, holders = self._boxes(tensor, rank, rows)
        axes = self._structure.axes
        low = boxes[:, :axes]
        box, chunk, begin, end = self._structure.pieces(tensor, low, low + boxes[:, axes:])
        item = item_size(self._structure.dtypes[tensor])
        nbytes = (end - begin).prod(axis=1) * item
        sizes = self._sizes(tensor)
        self._check_cover(tensor, boxes, chunk, nbytes, sizes)
        first = int(self._structure.first[tensor])
        cuts = np.searchsorted(chunk, np.arange(len(sizes) + 1)).tolist()
        has_copies = any(len(one) > 1 for one in holders)
        sole = np.array([one[0] for one in holders], np.int64)
        source = sole[box]
        for number, size in enumerate(sizes):
            here = slice(cuts[number], cuts[number + 1])
            if has_copies:
                some = [holders[one] for one in box[here].tolist()]
                owner = self._owner_among(np.concatenate(some))
                ranks, moved = self._moves(owner, some, nbytes[here], source[here])
            else:
                ranks, moved = source[here], nbytes[here]
                owner = self._owner_among(ranks)
            self._own(first + number, owner, size)
            away = ranks != owner
            if away.any():
                at = self._travel(owner, ranks[away], moved[away], size)
                self._round[first + number] = at
        if self._loads:
            holding = [holders[one] for one in box.tolist()]
            source = np.concatenate(holding)
            spread = np.repeat(np.arange(len(box)), [len(one) for one in holding])
            chunk, begin, end = chunk[spread], begin[spread], end[spread]
        self._found.append((chunk + first, source, begin, end))

    def _owner_among(self, able: Ints) -> int:
        """Return the rank that owns the least so far."""
        return int(able[self._owned[able].argmin()])

    def _moves(
        self, owner: int, holders: Sequence[Ints], nbytes: Ints, source: Ints
    ) -> tuple[Ints, Ints]:
        """Choose who gives each piece of a chunk, if several ranks have it.

        Args:
            owner: The owner of the chunk.
            holders: Who has each piece.
            nbytes: The bytes of each piece.
            source: Filled with who gives each piece.

        Returns:
            The ranks with which pieces are exchanged, each once, and the bytes with each.
        """
        if self._loads:
            every = np.concatenate(holders)
            sizes = np.repeat(nbytes, [len(one) for one in holders])
        else:
            for number, having in enumerate(holders):
                near = owner in having
                source[number] = owner if near else having[self._sent[having].argmin()]
            every, sizes = source, nbytes
        ranks, inverse = np.unique(every, return_inverse=True)
        moved = np.bincount(inverse.reshape(-1), sizes, minlength=len(ranks))
        return ranks, moved.astype(np.int64)

    def _travel(self, owner: int, ranks: Ints, moved: Ints, size: int) -> int:
        """Return the first round that has room for the pieces of a chunk.

        Args:
            owner: Its owner.
            ranks: The other ranks that have pieces, each once.
            moved: The bytes with each of them.
            size: The bytes of the chunk.
        """
        turn, fill = self._turn, self._fill
        # When loading, the owner holds whole chunks until their pieces are sent.
        total = max(int(moved.sum()), size if self._loads else 0)
        now = max(int(turn[0, owner]), int(turn[1, ranks].max()))
        is_full = turn[0, owner] == now and fill[0, owner] + total > ROUND_BYTES
        if is_full or ((turn[1, ranks] == now) & (fill[1, ranks] + moved > ROUND_BYTES)).any():
            now += 1
        if turn[0, owner] < now:
            turn[0, owner], fill[0, owner] = now, 0
        fill[0, owner] += total
        fill[1, ranks] = np.where(turn[1, ranks] < now, 0, fill[1, ranks]) + moved
        turn[1, ranks] = now
        self._sent[ranks] += moved
        self._rounds = max(self._rounds, now + 1)
        return now

    def _boxes(self, tensor: int, rank: Ints, rows: Ints) -> tuple[Ints, list[Ints]]:
        """Return the distinct boxes of a tensor that are not empty, and who has each."""
        if len(rank) != self._ranks:
            raise WrongLayout(
                tensor, "a tensor is sharded on some ranks only", f"{len(rank)} of {self._ranks}"
            )
        axes = self._structure.axes
        filled = (rows[:, axes:] > 0).all(axis=1)
        boxes, inverse = np.unique(rows[filled], axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        order = np.argsort(inverse, kind="stable")
        ranks = rank[filled][order]
        cuts = np.searchsorted(inverse[order], np.arange(len(boxes) + 1))
        return boxes, [ranks[cuts[n] : cuts[n + 1]] for n in range(len(boxes))]

    def _check_cover(
        self, tensor: int, boxes: Ints, chunk: Ints, nbytes: Ints, sizes: Sequence[int]
    ) -> None:
        covered = np.bincount(chunk, nbytes, minlength=len(sizes))
        if not np.array_equal(covered, np.array(sizes, np.float64)) or _overlap(boxes):
            raise WrongLayout(
                tensor,
                "the ranks' parts of a tensor overlap or leave gaps",
                f"{int(covered.sum())} bytes of {sum(sizes)}",
            )


def _overlap(boxes: Ints) -> bool:
    """Return whether two of some distinct boxes overlap."""
    axes = boxes.shape[1] // 2
    low, high = boxes[:, :axes], boxes[:, :axes] + boxes[:, axes:]
    if all(_are_apart(low[:, axis], high[:, axis]) for axis in range(axes)):
        return False  # as for every mesh: the boxes are those of a lattice
    # Along the axis that tells most of them apart.
    axis = int(np.argmax([len(np.unique(low[:, one])) for one in range(axes)]))
    order = np.argsort(low[:, axis], kind="stable")
    low, high = low[order], high[order]
    for number in range(len(boxes) - 1):
        until = int(np.searchsorted(low[:, axis], high[number, axis]))
        others = slice(number + 1, until)
        meets = (low[others] < high[number]) & (high[others] > low[number])
        if meets.all(axis=1).any():
            return True
    return False


def _are_apart(low: Ints, high: Ints) -> bool:
    """Return whether no two different intervals of one axis overlap."""
    distinct = np.unique(np.column_stack([low, high]), axis=0)
    return bool((distinct[1:, 0] >= distinct[:-1, 1]).all())
