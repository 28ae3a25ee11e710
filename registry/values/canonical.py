"""Canonical JSON: one byte string for each value, and no other accepted.

Rules (docs/spec.md, Canonical JSON): UTF-8; keys are strings, sorted by code point, none twice; no
white space; no floats (a float is stored as 16 hexadecimal digits of its bits, see `float_to_hex`);
integers within 2^53; no lone surrogates. `decode` refuses any other spelling, so that equal values
have equal digests. `encode` does not check for floats and other keys: the record types above this
module keep them out, and one more walk over every value would slow a save by several per cent.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, NoReturn

from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.values.first_use import collector_paused
from holdfast.registry.values.parse_limits import check_json

Json = None | bool | int | str | list[Any] | dict[str, Any]

#: A reader that parses numbers as doubles would round a larger integer.
MAX_INTEGER = 2**53
#: A text without 16 consecutive digits has no integer beyond 2^53, so Python's own parser will do.
_LONG = re.compile(rb"[0-9]{16}")
_DOUBLE = re.compile(r"[0-9a-f]{16}")


def encode(value: Json) -> bytes:
    """Return the canonical bytes of a value."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput("not expressible as canonical JSON", found=error) from error


def decode(data: bytes, *, where: str) -> Any:
    """Parse canonical bytes."""
    value = parse(data, where=where)
    try:
        check(data, encode(value), where=where)
    except InvalidInput as error:
        raise Malformed("not canonical JSON", where=where, found=error) from error
    return value


def parse(data: bytes, *, where: str) -> Any:
    """Parse bytes; the caller compares them with their canonical form later, by `check`."""
    check_json(data, where=where)
    try:
        with collector_paused():
            return json.loads(
                data.decode("utf-8"),
                parse_float=_no_float,
                parse_constant=_no_float,
                parse_int=_integer if _LONG.search(data) else None,
            )
    except (ValueError, RecursionError) as error:
        raise Malformed("not canonical JSON", where=where, found=error) from error


def check(data: bytes, encoded: bytes, *, where: str) -> None:
    """Compare bytes with the encoding of their value."""
    # This one comparison finds duplicate keys, a wrong order, white space and other escapes.
    if encoded != data:
        raise Malformed(
            "not canonical JSON", where=where, expected="sorted unique keys without white space"
        )


def float_to_hex(value: float) -> str:
    """Return the 16 hexadecimal digits of a double's bits, most significant first."""
    return struct.pack(">d", value).hex()


def float_from_hex(text: str) -> float:
    """Undo `float_to_hex`."""
    if not _DOUBLE.fullmatch(text):
        raise ValueError(f"not the 16 hexadecimal digits of a double: {text!r}")
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is a float; floats are stored as 16 hexadecimal digits")


def _integer(text: str) -> int:
    # int() takes quadratic time, so the length is checked first.
    if len(text) > 17 or abs(value := int(text)) > MAX_INTEGER:
        raise ValueError(f"{text[:20]} is beyond 2^53")
    return value
