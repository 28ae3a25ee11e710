"""Open a file of Thalia: undo its compression, check its checksum, read its header and index.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NoReturn

import zstandard

from holdfast.backends.errors import install_extra
from holdfast.registry.errors import (
    IncompatibleState,
    InvalidInput,
    RegistryError,
    UnsupportedFormat,
)
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
        return self.read_unchecked(offset, length)

    def read_unchecked(self, offset: int, length: int) -> bytes:
        """Return bytes of the file behind the body."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill memory with bytes of the body, which the caller knows to be within it."""
        self.file.seek(offset)
        read_exactly(self.file, into, self.where)

    def broken(
        self, part: object, rule: str, *, expected: Any = None, found: Any = None
    ) -> NoReturn:
        """Refuse a part of the file that breaks a rule."""
        raise InvalidInput(rule, where=f"{self.where}: {part}", expected=expected, found=found)

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
                with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as plain:
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
            _check_magic(head, path)
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


def _check_magic(head: bytes, path: Path) -> None:
    if not head.startswith(MAGIC):
        raise InvalidInput(
            "not a file of Thalia", where=path, expected=repr(MAGIC), found=repr(head[:4])
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
    length, fd = body.length, body.file.fileno()
    written = body.read_unchecked(length, CHECKSUM_BYTES)
    other = _other_checksum(body)
    if other is None:
        return lambda: _digest(fd, length, body.where) == written
    return lambda: written in (_digest(fd, length, body.where), other(fd, length, body.where))


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
    except (RuntimeError, ValueError, MemoryError, EOFError, zstandard.ZstdError) as error:
        raise InvalidInput("the compressed file is damaged", where=path, found=error) from error
    rest += file.read(CHECKSUM_BYTES + 1)
    plain.flush()
    body = Body(plain, path, plain.tell(), size, "zstd" if is_zstd else "lz4", is_delta=False)
    start = body.read_unchecked(0, min(8, body.length))
    body.is_delta = start.startswith(DELTA_MAGIC)
    if body.is_delta:
        body.problem = "bytes follow the compressed delta" if rest else None
        return body, None
    _check_magic(start, path)
    if not rest:
        return body, _take_checksum(body)
    fd, length = file.fileno(), max(0, size - CHECKSUM_BYTES)
    return body, lambda: rest == _digest(fd, length, path)


def _unpack_zstd(file: BinaryIO, plain: BinaryIO, path: Path) -> bytes:
    """Decompress a frame of zstd; return bytes that were read behind it."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
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


def lz4_frame() -> Any:
    """Return the library for LZ4."""
    try:
        import lz4.frame
    except ModuleNotFoundError as error:
        raise IncompatibleState("lz4 is not installed", hint=install_extra("formats")) from error
    return lz4.frame


HEADER_BYTES: Final = 256
ENTRY_BYTES: Final = 48
#: Pathways stand behind the regions in the same index, under names with this prefix.
PATHWAY: Final = "pathway:"
_NAME_BYTES: Final = 31
_FORM: Final = struct.Struct("<4sHHHHQQQQQQQQQQII")
#: Values of `checksum_type`: none, and SHA-256. A checksum is always there.
_CHECKSUMS: Final = (0, 1)


@dataclass(slots=True)
class Header:
    """The fields of the header, in the order of the file; offsets and lengths in bytes."""

    major: int = 0
    minor: int = 1
    patch: int = 0
    flags: int = 0
    timestamp: int = 0
    metadata_offset: int = HEADER_BYTES
    metadata_length: int = 0
    index_offset: int = 0
    index_length: int = 0
    connectivity_offset: int = 0
    connectivity_length: int = 0
    total_neurons: int = 0
    total_synapses: int = 0
    training_steps: int = 0
    num_regions: int = 0
    checksum_type: int = 1

    @property
    def version(self) -> str:
        """The version of the format."""
        return f"{self.major}.{self.minor}.{self.patch}"

    def totals(self) -> dict[str, Any]:
        """Return the fields about the whole brain, for a description."""
        names = ("timestamp", "total_neurons", "total_synapses", "training_steps", "num_regions")
        return {"version": self.version, **{name: getattr(self, name) for name in names}}

    def pack(self) -> bytes:
        """Return its bytes."""
        fields = [getattr(self, name) for name in self.__slots__]
        return _FORM.pack(MAGIC, *fields).ljust(HEADER_BYTES, b"\0")


def read_header(body: Body) -> Header:
    """Read a header."""
    _, *fields = _FORM.unpack(body.read(0, HEADER_BYTES, "the header")[: _FORM.size])
    header = Header(*fields)
    if header.major > 0:
        raise UnsupportedFormat(
            "the file has another major version",
            where=body.where,
            expected="version 0.x",
            found=header.version,
            hint="Major versions are not migrated: write it again by the program that made it.",
        )
    return header


def check_header(header: Header, where: Path) -> None:
    """Refuse a header that the programs of Thalia refuse."""
    if header.checksum_type not in _CHECKSUMS:
        raise InvalidInput(
            "an unknown kind of checksum",
            where=where,
            expected="0 or 1",
            found=header.checksum_type,
        )
    if not header.num_regions:
        raise InvalidInput("the file has no regions", where=where)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the index."""

    name: str  # the name, without the prefix of a pathway
    is_pathway: bool  # whether it is a pathway
    offset: int  # position of its JSON
    length: int  # length of its JSON

    def pack(self) -> bytes:
        """Return its bytes."""
        name = f"{PATHWAY if self.is_pathway else ''}{self.name}".encode()
        is_like_a_pathway = not self.is_pathway and self.name.startswith(PATHWAY)
        if len(name) > _NAME_BYTES or b"\0" in name or is_like_a_pathway:
            kind = "pathway" if self.is_pathway else "region"
            raise IncompatibleState(
                f"the name of a {kind} does not fit into the index of a .thalia file",
                where=self.name,
                expected=f"{_NAME_BYTES} bytes with the prefix of a pathway, without zero bytes",
                found=f"{len(name)} bytes",
            )
        return struct.pack("<32sQQ", name, self.offset, self.length)


def read_index(body: Body, header: Header) -> list[Entry]:
    """Read the index of a file."""
    data = body.read(header.index_offset, header.index_length, "the index of regions")
    count, rest = divmod(len(data), ENTRY_BYTES)
    if rest or count != header.num_regions:
        raise InvalidInput(
            "the index has another length than its entries",
            where=body.where,
            expected=f"{header.num_regions} entries of {ENTRY_BYTES} bytes",
            found=f"{len(data)} bytes",
        )
    return [_entry(data[at : at + ENTRY_BYTES]) for at in range(0, len(data), ENTRY_BYTES)]


def _entry(data: bytes) -> Entry:
    raw, offset, length = struct.unpack("<32sQQ", data)
    # The writer cuts names to 31 bytes, within a character if it has to.
    name = raw.split(b"\0", 1)[0].decode(errors="ignore")
    is_pathway = name.startswith(PATHWAY)
    return Entry(name.removeprefix(PATHWAY), is_pathway, offset, length)


def repeated(entries: Iterable[Entry]) -> list[str]:
    """Return names that more than one entry has; a reader sees the last of each."""
    seen: set[tuple[str, bool]] = set()
    twice = []
    for entry in entries:
        key = (entry.name, entry.is_pathway)
        if key in seen:
            twice.append(f"{PATHWAY if entry.is_pathway else ''}{entry.name}")
        seen.add(key)
    return twice


def path_of(entry: Entry) -> str:
    """Return the path of a region or pathway in the state."""
    return f"{'pathways' if entry.is_pathway else 'regions'}/{entry.name}"
