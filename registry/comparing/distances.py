"""How far tensors of two stored states are apart, element by element.

Only chunks whose digests differ are read, every byte verified, in bounded memory: equal digests
are equal elements, and add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.registry.comparing.chunkwise import Piece, reduce_pieces
from holdfast.registry.loading.fit import tensors_by_path
from holdfast.registry.loading.stored import Stored, reader_of
from holdfast.registry.storage.manifest import TensorEntry

if TYPE_CHECKING:
    from holdfast.registry.comparing.elements import Change


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a tensor is from what it was.

    Attributes:
        norm: L2 norm of the difference.
        relative: That, divided by the L2 norm that those chunks had before which differ: unchanged
            chunks are not read. So it is at least what it is for the whole tensor, and just that
            where every chunk differs. Infinite where only zeros changed.
        max: Greatest absolute difference of an element; exact of integers.
        count: Number of elements.
        changed: Elements whose bits differ; a zero's sign is one.
        nonfinite: Those of them that are NaN or infinite before or after. The norms and `max`
            leave such elements out.
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
    """Return how far tensors are apart. Memory stays below 256 MiB.

    Args:
        before: A state.
        after: Another one, of any registry.
        paths: Of tensors that have the same dtype and shape in both.

    Raises:
        IntegrityError: A chunk is damaged or gone.
    """
    from holdfast.registry.comparing import (
        elements,  # with numpy, which a comparison of manifests needs not
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
