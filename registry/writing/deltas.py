"""Choose the base of a lossless delta: the stored chunk that a new chunk differs little from.

It is the chunk with the same number in the first base state that has a tensor of this path, dtype
and shape, as long as its chain of deltas is short. `holdfast.registry.writing.encoding` decides
whether the delta is worth it; `holdfast.registry.store.fetching` reads deltas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IntegrityError, InvalidInput
from holdfast.registry.history import PlacedState
from holdfast.registry.objects import MAX_DEPTH, TensorEntry
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.store import Fetch, Store, index_chunks
from holdfast.registry.values import Digest
from holdfast.registry.writing.encoding import DeltaBase
from holdfast.registry.writing.placing import ChunkLocation


class Trials:
    """The tensors for which deltas gain nothing, so that not every save reads their bases in vain.

    They are not tried again for as many saves as a chain may have links. Any thread may call this.
    """

    def __init__(self) -> None:
        self._resting: dict[str, int] = {}

    def resting(self) -> frozenset[str]:
        """Begin a save; return the paths of the tensors that it does not try."""
        resting = self._resting
        self._resting = {path: left - 1 for path, left in resting.items() if left > 1}
        return frozenset(resting)

    def rest(self, path: str, saves: int) -> None:
        """Do not try a tensor in the next `saves` saves."""
        self._resting[path] = saves


class _Origin(NamedTuple):
    """A tensor of a base, its chunks, and the base."""

    entry: TensorEntry
    digests: Sequence[Digest]
    base: PlacedState


def check_keyframe_every(wanted: int | None, *, compresses: bool = True) -> int | None:
    """Check how often a chunk is stored whole, and return it."""
    if wanted is None:
        return None
    if type(wanted) is not int or not 1 <= wanted <= MAX_DEPTH:
        raise InvalidInput(
            "not a whole number in range",
            where="keyframe_every",
            expected=f"1 (no deltas) to {MAX_DEPTH}",
            found=quoted(wanted),
        )
    if wanted > 1 and not compresses:
        raise InvalidInput(
            "deltas without compression save nothing",
            where="keyframe_every",
            expected="compression 'zstd' or 'lz4' beside it",
            found="'none'",
        )
    return wanted


class Predecessors:
    """The earlier versions of the chunks of a state. Any thread may call this."""

    def __init__(
        self,
        store: Store,
        bases: Sequence[PlacedState],
        locations: Mapping[Digest, ChunkLocation],
        keyframe_every: int,
        trials: Trials,
    ) -> None:
        self._store = store
        self._bases = bases
        self._locations = locations
        self._keyframe_every = keyframe_every
        self._trials = trials
        self._resting = trials.resting()  # results of this save are for the next ones
        self._fetches: dict[Digest, Fetch] = {}

    def base_of(self, leaf: ArrayLeaf, number: int) -> DeltaBase | None:
        """Return the base for a delta of chunk `number` of a tensor."""
        path = leaf.path
        origin = self._origins.get(path)
        if origin is None or (origin.entry.dtype, origin.entry.shape) != (leaf.dtype, leaf.shape):
            return None
        if path in self._resting:
            return None
        digest, size = origin.digests[number], origin.entry.grid.sizes()[number]
        if self._links(digest) + 1 >= self._keyframe_every:
            return None
        return DeltaBase(
            digest,
            read=lambda: self._read(origin.base, digest, size),
            gains_nothing=lambda: self._trials.rest(path, self._keyframe_every),
        )

    def _links(self, digest: Digest) -> int:
        links = 0
        while links < self._keyframe_every and (base := self._locations[digest].base) is not None:
            digest = base
            links += 1
        return links

    def _read(self, base: PlacedState, digest: Digest, size: int) -> memoryview | None:
        """Return a chunk's bytes, verified; `None` if it is damaged or missing."""
        fetch = self._fetches.get(base.manifest.digest)
        if fetch is None:
            index = index_chunks(base.manifest, base.placement, base.lists)
            fetch = self._fetches[base.manifest.digest] = Fetch(self._store, base.placement, index)
        data = memoryview(bytearray(size))
        try:
            fetch.read({digest: data})
        except IntegrityError:
            return None  # a delta would be lost with its base
        return data

    @cached_property
    def _origins(self) -> dict[str, _Origin]:
        origins: dict[str, _Origin] = {}
        for base in self._bases:
            for name, part in base.manifest.components.items():
                paths = pytree.leaf_paths(name, part.skeleton)
                for index, entry in enumerate(part.tensors):
                    if entry.inline is None and paths[index] not in origins:
                        digests = entry.chunk_digests(base.lists)
                        origins[paths[index]] = _Origin(entry, digests, base)
        return origins
