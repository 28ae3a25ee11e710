"""The digest type: a SHA-256, parsed at the edge, short in a repr."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Self, overload

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

_PREFIX = "sha256:"
_BYTES = 32
_HEX = re.compile(r"[0-9a-f]{64}")


class Digest(bytes):
    """The 32 bytes of a SHA-256.

    `str()` gives the full form `sha256:<64 hex>`, `.hex()` the plain one, `.short` 12 hex digits.
    """

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Self:
        """Take the 32 bytes as they are."""
        if len(raw) != 32:
            raise InvalidInput("not a SHA-256", expected="32 bytes", found=f"{len(raw)} bytes")
        return super().__new__(cls, raw)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Self:
        """Hash bytes."""
        return cls(hashlib.sha256(data).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `sha256:<64 hex>` or `<64 hex>`.

        Raises:
            InvalidInput: Wrong length, upper case, not hexadecimal, or another algorithm.
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
        """Read the one spelling that stands on the store: 64 lower-case hexadecimal digits.

        Raises:
            ValueError: It is anything else.
        """
        if not isinstance(text, str) or not _HEX.fullmatch(text):
            raise ValueError(f"not 64 hexadecimal digits: {str(text)[:80]!r}")
        return cls(bytes.fromhex(text))

    @property
    def short(self) -> str:
        """The first 12 hexadecimal digits, as tables and messages show it."""
        return self[:6].hex()

    def __str__(self) -> str:
        return _PREFIX + self.hex()

    def __repr__(self) -> str:
        return f"Digest({self.short})"


class Digests(Sequence[Digest]):
    """Digests in one block of memory, 32 bytes each; one is made when it is asked for.

    As objects in a tuple they take 96.
    """

    __slots__ = ("_packed",)

    def __init__(self, digests: Iterable[Digest]) -> None:
        self._packed = b"".join(digests)

    def __len__(self) -> int:
        return len(self._packed) // _BYTES

    @overload
    def __getitem__(self, number: int) -> Digest: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Digest]: ...
    def __getitem__(self, number: int | slice) -> Digest | Sequence[Digest]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        start = range(0, len(self._packed), _BYTES)[number]
        return Digest(self._packed[start : start + _BYTES])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and self._packed == other._packed

    def __hash__(self) -> int:
        return hash(self._packed)
