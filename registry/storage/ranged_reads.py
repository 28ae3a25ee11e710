"""One ranged read: the chunks that it fetches, and the scratch memory that it needs.

This module reads nothing: `holdfast.registry.storage.fetching` plans the jobs and runs them.
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
    """A chunk to read, and the memory for its raw bytes.

    Attributes:
        row_number: The number of its row in the placement.
        digest: The chunk.
        row: Its row in the placement.
        raw_bytes: Its raw length.
        view: The memory; `None` for the base of a delta, which is only joined to others.
        is_raw: Whether it is stored as its raw bytes.
    """

    row_number: int
    digest: Digest
    row: ChunkRow
    raw_bytes: int
    view: memoryview | None
    is_raw: bool

    @property
    def held_bytes(self) -> int:
        """Bytes of scratch memory: its stored length, or 0 if it is read into its own memory."""
        return 0 if self.is_raw and self.view is not None else self.row.stored_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One ranged read: adjacent chunks of one pack."""

    pack: PackRef
    chunks: list[Wanted] = field(default_factory=list)

    @property
    def byte_range(self) -> ByteRange:
        """The range of the pack that holds them."""
        last = self.chunks[-1].row
        return ByteRange(self.chunks[0].row.offset, last.offset + last.stored_bytes)

    def stored(self, scratch: Scratch) -> list[memoryview]:
        """Return memory for the stored bytes of each chunk: its own if it is raw and has some."""
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
    """Reusable memory for a job and the bases of its deltas, one block for each use.

    It is returned to the system after the job. Memory that is freed to the heap would stay with the
    process, in pieces, for every thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, memoryview] = {}

    def take(self, use: Literal["stored", "raw", "base"], nbytes: int) -> memoryview:
        """Return `nbytes` of memory; it overwrites what this use had before."""
        kept = self._kept.get(use, memoryview(b""))
        if len(kept) < nbytes:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            try:
                kept = self._kept[use] = memoryview(mmap.mmap(-1, nbytes, flags=private))
            except OSError as error:
                raise MemoryError(f"{nbytes} bytes to read into: {error.strerror}") from error
        return kept[:nbytes]
