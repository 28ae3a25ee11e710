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
from holdfast.registry.loading.fit import tensors_by_path
from holdfast.registry.loading.stored import Stored, reader_of
from holdfast.registry.storage.tensor_entry import TensorEntry

if TYPE_CHECKING:
    from holdfast.registry.comparing.elements import Change


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between a tensor in two states.

    Attributes:
        norm: L2 norm of the difference.
        relative: `norm` divided by the L2 norm before of the chunks that differ; unchanged chunks
            are not read. So it is at least the relative distance of the whole tensor, and equal to
            it where every chunk differs. Infinite where only zeros changed.
        max: Greatest absolute difference of an element; exact for integers.
        count: Number of elements.
        changed: Number of elements whose bits differ; the sign of a zero is a bit.
        nonfinite: Changed elements that are NaN or infinite before or after. The norms and `max`
            leave them out.
    """

    norm: float
    relative: float
    max: int | float
    count: int
    changed: int
    nonfinite: int

    @property
    def changed_share(self) -> float:
        """Share of the elements whose bits differ."""
        return self.changed / self.count if self.count else 0.0


def distances(before: Stored, after: Stored, paths: Iterable[str]) -> dict[str, Distance]:
    """Return the distances of tensors by path. Memory stays below 256 MiB.

    Args:
        before: A state.
        after: Another one, of any registry.
        paths: Paths of tensors that have the same dtype and shape in both.

    Raises:
        IntegrityError: A chunk is damaged or gone.
    """
    from holdfast.registry.comparing import (
        elements,  # imports numpy, which a comparison of manifests does not need
    )

    old, new = (tensors_by_path(one.manifest.components) for one in (before, after))
    pieces = {path: _pieces(before, old[path], after, new[path]) for path in paths}
    found = reduce_pieces(
        [reader_of(before), reader_of(after)],
        (piece for parts in pieces.values() for piece in parts),
        lambda piece, views: elements.compare(views[0], views[1], piece.dtype),
    )

    def change(path: str) -> Change:
        one, two = old[path].inline, new[path].inline
        if one is not None and two is not None:
            return elements.compare(memoryview(one), memoryview(two), new[path].dtype)
        return elements.join_changes(found[piece] for piece in pieces[path])

    return {path: _distance(new[path], change(path)) for path in pieces}


def differing_bytes(before: Stored, after: Stored, paths: Iterable[str]) -> dict[str, int]:
    """Return by path how many bytes of chunks `distances` reads, of both states together.

    Args:
        before: A state.
        after: Another one.
        paths: Paths of tensors that have the same dtype and shape in both.

    Raises:
        IntegrityError: A list of digests is damaged or gone.
    """
    old, new = (tensors_by_path(one.manifest.components) for one in (before, after))
    return {
        path: sum(2 * piece.nbytes for piece in _pieces(before, old[path], after, new[path]))
        for path in paths
    }


def _pieces(before: Stored, old: TensorEntry, after: Stored, new: TensorEntry) -> list[Piece]:
    if new.inline is not None:
        return []
    first, second = reader_of(before).chunk_digests(old), reader_of(after).chunk_digests(new)
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
