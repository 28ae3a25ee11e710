"""Patterns of the ranks' boxes: tensors that all ranks cut alike share one pattern.

A model has thousands of tensors and a few dozen shapes, so the arithmetic on boxes is done once for
each pattern, and the tables of a plan do not grow with the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from holdfast.registry.objects import grid
from holdfast.registry.saving.collective.shards import WHOLE, Boxes, Ints, Structure
from holdfast.registry.values import item_size


class WrongLayout(Exception):
    """The parts of a tensor overlap or leave gaps."""

    def __init__(self, tensor: int, what: str, found: str) -> None:
        super().__init__(what)
        self.tensor = tensor  # its number
        self.what, self.found = what, found


class Patterns:
    """The chunks, boxes and pieces of each pattern. A piece is a chunk cut at a box.

    Attributes:
        structure: The tensors.
        ranks: The number of ranks.
        of: The pattern of each tensor.
        slot_bytes: Length of each chunk of each pattern: a *slot*.
        slot_low: The begin of each slot.
        slot_high: Its end.
        piece_slot: The slot of each piece; pieces are ordered by slot, then by box.
        piece_box: The box of each piece.
        piece_low: The begin of each piece.
        piece_high: Its end.
        piece_bytes: Its length.
        held: The rank's box, for each pattern and rank; -1 without one.
        holders: The ranks that have each box, one box after another.
        holders_first: Where the ranks of each box begin in `holders`.
    """

    def __init__(self, structure: Structure, layouts: Sequence[Boxes]) -> None:
        self.structure, self.ranks = structure, len(layouts)
        self._layouts = _Layouts(layouts)
        self.of, first = _patterns(structure, self._layouts)
        axes = structure.axes
        self._slots = [0]
        self._boxes = 0
        slots: list[tuple[Ints, ...]] = []
        pieces: list[tuple[Ints, ...]] = []
        holders: list[Ints] = []
        self.held: Ints = np.full((len(first), self.ranks), -1, np.int64)
        for pattern, tensor in enumerate(first.tolist()):
            boxes, inverse = self._distinct(tensor)
            has = inverse >= 0
            self.held[pattern, has] = inverse[has] + self._boxes
            order = np.argsort(inverse, kind="stable")
            holders.append(order[len(inverse) - int(has.sum()) :])
            self._add(tensor, boxes, slots, pieces)
        self.slot_bytes, self.slot_low, self.slot_high = _joined(slots, (0, axes, axes))
        columns = _joined(pieces, (0, 0, axes, axes, 0))
        self.piece_slot, self.piece_box, self.piece_low, self.piece_high, self.piece_bytes = columns
        self.holders: Ints = np.concatenate([*holders, np.zeros(0, np.int64)])
        counts = np.bincount(self.held[self.held >= 0], minlength=self._boxes)
        self.holders_first = _firsts(counts)

    def _distinct(self, tensor: int) -> tuple[Ints, Ints]:
        """Return a tensor's distinct boxes that are not empty, and the row of each rank's box."""
        rows = self._layouts.of_tensor(tensor, self.structure)
        axes = self.structure.axes
        filled = (rows[:, axes:] > 0).all(axis=1)
        boxes, inverse = np.unique(rows[filled], axis=0, return_inverse=True)
        found = np.full(self.ranks, -1, np.int64)
        found[filled] = inverse.reshape(-1)
        return boxes, found

    def _add(
        self,
        tensor: int,
        boxes: Ints,
        slots: list[tuple[Ints, ...]],
        pieces: list[tuple[Ints, ...]],
    ) -> None:
        structure = self.structure
        axes = structure.axes
        dtype = structure.dtypes[tensor]
        sizes = np.array(grid(dtype, structure.shapes[tensor]).sizes(), np.int64)
        low = boxes[:, :axes]
        box, slot, begin, end = structure.pieces(tensor, low, low + boxes[:, axes:])
        nbytes = (end - begin).prod(axis=1) * item_size(dtype)
        covered = np.bincount(slot, nbytes, minlength=len(sizes))
        if not np.array_equal(covered, sizes.astype(np.float64)) or _overlap(boxes):
            raise WrongLayout(
                tensor,
                "the ranks' parts of a tensor overlap or leave gaps",
                f"{int(covered.sum())} bytes of {sizes.sum()}",
            )
        slots.append((sizes, *structure.chunk_boxes(tensor, np.arange(len(sizes)))))
        pieces.append((slot + self._slots[-1], box + self._boxes, begin, end, nbytes))
        self._slots.append(self._slots[-1] + len(sizes))
        self._boxes += len(boxes)

    @cached_property
    def slots_first(self) -> Ints:
        """The first slot of each pattern; the count of all slots at the end."""
        return np.array(self._slots, np.int64)

    @cached_property
    def pieces_first(self) -> Ints:
        """The first piece of each slot; the count of all pieces at the end."""
        return np.searchsorted(self.piece_slot, np.arange(len(self.slot_bytes) + 1))

    @cached_property
    def piece_pattern(self) -> Ints:
        """The pattern of each piece."""
        return np.searchsorted(self.slots_first, self.piece_slot, side="right") - 1

    @cached_property
    def has_copies(self) -> bool:
        """Whether several ranks have one box."""
        return len(self.holders) > self._boxes

    def tensor_of(self, chunks: Ints) -> Ints:
        """Return the tensor of each chunk."""
        return np.searchsorted(self.structure.first, chunks, side="right") - 1

    def slots_of(self, chunks: Ints, tensors: Ints) -> Ints:
        """Return the slot of each chunk, given its tensor."""
        return self.slots_first[self.of[tensors]] + chunks - self.structure.first[tensors]

    def pieces_of(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the pieces of slots in two columns: the slot's place in the list, the piece."""
        first = self.pieces_first
        return ranges(first[slots], first[slots + 1] - first[slots])

    def pieces_held(self, rank: int) -> tuple[Ints, Ints]:
        """Return the tensor and the number of each piece of a rank's boxes, in order of chunks."""
        order, first = self._by_box
        held = self.held[self.of, rank]
        tensors = np.flatnonzero(held >= 0)
        held = held[tensors]
        at, place = ranges(first[held], first[held + 1] - first[held])
        return tensors[at], order[place]

    @cached_property
    def _by_box(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.piece_box, kind="stable")
        return order, np.searchsorted(self.piece_box[order], np.arange(self._boxes + 1))

    def holders_of(self, pieces: Ints) -> tuple[Ints, Ints]:
        """Return the ranks that have pieces in two columns: the place of the piece, the rank."""
        box = self.piece_box[pieces]
        first = self.holders_first
        at, place = ranges(first[box], first[box + 1] - first[box])
        return at, self.holders[place]


class _Layouts:
    """The boxes of all ranks, as a few arrays."""

    def __init__(self, layouts: Sequence[Boxes]) -> None:
        known: dict[bytes, int] = {}
        self.distinct: list[Ints] = []
        kinds = []
        for one in layouts:
            kind = known.setdefault(one.of.tobytes(), len(known))
            if kind == len(self.distinct):
                self.distinct.append(one.of)
            kinds.append(kind)
        self._kinds = np.array(kinds, np.int64)
        self._rows = np.concatenate([one.distinct for one in layouts])
        self._first = _firsts(np.array([len(one.distinct) for one in layouts], np.int64))[:-1]

    def of_tensor(self, tensor: int, structure: Structure) -> Ints:
        """Return offset and extent of each rank's box of a tensor."""
        of = np.array([one[tensor] for one in self.distinct], np.int64)[self._kinds]
        whole = of == WHOLE
        if whole.all():
            row = [0] * structure.axes + structure.padded(structure.shapes[tensor], 1)
            return np.tile(np.array(row, np.int64), (len(of), 1))
        if whole.any():
            found = f"{len(of) - int(whole.sum())} of {len(of)}"
            raise WrongLayout(tensor, "a tensor is sharded on some ranks only", found)
        rows: Ints = self._rows[self._first + of]
        return rows


def _patterns(structure: Structure, layouts: _Layouts) -> tuple[Ints, Ints]:
    """Return the pattern of each tensor, and the first tensor of each pattern."""
    known: dict[object, int] = {}
    forms = zip(structure.dtypes, structure.shapes, strict=True)
    of = np.array([known.setdefault(form, len(known)) for form in forms], np.int64)
    first = np.zeros(0, np.int64)
    # Boxes are distinct on each rank, so different numbers mean different boxes.
    for one in [of, *layouts.distinct]:
        number = one - min(WHOLE, int(one.min(initial=0)))
        key = of * (int(number.max(initial=0)) + 1) + number
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        of = inverse.reshape(-1)
    return of, first


def ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of several ranges in two columns: the place of the range, the number."""
    at: Ints = np.repeat(np.arange(len(counts)), counts)
    before = counts.cumsum(dtype=np.int64) - counts
    return at, np.arange(len(at)) + (starts - before)[at]


def _firsts(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _joined(parts: list[tuple[Ints, ...]], widths: tuple[int, ...]) -> list[Ints]:
    """Join the columns of several tables; a width of 0 is a column of numbers."""
    return [
        np.concatenate([np.zeros((0, width) if width else 0, np.int64), *(one[n] for one in parts)])
        for n, width in enumerate(widths)
    ]


def _overlap(boxes: Ints) -> bool:
    """Return whether two of some distinct boxes overlap."""
    axes = boxes.shape[1] // 2
    low, high = boxes[:, :axes], boxes[:, :axes] + boxes[:, axes:]
    if all(_are_apart(low[:, axis], high[:, axis]) for axis in range(axes)):
        return False  # the usual case: the boxes of a mesh form a lattice
    # Along the axis with the most distinct intervals.
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
