"""What one ranged read is for, and the memory that it takes besides that of what is wanted.

Owns no reading: `holdfast.registry.storage.fetching` puts jobs together and does them.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Literal

from holdfast.backends import ByteRange
from holdfast.registry.storage.placement import ChunkRow, PackRef
from holdfast.registry.values.digest import Digest


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk, and the memory that its raw bytes go to.

    Attributes:
        row: Its row of the placement.
        digest: The chunk.
        place: Where it lies.
        raw_bytes: Its raw length.
        view: The memory; `None` for the base of a delta, which is only joined to others.
        is_raw: Whether its stored bytes are its raw ones.
    """

    row: int
    digest: Digest
    place: ChunkRow
    raw_bytes: int
    view: memoryview | None
    is_raw: bool

    @property
    def held_bytes(self) -> int:
        """What it takes of memory besides: what is stored, unless it goes where it is wanted."""
        return 0 if self.is_raw and self.view is not None else self.place.stored_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One ranged read: chunks that lie one after another in one pack."""

    pack: PackRef
    chunks: list[Wanted] = field(default_factory=list)

    @property
    def byte_range(self) -> ByteRange:
        """Where they lie in the pack."""
        last = self.chunks[-1].place
        return ByteRange(self.chunks[0].place.offset, last.offset + last.stored_bytes)

    def stored(self, scratch: Scratch) -> list[memoryview]:
        """Return memory for what is stored of each chunk: its own where it is raw and has some."""
        aside = scratch.take("stored", sum(chunk.held_bytes for chunk in self.chunks))
        found, start = [], 0
        for chunk in self.chunks:
            if chunk.view is not None and not chunk.held_bytes:
                found.append(chunk.view)
            else:
                found.append(aside[start : start + chunk.held_bytes])
                start += chunk.held_bytes
        return found


class Scratch:
    """Memory for a job and all that its deltas stand on, the same for each use.

    It goes back to the system with the job. What was freed to the heap would stay with the process,
    in pieces, for every thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, memoryview] = {}

    def take(self, use: Literal["stored", "raw", "base"], nbytes: int) -> memoryview:
        """Return so many bytes; what was taken for this use before is written over."""
        kept = self._kept.get(use, memoryview(b""))
        if len(kept) < nbytes:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            try:
                kept = self._kept[use] = memoryview(mmap.mmap(-1, nbytes, flags=private))
            except OSError as error:
                raise MemoryError(f"{nbytes} bytes to read into: {error.strerror}") from error
        return kept[:nbytes]
