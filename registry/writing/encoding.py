"""Compress chunks, or store them as deltas, if a sample shows that it is worth it.

Each tensor is tried once, in its middle: if it hardly shrinks, as noise and some moments do, all of
it stays raw. A single chunk that does not get shorter stays raw too. Deltas of a tensor are tried
on its first chunk, and compared with compression alone. The base of a delta is the chunk with the
same number in the first base state that has a tensor of this path, dtype and shape. At the end of a
chain of deltas a chunk is stored whole; if it has hardly changed, its base is, once more, and the
chunk as a delta: who has the base then fetches little. `holdfast.registry.store.fetching` reads
deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from holdfast.backends import Buffer
from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import Archived, IntegrityError, InvalidInput
from holdfast.registry.history import PlacedState
from holdfast.registry.objects import MAX_DEPTH, PackEntry, TensorEntry, codecs
from holdfast.registry.objects.codecs import RAW
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.store import Fetch, Store, index_chunks
from holdfast.registry.values import Digest, item_size
from holdfast.registry.writing.placing import ChunkLocation

#: Bytes of a tensor that are tried.
_SAMPLE_BYTES = 128 * 1024
#: A sample that keeps more than this share of its length is not worth compressing.
WORTH = 0.95
#: A delta that is longer than this share of the compressed chunk is not worth reading two chunks.
DELTA_WORTH = 0.9
#: The same at the end of a chain, where it needs a base that is stored once more.
END_WORTH = 0.125


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk in its stored form."""

    stored: Buffer  # its stored bytes; if it is raw, the given memory
    raw_bytes: int
    codec: str = RAW  # a name of `holdfast.registry.objects.codecs`
    digest: Digest | None = None  # SHA-256 of the stored bytes, unless it is raw
    base: Digest | None = None  # the base, if it is a delta
    base_again: Encoded | None = None  # the base without deltas, if it is to be stored once more

    @classmethod
    def raw(cls, view: memoryview) -> Encoded:
        """Return a raw chunk."""
        return cls(view, len(view))


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """A stored chunk that can be the base of a delta."""

    digest: Digest  # the chunk
    #: Returns its bytes, verified, in fresh memory; `None` if it cannot be a base.
    read: Callable[[], memoryview | None]
    gains_nothing: Callable[[], None] = lambda: None  # called if it was read in vain
    room: int = MAX_DEPTH  # how many deltas its chain may still get


class Encoding:
    """The encoding of the chunks of one state. Any thread may call this."""

    def __init__(self, codec: str) -> None:
        self._codec = codec
        # Of deltas too: planes of differences gain nothing.
        self._stored_as = codecs.stored_as(codec)
        # By tensor, from the chunk that is tried first. Two threads may try the same tensor.
        self._ratios: dict[int, float] = {}
        self._delta_ratios: dict[int, float] = {}

    def encode(
        self,
        view: memoryview,
        leaf: ArrayLeaf | None,
        base: DeltaBase | None = None,
        whole: memoryview | None = None,
    ) -> Encoded:
        """Return a chunk in its stored form."""
        if leaf is None:
            return Encoded.raw(view)
        alone = None
        if len(view) <= _SAMPLE_BYTES:  # encoding it is the trial
            alone = self._alone(view, leaf.dtype)
            expected = len(alone.stored)
        else:
            expected = int(len(view) * self._ratio_of(leaf, view if whole is None else whole))
        if base is not None:
            delta = self._delta(view, leaf, base, expected)
            if delta is not None:
                return delta
        return alone or self._whole(view, leaf.dtype, expected)

    def _whole(self, view: memoryview, dtype: str, expected: int) -> Encoded:
        return self._alone(view, dtype) if expected < len(view) else Encoded.raw(view)

    def _alone(self, view: memoryview, dtype: str) -> Encoded:
        stored = codecs.encode(view, item_size(dtype), codecs.for_type(self._codec, dtype))
        if len(stored) > len(view) * WORTH:
            return Encoded.raw(view)
        return Encoded(stored, len(view), self._stored_as, Digest.of(stored))

    def _ratio_of(self, leaf: ArrayLeaf, data: memoryview) -> float:
        """Return the share of its length that compression leaves of a tensor."""
        ratio = self._ratios.get(id(leaf))
        if ratio is None:
            codec = codecs.for_type(self._codec, leaf.dtype)
            ratio = _ratio(data, item_size(leaf.dtype), codec)
            self._ratios[id(leaf)] = ratio = ratio if ratio <= WORTH else 1
        return ratio

    def _delta(
        self, view: memoryview, leaf: ArrayLeaf, base: DeltaBase, expected: int
    ) -> Encoded | None:
        """Return a chunk as a delta if that is worth it; whole it takes the `expected` bytes."""
        most_bytes = expected * (DELTA_WORTH if base.room > 1 else END_WORTH)
        ratio = self._delta_ratios.get(id(leaf))
        if ratio is not None and ratio * len(view) > most_bytes:
            return None
        delta = base.read()
        if delta is None:
            return None
        item = item_size(leaf.dtype)
        codecs.join(delta, view)  # the memory of the base becomes the delta
        if ratio is None:
            self._delta_ratios[id(leaf)] = ratio = _ratio(delta, item, self._stored_as)
            if ratio * len(view) > expected * DELTA_WORTH:
                base.gains_nothing()
                return None
        stored = codecs.encode(delta, item, self._stored_as)
        if len(stored) > most_bytes:
            return None
        digest = Digest.of(stored)
        again = None
        if base.room < 1:
            codecs.join(delta, view)  # the memory of the delta becomes the base
            again = self._whole(delta, leaf.dtype, expected)
        return Encoded(stored, len(view), self._stored_as, digest, base.digest, again)


def _ratio(view: memoryview, item: int, codec: str) -> float:
    """Return the share of its length that a codec leaves of the middle of a tensor."""
    begin = max(0, (len(view) - _SAMPLE_BYTES) // 2) // item * item
    # A copy: the tensor may change meanwhile, which a compressor does not expect.
    sample = bytes(view[begin : begin + _SAMPLE_BYTES])
    return len(codecs.encode(sample, item, codec)) / len(sample)


def chain_entries(digests: Iterable[Digest], chunks: Sequence[Encoded]) -> tuple[PackEntry, ...]:
    """Return the pack entries of chunks that are stored one after another."""
    entries, offset = [], 0
    for digest, chunk in zip(digests, chunks, strict=True):
        length = len(chunk.stored)
        entries.append(
            PackEntry(
                digest, offset, length, chunk.raw_bytes, chunk.codec, chunk.base, chunk.digest
            )
        )
        offset += length
    return tuple(entries)


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
            expected="compression 'auto', 'zstd' or 'lz4' beside it",
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
        return DeltaBase(
            digest,
            read=lambda: self._read(origin.base, digest, size),
            gains_nothing=lambda: self._trials.rest(path, self._keyframe_every),
            room=self._keyframe_every - self._links(digest),
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
        except (Archived, IntegrityError):
            return None  # a delta would be lost with its base, or wait with it
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
