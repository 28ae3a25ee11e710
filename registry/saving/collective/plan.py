"""The plan of a save or load: the owner of each chunk, and the bytes that travel.

Pure arithmetic on boxes, in NumPy: a chunk of the grid is a box of its tensor, and so is a
rank's part of the tensor. `make_plan` makes plans. Specified in docs/spec.md, section 43.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from holdfast.registry.saving.collective.patterns import Patterns
from holdfast.registry.saving.collective.shards import (
    Boxes,
    Ints,
    Structure,
    pack_table,
    unpack_table,
)


@dataclass(frozen=True)
class PlanPart:
    """One rank's part of a plan. The columns of each table are named in order.

    A rank has few distinct boxes, so tables have a row of `bounds` where others have a box.
    """

    rounds: int  # number of exchanges
    bounds: Ints  # begin and end of each box
    owned: Ints  # tensor, number in the tensor, number of all, round and box of each owned chunk
    taken: Ints  # owned chunk, rank, round and box of each piece of those
    given: Ints  # tensor, rank, round and box of each piece for the chunks of other ranks

    @cached_property
    def chunks(self) -> Ints:
        """`owned` with the begin and the end of each box."""
        return self._spelled(self.owned)

    @cached_property
    def takes(self) -> Ints:
        """`taken` with the begin and the end of each box."""
        return self._spelled(self.taken)

    @cached_property
    def gives(self) -> Ints:
        """`given` with the begin and the end of each box."""
        return self._spelled(self.given)

    def _spelled(self, table: Ints) -> Ints:
        return np.column_stack([table[:, :-1], self.bounds[table[:, -1]]])

    def encode(self) -> list[bytes]:
        """Return the tables as bytes."""
        head = np.array([[self.rounds]], np.int64)
        tables = (head, self.bounds, self.owned, self.taken, self.given)
        return [pack_table(one) for one in tables]

    @classmethod
    def decode(cls, columns: Sequence[memoryview]) -> Self:
        """Read what `encode` has made."""
        head, *tables = map(unpack_table, columns)
        return cls(int(head[0, 0]), *tables)


@dataclass(frozen=True)
class Plan:
    """The plan of a save or load for all ranks."""

    patterns: Patterns  # how the tensors are cut
    #: Whether pieces travel from the owner of a chunk to the ranks that need them (a load), or from
    #: one of those ranks to the owner (a save).
    loads: bool
    owner: Ints  # the owner of each chunk
    round: Ints  # the round after which each chunk is complete
    rounds: int  # number of exchanges
    moved_bytes: int  # bytes that travel between ranks

    def owned_by(self, rank: int) -> Ints:
        """Return the numbers of the chunks that a rank owns, in order."""
        order, ends = self._by_owner
        return order[ends[rank] : ends[rank + 1]]

    @cached_property
    def _by_owner(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.owner, kind="stable")
        return order, np.searchsorted(self.owner[order], np.arange(self.patterns.ranks + 1))

    def part(self, rank: int) -> PlanPart:
        """Return the part of one rank."""
        patterns = self.patterns
        mine = self.owned_by(rank)
        tensors = patterns.tensor_of(mine)
        slots = patterns.slots_of(mine, tensors)
        numbers = mine - patterns.structure.first[tensors]
        at, taken = patterns.pieces_of(slots)
        if self.loads:
            several, source = patterns.holders_of(taken)
            at, taken = at[several], taken[several]
        else:
            source = sources(patterns, self.owner, mine[at], taken)
        having, given = patterns.pieces_held(rank)
        first = patterns.structure.first - patterns.slots_first[np.append(patterns.of, 0)]
        of = first[having] + patterns.piece_slot[given]
        owner = self.owner[of]
        goes = owner != rank
        if not self.loads and patterns.has_copies:
            goes &= sources(patterns, self.owner, of, given) == rank
        having, given, of, owner = having[goes], given[goes], of[goes], owner[goes]
        some, slot = np.unique(slots, return_inverse=True)
        pieces, piece = np.unique(np.concatenate([taken, given]), return_inverse=True)
        piece = piece.reshape(-1) + len(some)
        low = np.concatenate([patterns.slot_low[some], patterns.piece_low[pieces]])
        high = np.concatenate([patterns.slot_high[some], patterns.piece_high[pieces]])
        return PlanPart(
            self.rounds,
            np.column_stack([low, high]),
            np.column_stack([tensors, numbers, mine, self.round[mine], slot.reshape(-1)]),
            np.column_stack([at, source, self.round[mine[at]], piece[: len(taken)]]),
            np.column_stack([having, owner, self.round[of], piece[len(taken) :]]),
        )


def sources(patterns: Patterns, owners: Ints, chunks: Ints, pieces: Ints) -> Ints:
    """Return the rank that gives each piece to the owner of its chunk; the owner, if it has it."""
    box = patterns.piece_box[pieces]
    first = patterns.holders_first[box]
    if not patterns.has_copies:
        return patterns.holders[first]
    owner = owners[chunks]
    near = patterns.held[patterns.piece_pattern[pieces], owner] == box
    # Other givers take turns.
    other = patterns.holders[first + chunks % (patterns.holders_first[box + 1] - first)]
    return np.where(near, owner, other)


# Make a plan: choose the owner of each chunk, and the round of each transfer.


#: Maximum number of bytes that a rank sends, or receives, in one round.
ROUND_BYTES = 16 * 2**20
#: Compare at most this many of the ranks that share a chunk.
_ABLE = 16
#: Step between the compared ranks of one chunk and of the next; a prime number.
_STRIDE = 2_654_435_761
#: Number of transfers whose rounds are chosen together, and of each owner's chunks.
_BATCH = 2**18
_WAVES = 16


def make_plan(structure: Structure, layouts: Sequence[Boxes], *, loads: bool = False) -> Plan:
    """Return the plan for the boxes of all ranks."""
    patterns = Patterns(structure, layouts)
    owner = _owners(patterns)
    rounds = _Rounds(patterns, owner, loads=loads)
    for batch in _batches(patterns, len(owner), loads=loads):
        rounds.add(batch)
    return Plan(patterns, loads, owner, rounds.of, rounds.count, rounds.moved_bytes)


def _owners(patterns: Patterns) -> Ints:
    """Choose each chunk's owner: the rank with the fewest bytes so far that has a part of it."""
    slots = [
        (_able(patterns, slot), size) for slot, size in enumerate(patterns.slot_bytes.tolist())
    ]
    first = patterns.slots_first.tolist()
    owned = [0] * patterns.ranks
    owners: list[int] = []
    for pattern in patterns.of.tolist():
        for able, size in slots[first[pattern] : first[pattern + 1]]:
            if len(able) > _ABLE:
                at = len(owners) * _STRIDE % (len(able) - _ABLE + 1)
                able = able[at : at + _ABLE].tolist()
            owner = able[0] if len(able) == 1 else min(able, key=owned.__getitem__)
            owned[owner] += size
            owners.append(owner)
    return np.array(owners, np.int64)


def _batches(patterns: Patterns, total: int, *, loads: bool) -> Iterator[Ints]:
    """Yield all chunks in order, in batches of about `_BATCH` pieces and copies of pieces."""
    weights = np.ones(len(patterns.piece_box), np.int64)
    if loads:
        weights = np.diff(patterns.holders_first)[patterns.piece_box]
    of_slot = np.bincount(patterns.piece_slot, weights, minlength=len(patterns.slot_bytes))
    chunks = np.arange(total)
    of_chunk = of_slot[patterns.slots_of(chunks, patterns.tensor_of(chunks))]
    number = of_chunk.cumsum() // _BATCH
    yield from np.split(chunks, np.flatnonzero(np.diff(number)) + 1)


def _able(patterns: Patterns, slot: int) -> Any:
    """Return the ranks with a part of a slot: a list, or an array for many."""
    pieces = slice(*patterns.pieces_first[slot : slot + 2])
    first = patterns.holders_first
    having = [patterns.holders[first[b] : first[b + 1]] for b in patterns.piece_box[pieces]]
    able = having[0] if len(having) == 1 else np.concatenate(having)
    return able if len(able) > _ABLE else able.tolist()


class _Rounds:
    """The choice of rounds, batch by batch.

    Chunks are taken in waves, one chunk of each owner. A round ends before the wave that would make
    a rank send or receive too much.
    """

    def __init__(self, patterns: Patterns, owner: Ints, *, loads: bool) -> None:
        self._patterns, self._owner, self._loads = patterns, owner, loads
        self.of: Ints = np.zeros(len(owner), np.int64)  # the round of each chunk
        self.count = self.moved_bytes = 0  # rounds so far, and bytes that travel in them
        self._now = 0
        # Bytes of each rank in this round: first for its own chunks, then for those of other ranks.
        self._fill: Ints = np.zeros(2 * patterns.ranks, np.int64)

    def add(self, chunks: Ints) -> None:
        """Choose the rounds of some chunks."""
        patterns, owner = self._patterns, self._owner
        slots = patterns.slots_of(chunks, patterns.tensor_of(chunks))
        at, piece = patterns.pieces_of(slots)
        if self._loads:
            several, other = patterns.holders_of(piece)
            at, piece = at[several], piece[several]
        else:
            other = sources(patterns, owner, chunks[at], piece)
        away = other != owner[chunks[at]]
        at, other, nbytes = at[away], other[away], patterns.piece_bytes[piece[away]]
        self.moved_bytes += int(nbytes.sum())
        self.of[chunks] = self._now
        moved = np.bincount(at, nbytes, minlength=len(chunks))
        travels = np.flatnonzero(moved)
        if self._loads:
            # The owner holds whole chunks until their pieces are sent.
            moved = np.maximum(moved, patterns.slot_bytes[slots])
        wave = np.zeros(len(chunks), np.int64)
        wave[travels] = _ordinals(owner[chunks[travels]])
        where = np.concatenate([travels, at])
        column = np.concatenate([owner[chunks[travels]], other + patterns.ranks])
        self._place(chunks, wave, where, column, np.concatenate([moved[travels], nbytes]))

    def _place(self, chunks: Ints, wave: Ints, where: Ints, column: Ints, nbytes: Ints) -> None:
        """Place transfers, each given by its chunk, the rank whose round it fills and its bytes."""
        order = np.argsort(wave[where], kind="stable")
        where, column, nbytes = where[order], column[order], nbytes[order]
        waves = int(wave[where[-1]]) + 1 if len(where) else 0
        first = np.searchsorted(wave[where], np.arange(waves + 1))
        at, width = 0, len(self._fill)
        while at < waves:
            until = min(at + _WAVES, waves)
            some = slice(first[at], first[until])
            cell = (wave[where[some]] - at) * width + column[some]
            table = np.bincount(cell, nbytes[some], minlength=(until - at) * width)
            filled = table.reshape(-1, width).cumsum(axis=0) + self._fill
            over = (filled > ROUND_BYTES).any(axis=1)
            fit = int(over.argmax()) if over.any() else until - at
            if fit:
                here = where[first[at] : first[at + fit]]
                self.of[chunks[here]] = self._now
                self._fill = filled[fit - 1].astype(np.int64)
                self.count = self._now + 1
                at += fit
            elif self._fill.any():
                self._next()
            else:
                some = slice(first[at], first[at + 1])
                self._place_singly(chunks, where[some], column[some], nbytes[some])
                at += 1

    def _place_singly(self, chunks: Ints, where: Ints, column: Ints, nbytes: Ints) -> None:
        """Place a wave that does not fit into one round, chunk by chunk."""
        order = np.argsort(where, kind="stable")
        ends = np.flatnonzero(np.diff(where[order], append=-1)) + 1
        begin = 0
        for end in ends.tolist():
            here = order[begin:end]
            columns, size = column[here], nbytes[here].astype(np.int64)
            if (self._fill[columns] + size > ROUND_BYTES).any() and self._fill.any():
                self._next()
            self._fill[columns] += size  # a rank occurs once: as the owner, or with its piece
            self.of[chunks[where[here[0]]]] = self._now
            self.count = self._now + 1
            begin = end

    def _next(self) -> None:
        self._now += 1
        self._fill = np.zeros_like(self._fill)


def _ordinals(values: Ints) -> Ints:
    """Return how often each value occurred before its position."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return found
