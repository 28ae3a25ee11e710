"""Who stores which chunk, and which bytes travel for that: the plan of a layout.

Pure arithmetic on boxes, in NumPy: a chunk of the grid is a box of its tensor, and so is what a
rank has of it. `planning` makes plans. Specified in docs/spec.md, section 43.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from holdfast.registry.collective.patterns import Patterns
from holdfast.registry.collective.structure import Ints
from holdfast.registry.collective.wire import pack_table, unpack_table


@dataclass(frozen=True)
class Part:
    """What one rank does in the plan of a layout. The columns of each table are named in order.

    A rank has few distinct boxes, so tables have a row of `bounds` where others have a box.

    Attributes:
        rounds: The exchanges.
        bounds: Begin and end of each box.
        owned: Tensor, number in the tensor, number of all, round and box of each owned chunk.
        taken: Owned chunk, rank, round and box of each piece of those.
        given: Tensor, rank, round and box of each piece for the chunks of other ranks.
    """

    rounds: int
    bounds: Ints
    owned: Ints
    taken: Ints
    given: Ints

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
    """The plan of a layout for all ranks.

    Attributes:
        patterns: How the tensors are cut.
        loads: Whether the pieces travel from the owner of a chunk to every rank that has them, and
            not from one of those ranks to the owner.
        owner: The owner of each chunk.
        round: The round after which each chunk is complete.
        rounds: The exchanges.
        moved_bytes: The bytes that travel between ranks.
    """

    patterns: Patterns
    loads: bool
    owner: Ints
    round: Ints
    rounds: int
    moved_bytes: int

    def owned_by(self, rank: int) -> Ints:
        """Return the numbers of the chunks that a rank owns, in order."""
        order, ends = self._by_owner
        return order[ends[rank] : ends[rank + 1]]

    @cached_property
    def _by_owner(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.owner, kind="stable")
        return order, np.searchsorted(self.owner[order], np.arange(self.patterns.ranks + 1))

    @property
    def owned_bytes(self) -> Ints:
        """The bytes of the chunks that each rank owns."""
        patterns, chunks = self.patterns, np.arange(len(self.owner))
        sizes = patterns.slot_bytes[patterns.slots_of(chunks, patterns.tensor_of(chunks))]
        return np.bincount(self.owner, sizes, minlength=patterns.ranks).astype(np.int64)

    def part(self, rank: int) -> Part:
        """Return what a rank does."""
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
        return Part(
            self.rounds,
            np.column_stack([low, high]),
            np.column_stack([tensors, numbers, mine, self.round[mine], slot.reshape(-1)]),
            np.column_stack([at, source, self.round[mine[at]], piece[: len(taken)]]),
            np.column_stack([having, owner, self.round[of], piece[len(taken) :]]),
        )


def sources(patterns: Patterns, owners: Ints, chunks: Ints, pieces: Ints) -> Ints:
    """Return who gives pieces to the owners of their chunks: the owner itself if it has them.

    Args:
        patterns: How the tensors are cut.
        owners: The owner of each chunk of the layout.
        chunks: The chunk of each piece.
        pieces: The pieces.
    """
    box = patterns.piece_box[pieces]
    first = patterns.holders_first[box]
    if not patterns.has_copies:
        return patterns.holders[first]
    owner = owners[chunks]
    near = patterns.held[patterns.piece_pattern[pieces], owner] == box
    # The others take turns.
    other = patterns.holders[first + chunks % (patterns.holders_first[box + 1] - first)]
    return np.where(near, owner, other)
