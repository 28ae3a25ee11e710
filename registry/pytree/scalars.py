"""Codecs of numbers, strings, byte strings, dates, times, time zones, paths and UUIDs.

Long strings and byte strings leave the skeleton as leaves.
"""

from __future__ import annotations

import base64
import os
import re
import uuid
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from math import gcd
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import EllipsisType
from typing import Any
from zoneinfo import ZoneInfo

from holdfast.registry.pytree.decoding import DECODERS, Decoder, atom, pack_int, unpack_int
from holdfast.registry.pytree.encoding import HANDLERS, Encoder, Handler
from holdfast.registry.pytree.leaves import bytes_leaf
from holdfast.registry.pytree.paths import Link, clip
from holdfast.registry.values import MAX_INTEGER, Json, float_from_hex, float_to_hex

_ZONE_KEY = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")

#: A concrete path of the other operating system is loaded as its pure path.
_FLAVOURS: dict[str, type[PurePath]] = {
    "posix": PosixPath if os.name == "posix" else PurePosixPath,
    "windows": WindowsPath if os.name == "nt" else PureWindowsPath,
    "pureposix": PurePosixPath,
    "purewindows": PureWindowsPath,
}


def pack_zone(zone: tzinfo | None) -> Json:
    """Return a time zone: none, UTC, a fixed offset with its name, or a key of the tz database."""
    if zone is None or zone is timezone.utc:  # noqa: UP017
        return None if zone is None else "utc"
    if type(zone) is ZoneInfo:
        if zone.key is None or not _ZONE_KEY.fullmatch(zone.key):
            raise ValueError("a time zone without a key of the tz database")
        try:
            ZoneInfo(zone.key)
        except (KeyError, OSError) as error:
            raise ValueError(f"the tz database has no {zone.key}") from error
        return ["zone", zone.key]
    if type(zone) is not timezone:
        raise ValueError(f"its time zone is a {type(zone).__name__}; use timezone or ZoneInfo")
    offset = zone.utcoffset(None)
    default = timezone(offset)
    # An unnamed zone of offset zero would be UTC itself, so this one has a name.
    has_name = default is timezone.utc or zone.tzname(None) != default.tzname(None)  # noqa: UP017
    name = zone.tzname(None) if has_name else None
    if name is not None:
        name.encode()
    return ["offset", offset.days, offset.seconds, offset.microseconds, name]


def unpack_zone(payload: Any) -> tzinfo | None:
    """Undo `pack_zone`."""
    if payload is None or payload == "utc":
        return None if payload is None else timezone.utc  # noqa: UP017
    if payload[0] == "zone":
        _, key = payload
        if not _ZONE_KEY.fullmatch(key):
            raise ValueError("not a key of the tz database")
        # This reads data under a checked name; a zone brings no code.
        return ZoneInfo(key)
    _, days, seconds, microseconds, name = payload
    offset = timedelta(days, seconds, microseconds)
    return timezone(offset) if name is None else timezone(offset, name)


def _pack_moment(value: datetime | time) -> Json:
    naive = value.replace(tzinfo=None, fold=0)
    return [naive.isoformat(), value.fold, pack_zone(value.tzinfo)]


def _unpack_moment(cls: type[datetime | time], payload: Any) -> datetime | time:
    text, fold, zone = payload
    return cls.fromisoformat(text).replace(fold=fold, tzinfo=unpack_zone(zone))


def _unpack_zone_value(payload: Any) -> tzinfo:
    zone = unpack_zone(payload)
    if zone is None:
        raise ValueError("no time zone")
    return zone


atom(datetime, "datetime", _pack_moment, lambda payload: _unpack_moment(datetime, payload))
atom(time, "time", _pack_moment, lambda payload: _unpack_moment(time, payload))
atom(date, "date", date.isoformat, date.fromisoformat)
atom(
    timedelta,
    "td",
    lambda value: [value.days, value.seconds, value.microseconds],
    lambda payload: timedelta(*payload),
)
atom(timezone, "tz", pack_zone, _unpack_zone_value)
atom(ZoneInfo, "tz", pack_zone, _unpack_zone_value)
atom(uuid.UUID, "uuid", lambda value: value.hex, uuid.UUID)


def encode_path(encoder: Encoder, value: PurePath, link: Link, depth: int) -> Json:
    """Encode a path with its flavour."""
    flavour = type(value).__name__.removesuffix("Path").lower()
    encoder.enter(value, link, depth)
    encoder.leave(value)
    return {"path": [flavour, encoder.text(str(value), link)]}


def decode_path(decoder: Decoder, payload: Any, link: Link, depth: int) -> PurePath:
    """Rebuild a path."""
    decoder.check_list(payload, link, depth, 2)
    flavour, text = payload
    if type(flavour) is not str or flavour not in _FLAVOURS or type(text) is not str:
        decoder.malformed(link, "a bad path", f"one of {', '.join(_FLAVOURS)}", clip(payload))
    path = _FLAVOURS[flavour](text)
    if str(path) != text:
        decoder.malformed(link, "another spelling of a path", str(path), clip(text))
    return path


for _cls in (Path, PosixPath, WindowsPath, PurePosixPath, PureWindowsPath):
    HANDLERS[_cls] = encode_path
DECODERS["path"] = decode_path


#: Longer byte strings become leaves, in bytes.
MAX_INLINE_BYTES = 4096
#: Longer strings become leaves, in bytes of UTF-8.
MAX_INLINE_TEXT_BYTES = 65536
#: Checking that a fraction is reduced takes quadratic time, so its parts are bounded, in bits.
MAX_FRACTION_BITS = 16384


# Floats and fractions


def pack_complex(value: complex) -> Json:
    """Return the bits of both parts."""
    return [float_to_hex(value.real), float_to_hex(value.imag)]


def unpack_complex(payload: Any) -> complex:
    """Undo `pack_complex`."""
    real, imag = payload
    return complex(float_from_hex(real), float_from_hex(imag))


def pack_fraction(value: Fraction) -> Json:
    """Return numerator and denominator."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"a part has more than {MAX_FRACTION_BITS} bits")
    return [pack_int(value.numerator), pack_int(value.denominator)]


def unpack_fraction(payload: Any) -> Fraction:
    """Undo `pack_fraction`."""
    numerator, denominator = map(unpack_int, payload)
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError("too long")
    if denominator < 1 or gcd(numerator, denominator) != 1:
        raise ValueError("not reduced")
    return Fraction(numerator, denominator)


def pack_range(value: range) -> Json:
    """Return start, stop and step."""
    return [pack_int(value.start), pack_int(value.stop), pack_int(value.step)]


def _encode_plain(encoder: Encoder, value: Any, link: Link, depth: int) -> Json:  # noqa: ARG001
    return value  # type: ignore[no-any-return]


def _encode_int(encoder: Encoder, value: int, link: Link, depth: int) -> Json:  # noqa: ARG001
    if -MAX_INTEGER <= value <= MAX_INTEGER:
        return value
    return {"i": format(value, "x")}


def _encode_float(encoder: Encoder, value: float, link: Link, depth: int) -> Json:  # noqa: ARG001
    return {"f": float_to_hex(value)}


HANDLERS[type(None)] = HANDLERS[bool] = _encode_plain
atom(int, "i", lambda value: format(value, "x"), lambda text: unpack_int({"i": text}))
atom(float, "f", float_to_hex, float_from_hex)
HANDLERS[int], HANDLERS[float] = _encode_int, _encode_float
atom(complex, "c", pack_complex, unpack_complex)
atom(range, "range", pack_range, lambda payload: range(*map(unpack_int, payload)))
atom(Decimal, "decimal", str, Decimal)
atom(Fraction, "fraction", pack_fraction, unpack_fraction)
atom(EllipsisType, "ellipsis", lambda _: True, lambda _: ...)


# Strings and byte strings


def pack_bytes(value: bytes | bytearray) -> Json:
    """Return base64."""
    return base64.b64encode(value).decode()


def encode_text(encoder: Encoder, value: str, link: Link, depth: int) -> Json:  # noqa: ARG001
    """Encode a string; a long one becomes a leaf of its UTF-8 bytes."""
    text = encoder.text(value, link)
    if len(text) * 4 > MAX_INLINE_TEXT_BYTES and not encoder.role:
        data = text.encode()
        if len(data) > MAX_INLINE_TEXT_BYTES:
            return {"S": encoder.add(bytes_leaf(data, link), link)}
    return text


def _bytes_handler(inline: str, leaf: str) -> Handler:
    """Return the handler of byte strings: by two tags, of short ones and of those in a leaf."""

    def encode(encoder: Encoder, value: bytes | bytearray, link: Link, depth: int) -> Json:  # noqa: ARG001
        if len(value) > MAX_INLINE_BYTES and not encoder.role:
            return {leaf: encoder.add(bytes_leaf(value, link), link)}
        return {inline: pack_bytes(value)}

    return encode


def _raw(decoder: Decoder, index: Any, link: Link) -> bytes | bytearray | memoryview:
    data = decoder.array(index, link)
    if not isinstance(data, bytes | bytearray | memoryview):
        decoder.malformed(link, "not a byte string", "bytes", type(data).__name__)
    return data


def decode_text(decoder: Decoder, payload: Any, link: Link, depth: int) -> str:  # noqa: ARG001
    """Rebuild a long string."""
    try:
        return str(_raw(decoder, payload, link), "utf-8")
    except UnicodeDecodeError as error:
        decoder.malformed(link, "a string that is not UTF-8", "UTF-8", error.reason)


atom(bytes, "b", pack_bytes, base64.b64decode)
atom(bytearray, "ba", pack_bytes, lambda text: bytearray(base64.b64decode(text)))
HANDLERS[str] = encode_text
HANDLERS[bytes], HANDLERS[bytearray] = _bytes_handler("b", "B"), _bytes_handler("ba", "BA")
DECODERS["S"] = decode_text
DECODERS["B"] = lambda decoder, payload, link, _: bytes(_raw(decoder, payload, link))
DECODERS["BA"] = lambda decoder, payload, link, _: bytearray(_raw(decoder, payload, link))
