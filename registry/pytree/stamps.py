"""Codecs of dates, times, time zones, paths and UUIDs."""

from __future__ import annotations

import os
import re
import uuid
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from zoneinfo import ZoneInfo

from holdfast.registry.pytree.decoding import DECODERS, Decoder, atom
from holdfast.registry.pytree.encoding import HANDLERS, Encoder
from holdfast.registry.pytree.paths import Link, clip
from holdfast.registry.values import Json

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


def _pack_zone_value(zone: tzinfo) -> Json:
    return pack_zone(zone)


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
atom(timezone, "tz", _pack_zone_value, _unpack_zone_value)
atom(ZoneInfo, "tz", _pack_zone_value, _unpack_zone_value)
atom(uuid.UUID, "uuid", lambda value: value.hex, uuid.UUID)


def encode_path(encoder: Encoder, value: PurePath, link: Link, depth: int) -> Json:  # noqa: ARG001
    """Encode a path with its flavour."""
    flavour = type(value).__name__.removesuffix("Path").lower()
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
