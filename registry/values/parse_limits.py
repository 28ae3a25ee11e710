"""Bound the memory and the work for reading a record or a file, before they are taken.

A few kilobytes on a store can expand to gigabytes of values. The compression ratio proves nothing,
since honest values can be as regular as hostile ones. So the bound is on the memory that parsing
would take: `check_json` computes it from the bytes, and a `Budget` counts what has no such formula.
A record is also checked before it is written, so every saved record can be read. An environment
variable raises the bound, for writers and readers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NoReturn

from holdfast.backends.limits import VARIABLE, max_record_bytes
from holdfast.registry.errors import BeyondLimit, RegistryError

#: Bytes of memory that Python needs for each of these pieces of JSON: an object, a list, an item
#: after a comma, half a string. A key costs less, since Python keeps one copy of equal keys. An
#: escaped quote costs more, so that `\":` within a string does not lower the sum. The tag of a
#: deque costs more, since even an empty one takes a kilobyte.
_WEIGHTS = {b"{": 200, b"[": 100, b",": 32, b'"': 32, b'":': -56, b'\\"': 24, b'"deque"': 1000}
_NO_SIGNS = bytes(set(range(256)) - {sign[0] for sign in _WEIGHTS if len(sign) == 1})
#: Copies of the JSON in memory: the bytes, their text, and the bytes that check the encoding.
_COPIES = 3
#: The most memory that one byte of JSON can need. If this rate is within the bound, so is the text.
HEAVIEST = max(weight // len(sign) for sign, weight in _WEIGHTS.items()) + _COPIES
#: Bytes that are counted at once before the sum is compared with the bound.
_PART_BYTES = 2**23
#: Bytes of memory for a row of a placement and the digest of its chunk.
ROW_BYTES = 160
#: Bytes of memory for a chunk that a digest list names.
LISTED_BYTES = 160
#: Bytes of memory for a path that is spelled, and for each of its characters.
PATH_BYTES, CHARACTER_BYTES = 100, 4
#: The most keys of a dict or set that may have one hash: each is compared with all the others.
MOST_EQUAL = 256
#: Records that unpack to more bytes are read one at a time, however many threads there are.
_LARGE_BYTES = 2**22
#: Integers below it have hashes of their own.
_DISTINCT = 2**61 - 2
_turn = Lock()


def check_json(
    data: bytes | bytearray, *, where: object, kind: type[RegistryError] = BeyondLimit
) -> None:
    """Check that parsing some JSON stays within the bound."""
    if len(data) * HEAVIEST <= max_record_bytes():
        return  # nearly always
    for wanted in _sums(data):
        check_bytes(wanted, "parsing it", where=where, kind=kind)


def json_bytes(data: bytes) -> int:
    """Return about how many bytes of memory parsing some JSON takes."""
    return max(_sums(data), default=0)


def _sums(data: bytes | bytearray) -> Iterator[int]:
    """Yield the bytes of memory for the first part, for the first two, and so on."""
    wanted = len(data) * _COPIES
    for start in range(0, len(data), _PART_BYTES):
        part = data[start : start + _PART_BYTES]
        signs = part.translate(None, _NO_SIGNS)  # single signs are counted much faster without
        wanted += sum(
            (signs if len(sign) == 1 else part).count(sign) * each
            for sign, each in _WEIGHTS.items()
        )
        yield wanted


def check_bytes(
    wanted: int, what: str, *, where: object, kind: type[RegistryError] = BeyondLimit
) -> None:
    """Check an amount of memory against the bound before it is allocated."""
    Budget(where, what, kind).take(wanted)


class Budget:
    """The memory and work that reading one record or file may take; each part is counted first.

    Everything is counted in bytes of memory: containers, entries, calls, characters of paths.
    """

    def __init__(
        self,
        where: object,
        what: str = "reading it",
        kind: type[RegistryError] = BeyondLimit,
        most: int | None = None,
    ) -> None:
        self.where = where  # the record, for the message
        self.what = what  # the action that takes it, for the message
        self.kind = kind  # the error class to raise
        self.most = max_record_bytes() if most is None else most  # the bound
        self.taken = 0  # the sum so far

    def take(self, nbytes: int) -> None:
        """Count some bytes before they are taken; raise `kind` if the sum is above the bound."""
        self.taken += nbytes
        if self.taken > self.most:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the error for a sum above the bound."""
        raise self.kind(
            f"{self.what} would take too much memory",
            where=self.where,
            expected=f"at most {self.most} bytes",
            found=f"about {self.taken} bytes",
            hint=f"Set {VARIABLE} to more in the environment of every program that writes or "
            "reads it, if you trust who wrote it.",
        )


class KeyHashes:
    """The hashes of the keys of a dict or set, where many keys could be made to have the same one.

    Python hashes numbers modulo 2^61 - 1, and tuples by a known rule: a file can hold a million
    keys of one hash, and each would be compared with all before it.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def admits(self, key: Any) -> bool:
        """Count a key before it is added; return whether few enough others have its hash."""
        kind = type(key)
        if kind is str or kind is bytes or (kind is int and -_DISTINCT < key < _DISTINCT):
            return True
        found = hash(key)
        count = self._counts[found] = self._counts.get(found, 0) + 1
        return count <= MOST_EQUAL


@contextmanager
def taking_turns(size_bytes: int) -> Iterator[None]:
    """Unpack and parse large records one at a time; small ones never wait."""
    if size_bytes <= _LARGE_BYTES:
        yield
        return
    with _turn:
        yield


def _renew_turn() -> None:
    global _turn
    _turn = Lock()  # a fork does not copy the thread that holds the old one


os.register_at_fork(after_in_child=_renew_turn)
