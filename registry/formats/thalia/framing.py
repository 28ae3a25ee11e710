"""Open a file of Thalia: undo its compression and check its checksum.

A plain file ends with the SHA-256 of all bytes before it. Compressed files are of two kinds: first
the programs compressed the body with its checksum, later the body alone, and put the checksum of
the compressed bytes behind the frame. Bytes that follow the frame tell them apart. A delta has no
checksum in any of them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.formats import source
from holdfast.registry.formats.source import read_exactly, stable
from holdfast.registry.formats.state_file import RAISED, Faults
from holdfast.registry.values import Budget, max_record_bytes

MAGIC = b"THAL"
DELTA_MAGIC = b"\xce\x94THL"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LZ4_MAGIC = b"\x04\x22\x4d\x18"

#: The size limit of the document, for the file and for its decompressed bytes.
DEFAULT_MAX_BYTES = 10 * 2**30
CHECKSUM_BYTES = 32
_CRC32 = 2
_PIECE = 2**20
#: The checksum of a longer body is computed in a thread.
_LARGE_BYTES = 2**22
_WRONG = "the checksum is wrong"
_SMALL_PIECE = 2**12

Kind = Literal["full", "delta"]


@dataclass(slots=True)
class Body:
    """The uncompressed bytes of a file."""

    file: BinaryIO  # holds them, from position 0
    where: Path  # the file, for messages
    length: int  # their number, without a checksum
    file_bytes: int  # size of the file on disk
    compression: str  # `zstd`, `lz4`, or nothing
    is_delta: bool  # whether it is a delta
    problem: str | None = None  # why the checksum does not fit, if it does not
    with_data: bool = True  # whether its tensors are wanted, or only their headers
    faults: Faults = RAISED  # takes the errors of single parts; by default the first one is raised
    #: Counts its tensors before they are made: sparse ones can be of any size, and many can be made
    #: of the same bytes; and the paths that are spelled.
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        """Make the budget: the length of the file, and by the bound of a record more."""
        most = max_record_bytes() + self.length
        self.budget = Budget(self.where, "filling its tensors", InvalidInput, most)

    def read(self, offset: int, length: int, what: object) -> bytes:
        """Return bytes of the body."""
        self.check_range(offset, length, what)
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_unchecked(self, offset: int, length: int) -> bytes:
        """Return bytes of the file behind the body."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill memory with bytes of the body, which the caller knows to be within it."""
        self.file.seek(offset)
        read_exactly(self.file, into, self.where)

    def check_range(self, offset: int, length: int, what: object) -> None:
        """Refuse a range that is not within the body."""
        if offset > self.length or length > self.length - offset:
            raise InvalidInput(
                f"{what} is not within the file",
                where=self.where,
                expected=f"at most {self.length} bytes",
                found=f"{length} bytes from {offset}",
            )


def kind_of(path: Path) -> Kind | None:
    """Return the kind of a file by its first decompressed bytes; `None` if it is not Thalia's."""
    with stable(path) as file:
        head = file.read(64)
        try:
            if head.startswith(_ZSTD_MAGIC):
                file.seek(0)
                with _zstd().ZstdDecompressor().stream_reader(file, closefd=False) as plain:
                    head = plain.read(8)
            elif head.startswith(_LZ4_MAGIC):
                file.seek(0)
                head = lz4_frame().LZ4FrameFile(file).read(8)
        except Exception:  # not even a frame: whatever the decoder says, it is no file of Thalia
            return None
    if head.startswith(MAGIC):
        return "full"
    return "delta" if head.startswith(DELTA_MAGIC) else None


@contextmanager
def opened(path: Path, *, tolerant: bool = False, verify: bool = True) -> Iterator[Body]:
    """Open a file; a temporary file holds the body of a compressed one.

    The checksum of a long file is computed in a thread while the block reads it. Whatever the block
    has made must not be used before the block has ended.
    """
    with stable(path) as file:
        size = file.seek(0, 2)
        check_size(size, path)
        file.seek(0)
        head = file.read(8)
        if head.startswith((_ZSTD_MAGIC, _LZ4_MAGIC)):
            with tempfile.TemporaryFile() as plain:
                body, fits = _decompressed(file, plain, size, head, path)
                with _compared(body, fits if verify else None, tolerant=tolerant):
                    yield body
            return
        body = Body(file, path, size, size, "", head.startswith(DELTA_MAGIC))
        fits = None
        if not body.is_delta:
            if not head.startswith(MAGIC):
                raise InvalidInput(
                    "not a file of Thalia", where=path, expected=repr(MAGIC), found=repr(head[:4])
                )
            fits = _take_checksum(body)
        with _compared(body, fits if verify else None, tolerant=tolerant):
            yield body


#: Returns whether the checksum of a file fits.
_Fits = Callable[[], bool]


@contextmanager
def _compared(body: Body, fits: _Fits | None, *, tolerant: bool) -> Iterator[None]:
    """Compare a checksum while a block runs; if it is wrong, refuse the result of the block."""
    if body.length < _LARGE_BYTES or fits is None:
        if fits is not None and not fits():
            body.problem = _WRONG
        _finish(body, tolerant=tolerant)
        yield
        return
    with ThreadPoolExecutor(1, "holdfast-checksum") as pool:
        answer = pool.submit(fits)
        try:
            yield
        except RegistryError:
            if not answer.result():  # the damage explains the fault
                body.problem = _WRONG
                _finish(body, tolerant=False)
            raise
        if not answer.result():
            body.problem = _WRONG
            _finish(body, tolerant=tolerant)


def _finish(body: Body, *, tolerant: bool) -> None:
    if body.problem is not None and not tolerant:
        raise InvalidInput(
            body.problem, where=body.where, hint="The file is damaged; nothing was read."
        )


def check_size(size: int, path: Path) -> None:
    """Refuse a file that is too large."""
    source.check_size(size, path, default=DEFAULT_MAX_BYTES)


def _take_checksum(body: Body) -> _Fits | None:
    """Split the checksum from the end of a body; return a context that compares it."""
    if body.length < CHECKSUM_BYTES:
        body.problem = "the file is too short for its checksum"
        return None
    body.length -= CHECKSUM_BYTES
    written, length, fd = body.read_unchecked(body.length, CHECKSUM_BYTES), body.length, _fd(body)
    other = _other_checksum(body)
    if other is None:
        return lambda: _digest(fd, length, body.where) == written
    return lambda: written in (_digest(fd, length, body.where), other(fd, length, body.where))


def _fd(body: Body) -> int:
    return body.file.fileno()


def _other_checksum(body: Body) -> Callable[[int, int, Path], bytes] | None:
    """Return the CRC-32 of a file of the document's layout whose header announces it."""
    head = body.read_unchecked(0, min(body.length, 0x64))
    if len(head) < 0x64 or not is_document(head):
        return None
    (kind,) = struct.unpack_from("<I", head, 0x60)
    return _crc if kind == _CRC32 else None


def _crc(fd: int, length: int, path: Path) -> bytes:
    found = 0
    for piece in _pieces(fd, length, path):
        found = zlib.crc32(piece, found)
    return struct.pack("<I", found).ljust(CHECKSUM_BYTES, b"\0")


def _digest(fd: int, length: int, path: Path) -> bytes:
    """Return the SHA-256 of the first bytes of a file."""
    hashed = hashlib.sha256()
    for piece in _pieces(fd, length, path):
        hashed.update(piece)
    return hashed.digest()


def _pieces(fd: int, length: int, path: Path) -> Iterator[memoryview]:
    """Yield the first bytes of a file; its position does not move."""
    memory, at = memoryview(bytearray(min(length, _PIECE))), 0
    while at < length:
        part = memory[: min(length - at, _PIECE)]
        count = os.preadv(fd, [part], at)
        if not count:
            raise InvalidInput("the file ended while it was read", where=path, found=f"{at} bytes")
        at += count
        yield part[:count]


def is_document(head: bytes) -> bool:
    """Return whether a header fits the document's form: the index follows the metadata."""
    metadata, length, index = struct.unpack_from("<QQQ", head, 0x14)
    return bool(index == metadata + length)


def _decompressed(
    file: BinaryIO, plain: BinaryIO, size: int, head: bytes, path: Path
) -> tuple[Body, _Fits | None]:
    """Decompress the one frame of a file; what follows it is the checksum of the later kind.

    Return a context that compares the checksum, if there is one.
    """
    is_zstd = head.startswith(_ZSTD_MAGIC)
    file.seek(0)
    try:
        rest = (_unpack_zstd if is_zstd else _unpack_lz4)(file, plain, path)
    except (InvalidInput, IncompatibleState, OSError):
        raise
    except (RuntimeError, ValueError, MemoryError, EOFError, _zstd().ZstdError) as error:
        raise InvalidInput("the compressed file is damaged", where=path, found=error) from error
    rest += file.read(CHECKSUM_BYTES + 1)
    plain.flush()
    body = Body(plain, path, plain.tell(), size, "zstd" if is_zstd else "lz4", is_delta=False)
    start = body.read_unchecked(0, min(8, body.length))
    body.is_delta = start.startswith(DELTA_MAGIC)
    if not body.is_delta and not start.startswith(MAGIC):
        raise InvalidInput(
            "not a file of Thalia", where=path, expected=repr(MAGIC), found=repr(start[:4])
        )
    if body.is_delta:
        body.problem = "bytes follow the compressed delta" if rest else None
        return body, None
    if not rest:
        return body, _take_checksum(body)
    fd, length = file.fileno(), max(0, size - CHECKSUM_BYTES)
    return body, lambda: rest == _digest(fd, length, path)


def _unpack_zstd(file: BinaryIO, plain: BinaryIO, path: Path) -> bytes:
    """Decompress a frame of zstd; return bytes that were read behind it."""
    decoder = _zstd().ZstdDecompressor().decompressobj()
    while not decoder.eof:
        # Nothing bounds the output of a call, so the input is small: a byte makes at most 32 KiB.
        piece = file.read(_SMALL_PIECE)
        if not piece:
            raise EOFError("it breaks off")
        plain.write(decoder.decompress(piece))
        check_size(plain.tell(), path)
    return bytes(decoder.unused_data)


def _unpack_lz4(file: BinaryIO, plain: BinaryIO, path: Path) -> bytes:
    """Decompress a frame of LZ4; return bytes that were read behind it."""
    decoder = lz4_frame().LZ4FrameDecompressor()
    while not decoder.eof:
        piece = file.read(_PIECE) if decoder.needs_input else b""
        if decoder.needs_input and not piece:
            raise EOFError("it breaks off")
        plain.write(decoder.decompress(piece, max_length=_PIECE))
        check_size(plain.tell(), path)
    return bytes(decoder.unused_data or b"")


def _zstd() -> Any:
    import zstandard

    return zstandard


def lz4_frame() -> Any:
    """Return the library for LZ4."""
    try:
        import lz4.frame
    except ModuleNotFoundError as error:
        raise IncompatibleState(
            "lz4 is not installed", hint="Install it: pip install 'holdfast[formats]'."
        ) from error
    return lz4.frame
