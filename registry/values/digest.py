"""The digest type: a SHA-256, parsed at the edge, short in a repr."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Self, overload

from holdfast.backends import Buffer
from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

_PREFIX = "sha256:"
#: The bytes of a SHA-256.
DIGEST_BYTES = 32
#: Bytes of a digest in a list of JSON, with its quotes and a comma.
_SPELLED = 67
_HEX = re.compile(r"[0-9a-f]{64}")
_DIGITS = r"[0-9a-f]*"


class Digest(bytes):
    """The 32 bytes of a SHA-256.

    `str()` gives `sha256:<64 hex>`, `.hex()` the 64 digits alone, and `.short` the first 12.
    """

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Self:
        """Take the 32 bytes as they are."""
        if len(raw) != DIGEST_BYTES:
            raise InvalidInput("not a SHA-256", expected="32 bytes", found=f"{len(raw)} bytes")
        return super().__new__(cls, raw)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Self:
        """Hash bytes."""
        return bytes.__new__(cls, hashlib.sha256(data).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `sha256:<64 hex>` or `<64 hex>`.

        Raises:
            InvalidInput: The text has another length, upper case, other characters, or the name of
                another algorithm.
        """
        algorithm, colon, plain = text.rpartition(":")
        if colon and algorithm != "sha256":
            raise InvalidInput(
                "unknown hash algorithm", where=text, expected="sha256", found=algorithm
            )
        if not _HEX.fullmatch(plain):
            raise InvalidInput(
                "malformed digest",
                where=quoted(text),
                expected="64 lower-case hexadecimal digits, with or without 'sha256:'",
                found=f"{len(plain)} characters",
            )
        return cls(bytes.fromhex(plain))

    @classmethod
    def from_hex(cls, text: object) -> Self:
        """Read the one spelling that the store uses: 64 lower-case hexadecimal digits.

        Raises:
            ValueError: It is anything else.
        """
        if not isinstance(text, str) or not _HEX.fullmatch(text):
            raise ValueError(f"not 64 hexadecimal digits: {str(text)[:80]!r}")
        return bytes.__new__(cls, bytes.fromhex(text))

    @classmethod
    def each(cls, data: Buffer) -> Iterator[Self]:
        """Yield the digests in a row of 32 bytes each; there may be millions.

        Raises:
            ValueError: The bytes are no whole digests.
        """
        if len(data) % DIGEST_BYTES:
            raise ValueError(f"{len(data)} bytes are not digests of {DIGEST_BYTES} bytes")
        rows = map(itemgetter(0), struct.iter_unpack(f"{DIGEST_BYTES}s", data))
        return map(partial(bytes.__new__, cls), rows)

    @classmethod
    def each_from_hex(cls, texts: Sequence[str]) -> Iterator[Self]:
        """Yield digests that are spelled as for `from_hex`; there may be millions.

        Raises:
            ValueError: One of them is spelled otherwise.
            TypeError: One of them is no text.
        """
        joined = "".join(texts)
        if set(map(len, texts)) - {2 * DIGEST_BYTES} or not re.fullmatch(_DIGITS, joined):
            return map(cls.from_hex, texts)  # it names the wrong one
        return cls.each(bytes.fromhex(joined))

    @property
    def short(self) -> str:
        """The first 12 hexadecimal digits, for tables and messages."""
        return self[:6].hex()

    def __str__(self) -> str:
        return _PREFIX + self.hex()

    def __repr__(self) -> str:
        return f"Digest({self.short})"


class Digests(Sequence[Digest]):
    """Digests packed into one block of memory; an object is made for each that is asked for.

    A digest takes 32 bytes here, and 96 as an object in a tuple.
    """

    __slots__ = ("_packed",)

    def __init__(self, digests: Iterable[Digest]) -> None:
        self._packed = b"".join(digests)

    def __len__(self) -> int:
        return len(self._packed) // DIGEST_BYTES

    @overload
    def __getitem__(self, number: int) -> Digest: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Digest]: ...
    def __getitem__(self, number: int | slice) -> Digest | Sequence[Digest]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        start = range(0, len(self._packed), DIGEST_BYTES)[number]
        return Digest(self._packed[start : start + DIGEST_BYTES])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and self._packed == other._packed

    def __hash__(self) -> int:
        return hash(self._packed)


class HexDigests(Sequence[Digest]):
    """Digests as JSON spells them, `"<64 hex>","<64 hex>",...`; they are read when asked for."""

    __slots__ = ("_count", "_start", "_text")

    def __init__(self, text: bytes, start: int, stop: int) -> None:
        self._text, self._start = text, start
        self._count = (stop - start + 1) // _SPELLED
        spelled, quotes = text[start:stop], b'"' * self._count
        if (
            len(spelled) != self._count * _SPELLED - 1
            or spelled[::_SPELLED] != quotes
            or spelled[2 * DIGEST_BYTES + 1 :: _SPELLED] != quotes
            or spelled[2 * DIGEST_BYTES + 2 :: _SPELLED] != b"," * (self._count - 1)
            or len(spelled.translate(None, b"0123456789abcdef")) != 3 * self._count - 1
        ):
            raise ValueError("not digests of 64 hexadecimal digits")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Digest]:
        return Digest.each(self._read(0, self._count))

    @overload
    def __getitem__(self, number: int) -> Digest: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Digest]: ...
    def __getitem__(self, number: int | slice) -> Digest | Sequence[Digest]:
        if isinstance(number, slice):
            return tuple(self)[number]
        at = range(self._count)[number]
        return Digest(self._read(at, at + 1))

    def _read(self, first: int, until: int) -> bytes:
        start = self._start + first * _SPELLED + 1
        spelled = self._text[start : self._start + until * _SPELLED - 2]
        return bytes.fromhex(spelled.replace(b'","', b"").decode("ascii"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, HexDigests)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[Digest, ...]], tuple[tuple[Digest, ...]]]:
        return tuple, (tuple(self),)
