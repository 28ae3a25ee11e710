"""Bound the memory for reading a record, computed from its bytes before it is parsed.

A few kilobytes on a store can expand to gigabytes of values. The compression ratio proves nothing,
since honest values can be as regular as hostile ones. So the bound is on the memory that parsing
would take. A record is also checked before it is written, so that every saved record can be read.
An environment variable raises the bound, for writers and readers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from holdfast.backends.limits import DEFAULT_BYTES, VARIABLE, max_record_bytes
from holdfast.registry.errors import BeyondLimit, RegistryError

__all__ = [
    "DEFAULT_BYTES",
    "HEAVIEST",
    "LISTED_BYTES",
    "ROW_BYTES",
    "VARIABLE",
    "check_bytes",
    "check_json",
    "json_bytes",
    "max_record_bytes",
    "taking_turns",
]

#: Bytes that Python takes for a value, by characters of JSON that each value of its kind has: an
#: object, a list, an item behind a comma, half a string; less for a key, of which one is kept, and
#: as much more for a quote that ends no string, so that none can be had for nothing.
_WEIGHTS = {b"{": 200, b"[": 100, b",": 32, b'"': 32, b'":': -56, b'\\"': 24}
#: The bytes, their text, and the bytes that it is encoded to again.
_COPIES = 3
#: The most memory for a byte of JSON: a text within the bound by this needs no further check.
HEAVIEST = max(_WEIGHTS.values()) + _COPIES
#: Bytes that are counted before the sum is compared with the bound.
_PART_BYTES = 2**23
#: A row of a placement, with the chunk in it by its digest.
ROW_BYTES = 160
#: A chunk that a digest list names.
LISTED_BYTES = 160
#: Records that unpack to more are read one after another, whatever threads there are.
_LARGE_BYTES = 2**22
_turn = Lock()


def check_json(
    data: bytes | bytearray, *, where: object, kind: type[RegistryError] = BeyondLimit
) -> None:
    """Check that some JSON may be parsed.

    Args:
        data: The text. Characters of JSON within its strings count as well.
        where: What it is, for the message.
        kind: What is raised.

    Raises:
        BeyondLimit: It would take more memory than the bound.
    """
    if len(data) * HEAVIEST <= max_record_bytes():
        return  # as nearly always
    for wanted in _sums(data):
        check_bytes(wanted, "parsing it", where=where, kind=kind)


def json_bytes(data: bytes) -> int:
    """Return about how much memory parsing some JSON takes."""
    return max(_sums(data), default=0)


def _sums(data: bytes | bytearray) -> Iterator[int]:
    """Yield how much the first parts take, one part more each time."""
    wanted = len(data) * _COPIES
    for start in range(0, len(data), _PART_BYTES):
        part = start, start + _PART_BYTES
        wanted += sum(data.count(sign, *part) * each for sign, each in _WEIGHTS.items())
        yield wanted


def check_bytes(
    wanted: int, what: str, *, where: object, kind: type[RegistryError] = BeyondLimit
) -> None:
    """Check an amount of memory against the bound before it is taken.

    Args:
        wanted: How many bytes it is.
        what: What would take it, for the message.
        where: What is to be read or written.
        kind: What is raised.

    Raises:
        BeyondLimit: It is more than the bound.
    """
    most = max_record_bytes()
    if wanted > most:
        raise kind(
            f"{what} would take too much memory",
            where=where,
            expected=f"at most {most} bytes",
            found=f"about {wanted} bytes",
            hint=f"Set {VARIABLE} to more in the environment of every program that writes or "
            "reads it, if you trust who wrote it.",
        )


@contextmanager
def taking_turns(size_bytes: int) -> Iterator[None]:
    """Unpack and parse large records one at a time; small ones never wait.

    Args:
        size_bytes: How long it is once it is unpacked.
    """
    if size_bytes <= _LARGE_BYTES:
        yield
        return
    with _turn:
        yield


def _renew_turn() -> None:
    global _turn
    _turn = Lock()  # the thread that holds the other one was not copied


os.register_at_fork(after_in_child=_renew_turn)
