"""The distances between tensors of two stored states, element by element.

Only chunks whose digests differ are read, in bounded memory, and every byte is verified. Chunks
with equal digests have equal elements and add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.registry.comparing.chunkwise import Piece, reduce_pieces
from holdfast.registry.loading import StateHandle, tensors_by_path
from holdfast.registry.objects import TensorEntry

if TYPE_CHECKING:
    from holdfast.registry.comparing.elements import Change


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between a tensor in two states."""

    norm: float  # L2 norm of the difference
    #: `norm` divided by the L2 norm before of the chunks that differ; unchanged chunks are not
    #: read. So it is at least the relative distance of the whole tensor, and equal to it where
    #: every chunk differs. Infinite where only zeros changed.
    relative: float
    max: int | float  # greatest absolute difference of an element; exact for integers
    count: int
    changed: int  # number of elements whose bits differ; the sign of a zero is a bit
    #: Changed elements that are NaN or infinite before or after. The norms and `max` leave them
    #: out.
    nonfinite: int

    @property
    def changed_share(self) -> float:
        """Share of the elements whose bits differ."""
        return self.changed / self.count if self.count else 0.0


def distances(before: StateHandle, after: StateHandle, paths: Iterable[str]) -> dict[str, Distance]:
    """Return the distances of tensors by path. Memory stays below 256 MiB."""
    from holdfast.registry.comparing import elements

    old, new = (tensors_by_path(one.manifest.components) for one in (before, after))
    pieces = {path: _pieces(before, old[path], after, new[path]) for path in paths}
    found = reduce_pieces(
        [before.reader, after.reader],
        (piece for parts in pieces.values() for piece in parts),
        lambda piece, views: elements.compare(views[0], views[1], piece.dtype),
    )

    def change(path: str) -> Change:
        one, two = old[path].inline, new[path].inline
        if one is not None and two is not None:
            return elements.compare(memoryview(one), memoryview(two), new[path].dtype)
        return elements.join_changes(found[piece] for piece in pieces[path])

    return {path: _distance(new[path], change(path)) for path in pieces}


def differing_bytes(
    before: StateHandle, after: StateHandle, paths: Iterable[str]
) -> dict[str, int]:
    """Return by path how many bytes of chunks `distances` reads, of both states together."""
    old, new = (tensors_by_path(one.manifest.components) for one in (before, after))
    return {
        path: sum(2 * piece.nbytes for piece in _pieces(before, old[path], after, new[path]))
        for path in paths
    }


def _pieces(
    before: StateHandle, old: TensorEntry, after: StateHandle, new: TensorEntry
) -> list[Piece]:
    if new.inline is not None:
        return []
    first, second = before.reader.chunk_digests(old), after.reader.chunk_digests(new)
    chunks = zip(first, second, new.grid.sizes(), strict=True)
    return [Piece((one, two), new.dtype, size) for one, two, size in chunks if one != two]


def _distance(entry: TensorEntry, found: Change) -> Distance:
    relative = 0.0
    if found.norm:
        relative = found.norm / found.norm_before if found.norm_before else math.inf
    return Distance(
        found.norm,
        relative,
        found.largest,
        math.prod(entry.shape),
        found.changed,
        found.nonfinite,
    )
