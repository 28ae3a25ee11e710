"""Chunks made shorter: by a fixed codec, and only where a sample says that it is worth it.

Each tensor is tried once, in its middle; one that hardly shrinks (some moments, noise) stays raw as
a whole. A chunk that does not get shorter stays raw by itself. Differences to another chunk are
tried on the first of them, against what compression alone would give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.backends import Buffer
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.storage import codecs
from holdfast.registry.storage.codecs import RAW
from holdfast.registry.storage.pack import PackEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import item_size

#: So much of a tensor is tried.
_SAMPLE_BYTES = 128 * 1024
#: A sample that keeps more of its length than this is not worth decoding later.
WORTH = 0.95
#: A difference that keeps more than this of what compression leaves is not worth reading two for.
DELTA_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it is to be stored.

    Attributes:
        stored: Its bytes; where it is raw, the memory that it came from.
        raw_bytes: Its decoded length.
        codec: A name of `holdfast.registry.storage.codecs`.
        digest: SHA-256 of the stored bytes where it is not raw.
        base: The chunk that it is a difference to.
    """

    stored: Buffer
    raw_bytes: int
    codec: str = RAW
    digest: Digest | None = None
    base: Digest | None = None

    @classmethod
    def raw(cls, view: memoryview) -> Encoded:
        """Return a chunk as it is."""
        return cls(view, len(view))


@dataclass(frozen=True, slots=True)
class Below:
    """What a chunk can be stored as the difference to.

    Attributes:
        digest: That chunk.
        read: Gives its bytes, verified, in memory of their own; `None` where nothing can be built
            on it.
        gains_nothing: Is told that it was read in vain.
    """

    digest: Digest
    read: Callable[[], memoryview | None]
    gains_nothing: Callable[[], None] = lambda: None


class Encoding:
    """How the chunks of one state are encoded. Any thread may ask.

    Args:
        codec: A name of `holdfast.registry.storage.codecs`.
    """

    def __init__(self, codec: str) -> None:
        self._codec = codec
        # By tensor. Two threads may both try one: of compression they find the same.
        self._ratios: dict[int, float] = {}
        self._gains_by_deltas: dict[int, bool] = {}

    def encode(
        self,
        view: memoryview,
        leaf: ArrayLeaf | None,
        below: Below | None = None,
        whole: memoryview | None = None,
    ) -> Encoded:
        """Return a chunk as it is to be stored.

        Args:
            view: Its raw bytes.
            leaf: The tensor that it is of; `None` for a list of digests, which never shrinks.
            below: What it can be stored as the difference to.
            whole: The tensor, where it is at hand: tried instead of whichever chunk comes first.
        """
        if leaf is None:
            return Encoded.raw(view)
        item = item_size(leaf.dtype)
        alone = None
        if len(view) <= _SAMPLE_BYTES:  # encoding it is the trial
            alone = self._alone(view, item)
            expected = len(alone.stored)
        else:
            expected = int(len(view) * self._ratio_of(leaf, view if whole is None else whole, item))
        if below is not None:
            difference = self._difference(view, leaf, below, int(expected * DELTA_WORTH))
            if difference is not None:
                return difference
        if alone is None:
            alone = self._alone(view, item) if expected < len(view) else Encoded.raw(view)
        return alone

    def _alone(self, view: memoryview, item: int) -> Encoded:
        stored = codecs.encode(view, item, self._codec)
        if len(stored) > len(view) * WORTH:
            return Encoded.raw(view)
        return Encoded(stored, len(view), self._codec, Digest(hashlib.sha256(stored).digest()))

    def _ratio_of(self, leaf: ArrayLeaf, data: memoryview, item: int) -> float:
        """Return to what compression will shrink a tensor; the same whoever asks first."""
        ratio = self._ratios.get(id(leaf))
        if ratio is None:
            ratio = self._ratio(data, item)
            self._ratios[id(leaf)] = ratio = ratio if ratio <= WORTH else 1
        return ratio

    def _ratio(self, view: memoryview, item: int) -> float:
        begin = max(0, (len(view) - _SAMPLE_BYTES) // 2) // item * item
        # A copy, since the tensor may change: a compressor is not made for that.
        sample = bytes(view[begin : begin + _SAMPLE_BYTES])
        return len(codecs.encode(sample, item, self._codec)) / len(sample)

    def _difference(
        self, view: memoryview, leaf: ArrayLeaf, below: Below, most_bytes: int
    ) -> Encoded | None:
        """Return a chunk as the difference to another one if that takes few bytes enough."""
        if not self._gains_by_deltas.get(id(leaf), True):
            return None
        base = below.read()
        if base is None:
            return None
        item = item_size(leaf.dtype)
        codecs.join(base, view)  # the base's memory becomes the difference
        if id(leaf) not in self._gains_by_deltas:
            gains = self._ratio(base, item) * len(view) <= most_bytes
            self._gains_by_deltas[id(leaf)] = gains
            if not gains:
                below.gains_nothing()
                return None
        stored = codecs.encode(base, item, self._codec)
        if len(stored) > most_bytes:
            return None
        digest = Digest(hashlib.sha256(stored).digest())
        return Encoded(stored, len(view), self._codec, digest, below.digest)


def chain_entries(digests: Iterable[Digest], chunks: Sequence[Encoded]) -> tuple[PackEntry, ...]:
    """Return the entries of chunks that lie one after another in a pack."""
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
