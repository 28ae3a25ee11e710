"""Files composed of known bytes and of the chunks of stored tensors, read in ranges, verified.

Nothing is written to a disk: a range of such a file reads the chunks that it touches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from holdfast.registry.errors import MissingObject
from holdfast.registry.objects import RecentChunks, TensorEntry
from holdfast.registry.store import Source
from holdfast.registry.values import Digest


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one stored state, and a cache of the last ones read."""

    ref: str  # the state, for messages
    source: Source
    recent: RecentChunks  # the chunks that were read last, of any state

    def digests(self, entry: TensorEntry) -> Sequence[Digest]:
        """Return the digests of a tensor's chunks, in the order of its grid."""
        try:
            return self.source.chunk_digests(entry)
        except FileNotFoundError as error:
            raise self._missing(error) from error

    def read(self, wanted: dict[Digest, memoryview]) -> None:
        """Fill memory with chunks, every byte verified."""
        try:
            self.source.read_chunks(wanted)
        except FileNotFoundError as error:
            raise self._missing(error) from error

    def get(self, digest: Digest, raw_bytes: int, padded_bytes: int) -> memoryview:
        """Return a chunk and keep it, filled up with zeros to a length."""

        def load() -> memoryview:
            chunk = memoryview(bytearray(padded_bytes))
            self.read({digest: chunk[:raw_bytes]})
            return chunk.toreadonly()

        return self.recent.get((digest, padded_bytes), load)

    def _missing(self, error: OSError) -> MissingObject:
        # For fsspec "not found" means that a file is absent; readers of Zarr then show fill values.
        return MissingObject("an object of this state is missing", where=self.ref, found=error)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a chunk that a range covers."""

    digest: Digest  # the chunk
    size: int  # its length
    start: int  # first byte within it
    stop: int  # byte after the last


@dataclass(frozen=True)
class Joined:
    """A file made of known bytes and of tensors, one behind the other."""

    parts: Sequence[bytes | TensorEntry]  # the bytes and the tensors
    chunks: Chunks  # the chunks of the tensors
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        lengths = (len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)
        object.__setattr__(self, "_ends", list(accumulate(lengths)))

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> bytes:
        """Return a range, every byte verified; whole chunks are read straight into the result."""
        result = bytearray(max(0, stop - start))
        rest = memoryview(result)
        whole: dict[Digest, memoryview] = {}
        copies: list[tuple[memoryview, memoryview]] = []
        for piece in self._pieces(start, stop):
            size = len(piece) if isinstance(piece, bytes) else piece.stop - piece.start
            target, rest = rest[:size], rest[size:]
            if isinstance(piece, bytes):
                target[:] = piece
            elif size < piece.size:
                chunk = self.chunks.get(piece.digest, piece.size, piece.size)
                target[:] = chunk[piece.start : piece.stop]
            elif (kept := self.chunks.recent.peek((piece.digest, size))) is not None:
                target[:] = kept
            elif piece.digest in whole:
                copies.append((target, whole[piece.digest]))
            else:
                whole[piece.digest] = target
        if whole:
            self.chunks.read(whole)
        for target, same in copies:
            target[:] = same
        return bytes(result)

    def stream(self, part_bytes: int) -> Iterator[bytes]:
        """Yield the file in parts, every byte verified."""
        at = 0
        while at < self.size:
            part = self.read(at, self.part_end(at, part_bytes, self.size))
            yield part
            at += len(part)

    def part_end(self, at: int, part_bytes: int, stop: int) -> int:
        """Return the end of a part of a range: that of a chunk, unless the part would be short."""
        end = min(at + part_bytes, stop)
        number = bisect_right(self._ends, end)
        part = self.parts[number] if end < stop else b""
        if isinstance(part, bytes) or part.inline is not None:
            return end
        grid = part.grid
        begin = end - (end - self._ends[number] + part.nbytes) % grid.run_bytes % grid.chunk_bytes
        return begin if begin - at >= part_bytes // 2 else end

    def _pieces(self, start: int, stop: int) -> Iterator[bytes | _Piece]:
        at = bisect_right(self._ends, start)
        while start < stop:
            part, end = self.parts[at], self._ends[at]
            known = part if isinstance(part, bytes) else part.inline
            begin = end - (part.nbytes if isinstance(part, TensorEntry) else len(part))
            until = min(stop, end)
            if known is not None:
                yield known[start - begin : until - begin]
            elif isinstance(part, TensorEntry):
                yield from self._cut(part, start - begin, until - begin)
            start, at = until, at + 1

    def _cut(self, entry: TensorEntry, start: int, stop: int) -> Iterator[_Piece]:
        """Yield the parts of a tensor's chunks that a range of its bytes covers."""
        grid = entry.grid
        digests = self.chunks.digests(entry)
        while start < stop:
            run, within = divmod(start, grid.run_bytes)
            number, offset = divmod(within, grid.chunk_bytes)
            is_last = number == grid.chunks_per_run - 1
            size = grid.tail_bytes if is_last else grid.chunk_bytes
            until = min(offset + stop - start, size)
            yield _Piece(digests[run * grid.chunks_per_run + number], size, offset, until)
            start += until - offset
