"""Chunks made shorter: by a fixed codec, and only where a sample says that it is worth it.

Each tensor is tried once, on a part of its first chunk; one that hardly shrinks (some moments,
noise) stays raw as a whole. A chunk that does not get shorter stays raw by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backends import Buffer
from registry import codecs
from registry.codecs import RAW
from registry.digest import Digest
from registry.dtypes import item_size
from registry.pack import PackEntry
from registry.pytree import ArrayLeaf

#: So much of a tensor is tried.
_SAMPLE_BYTES = 128 * 1024
#: A sample that keeps more of its length than this is not worth decoding later.
WORTH = 0.95


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it is to be stored.

    Attributes:
        stored: Its bytes; where it is raw, the memory that it came from.
        raw_bytes: Its decoded length.
        codec: A name of `registry.codecs`.
        digest: SHA-256 of the stored bytes where it is not raw.
    """

    stored: Buffer
    raw_bytes: int
    codec: str = RAW
    digest: Digest | None = None


class Encoding:
    """How the chunks of one state are encoded. Any thread may ask.

    Args:
        codec: A name of `registry.codecs`.
    """

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._worth: dict[int, bool] = {}

    def encode(self, view: memoryview, leaf: ArrayLeaf | None) -> Encoded:
        """Return a chunk as it is to be stored.

        Args:
            view: Its raw bytes.
            leaf: The tensor that it is of; `None` for a list of digests, which never shrinks.
        """
        if leaf is None or not self._is_worth(view, leaf):
            return Encoded(view, len(view))
        stored = codecs.encode(view, item_size(leaf.dtype), self._codec)
        if len(stored) > len(view) * WORTH:
            return Encoded(view, len(view))
        return Encoded(stored, len(view), self._codec, Digest(hashlib.sha256(stored).digest()))

    def _is_worth(self, view: memoryview, leaf: ArrayLeaf) -> bool:
        # Two threads may both try a tensor; they find the same.
        known = self._worth.get(id(leaf))
        if known is None:
            item = item_size(leaf.dtype)
            begin = max(0, (len(view) - _SAMPLE_BYTES) // 2) // item * item
            sample = view[begin : begin + _SAMPLE_BYTES]
            if len(sample) == len(view):
                return True  # encoding it is the trial
            known = len(codecs.encode(sample, item, self._codec)) <= len(sample) * WORTH
            self._worth[id(leaf)] = known
        return known


def chain_entries(digests: Iterable[Digest], chunks: Sequence[Encoded]) -> tuple[PackEntry, ...]:
    """Return the entries of chunks that lie one after another in a pack."""
    entries, offset = [], 0
    for digest, chunk in zip(digests, chunks, strict=True):
        length = len(chunk.stored)
        entries.append(
            PackEntry(digest, offset, length, chunk.raw_bytes, chunk.codec, None, chunk.digest)
        )
        offset += length
    return tuple(entries)
