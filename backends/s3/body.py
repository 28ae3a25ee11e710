"""Move the bodies of S3 requests between buffers and sockets without joining them."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import Protocol

# Large enough to hide the cost of a call, small enough for the processor's cache.
_PIECE_BYTES = 256 * 1024
# The piece on a slow connection, small enough to show progress, and the first piece of an upload.
_SMALL_PIECE_BYTES = 16 * 1024
_FIRST_PIECE_BYTES = 64 * 1024


class Readable(Protocol):
    """The part of a stream that `fill` needs."""

    def read(self, amt: int | None = None, /) -> bytes:
        """Return at most `amt` bytes, none at the end."""


class _Pace:
    """The size of the next piece to send: large on a fast connection, small on a slow one."""

    def __init__(self) -> None:
        self._size = _FIRST_PIECE_BYTES // 2
        self._began_s = time.monotonic()

    def next(self) -> int:
        """Return the next size; call it once for each piece, after the previous one is sent."""
        now_s = time.monotonic()
        if now_s - self._began_s < 1:
            self._size = min(2 * self._size, _PIECE_BYTES)
        else:
            self._size = max(self._size // 4, _SMALL_PIECE_BYTES)
        self._began_s = now_s
        return self._size


class SendBody(io.RawIOBase):
    """Buffers as one seekable file that returns views of them.

    `read` returns up to 256 KiB even if less is requested. urllib3 requests 16 KiB at a time, but
    it and the SDK accept longer pieces, and small pieces would cost a third of the throughput.

    Args:
        buffers: The bytes.
        moved: Called with the number of bytes that were returned.
    """

    def __init__(self, buffers: Sequence[memoryview], moved: Callable[[int], None]) -> None:
        self._buffers = buffers
        self._moved = moved
        self._size = sum(map(len, buffers))
        self._rewind()

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be rewound, as the SDK does before each repeat."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return some of the remaining bytes, b"" at the end; all of them for -1."""
        if size < 0:
            return b"".join(iter(self._piece, b""))
        return self._piece()  # type: ignore[return-value]

    def tell(self) -> int:
        """Return how many bytes have been read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to the start or the end; the SDK needs nothing else."""
        if (offset, whence) == (0, io.SEEK_END):
            self._next, self._offset, self._position = len(self._buffers), 0, self._size
        elif (offset, whence) == (0, io.SEEK_SET):
            self._rewind()
        elif (offset, whence) not in ((self._position, io.SEEK_SET), (0, io.SEEK_CUR)):
            raise io.UnsupportedOperation("a body can only be read from its start")
        return self._position

    def _rewind(self) -> None:
        self._next = 0
        self._offset = 0
        self._position = 0
        self._pace = _Pace()

    def _piece(self) -> bytes | memoryview:
        """Return a view of the current buffer, or a few small buffers joined."""
        parts: list[memoryview] = []
        size, most = 0, self._pace.next()
        while self._next < len(self._buffers) and size < most:
            left = self._buffers[self._next][self._offset :]
            taken = left[: most - size]
            parts.append(taken)
            size += len(taken)
            if len(taken) == len(left):
                self._next, self._offset = self._next + 1, 0
            else:
                self._offset += len(taken)
        self._position += size
        self._moved(size)
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)


def fill(stream: Readable, views: Sequence[memoryview]) -> None:
    """Fill buffers in order from a stream of exactly their length.

    The pieces go through one small allocation that fits the processor's cache. Reading directly
    into the buffers would bypass the SDK's stream to save a copy that cannot be measured.
    """
    wanted = sum(map(len, views))
    pieces = _Pieces(stream, wanted)
    for view in views:
        filled = 0
        while filled < len(view):
            piece = pieces.take(len(view) - filled)
            view[filled : filled + len(piece)] = piece
            filled += len(piece)


class _Pieces:
    """A stream in pieces as small as its reader needs."""

    def __init__(self, stream: Readable, size: int) -> None:
        self._stream = stream
        self._left = size
        self._piece = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """Return 1 to `most` bytes."""
        if not self._piece:
            piece = self._stream.read(min(self._left, _PIECE_BYTES))
            if not piece:
                raise EOFError(f"the answer broke off {self._left} bytes before its end")
            self._left -= len(piece)
            self._piece = memoryview(piece)
        taken, self._piece = self._piece[:most], self._piece[most:]
        return taken
