"""Lossless deltas: which chunk a new one can be stored as the difference to.

That is the chunk in its place in the first base that has a tensor of this path, dtype and shape,
as long as the chain of differences below it is short. What wins by it is the business of
`holdfast.registry.writing.encoding`; reading deltas that of `holdfast.registry.storage.fetching`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IntegrityError, InvalidInput
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.storage.fetching import Fetch
from holdfast.registry.storage.manifest import TensorEntry, parse_list
from holdfast.registry.storage.placement import MAX_DEPTH
from holdfast.registry.storage.reading import index_chunks
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.encoding import Below
from holdfast.registry.writing.placing import ChunkLocation


class Trials:
    """Which tensors gain nothing by differences, so that not every save reads their bases in vain.

    They rest for as many saves as a chain may have links. Any thread may tell.
    """

    def __init__(self) -> None:
        self._resting: dict[str, int] = {}

    def resting(self) -> frozenset[str]:
        """Begin a save; return the paths of the tensors that it is not to try."""
        resting = self._resting
        self._resting = {path: left - 1 for path, left in resting.items() if left > 1}
        return frozenset(resting)

    def rest(self, path: str, saves: int) -> None:
        """Remember that a tensor has gained nothing: so many saves are not to try it."""
        self._resting[path] = saves


class _Origin(NamedTuple):
    """A tensor of a base, its chunks, and the base."""

    entry: TensorEntry
    digests: Sequence[Digest]
    base: PlacedState


def check_keyframe_every(wanted: int | None, *, compresses: bool = True) -> int | None:
    """Return how often a chunk is to be stored whole, as it was asked for.

    Args:
        wanted: What was asked for; `None` for nothing.
        compresses: Whether chunks may be compressed: differences are worth nothing otherwise.

    Raises:
        InvalidInput: It is not a number of versions that a chain may have.
    """
    if wanted is None:
        return None
    if type(wanted) is not int or not 1 <= wanted <= MAX_DEPTH:
        raise InvalidInput(
            "not a distance of keyframes",
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
    """The chunks that those of a state take the place of. Any thread may ask.

    Args:
        store: Where they are.
        bases: States of the run, the nearest first.
        locations: Where the chunks of the bases lie.
        keyframe_every: So many versions of a chunk at most are read for the last of them.
        trials: What earlier saves have found.
    """

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
        self._spots = locations
        self._keyframe_every = keyframe_every
        self._trials = trials
        self._resting = trials.resting()  # what this save finds is for the next ones
        self._fetches: dict[Digest, Fetch] = {}

    def below(self, leaf: ArrayLeaf, number: int) -> Below | None:
        """Return what chunk `number` of a tensor can be stored as the difference to."""
        path = leaf.path
        origin = self._origins.get(path)
        if origin is None or (origin.entry.dtype, origin.entry.shape) != (leaf.dtype, leaf.shape):
            return None
        if path in self._resting:
            return None
        digest, size = origin.digests[number], origin.entry.grid.sizes()[number]
        if self._links(digest) + 1 >= self._keyframe_every:
            return None
        return Below(
            digest,
            read=lambda: self._read(origin.base, digest, size),
            gains_nothing=lambda: self._trials.rest(path, self._keyframe_every),
        )

    def _links(self, digest: Digest) -> int:
        links = 0
        while links < self._keyframe_every and (below := self._spots[digest].base) is not None:
            digest = below
            links += 1
        return links

    def _read(self, base: PlacedState, digest: Digest, size: int) -> memoryview | None:
        """Return a chunk's bytes, verified; `None` where it is damaged or gone."""
        fetch = self._fetches.get(base.manifest.digest)
        if fetch is None:
            places = index_chunks(base.manifest, base.placement, base.lists)
            fetch = self._fetches[base.manifest.digest] = Fetch(self._store, base.placement, places)
        data = memoryview(bytearray(size))
        try:
            fetch.read({digest: data})
        except IntegrityError:
            return None  # a difference to it would be lost with it
        return data

    @cached_property
    def _origins(self) -> dict[str, _Origin]:
        origins: dict[str, _Origin] = {}
        for base in self._bases:
            for name, part in base.manifest.components.items():
                paths = pytree.leaf_paths(name, part.skeleton)
                for index, entry in enumerate(part.tensors):
                    if entry.inline is None and paths[index] not in origins:
                        digests = _chunks(entry, base.lists)
                        origins[paths[index]] = _Origin(entry, digests, base)
        return origins


def _chunks(entry: TensorEntry, lists: Mapping[Digest, bytes]) -> Sequence[Digest]:
    if entry.chunk_list is None:
        return entry.chunks
    return parse_list(lists[entry.chunk_list], entry.grid.count, where=entry.chunk_list)
