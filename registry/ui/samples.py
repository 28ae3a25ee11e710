"""Samples in a stream: pictures and texts of a step, and which bytes are a picture.

A picture is PNG, JPEG or WebP by its first bytes; SVG and all else is none, since it can hold
programs. Its pixels are counted from its header, and nothing here decodes it: the browser does.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.registry.values import Digest

#: How many samples of a stream are shown, the newest, and how many characters of a text.
SHOWN, _MOST_TEXT = 24, 10_000
#: Limits of a picture: bytes, and pixels, which a browser needs memory for.
_MOST_BYTES, _MOST_PIXELS = 8 * 2**20, 2**24
#: Bytes of pictures that a server keeps for browsers that ask for them.
_KEPT_BYTES = 64 * 2**20
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True, slots=True)
class Sample:
    """A text or a picture of an entry."""

    step: int
    key: str
    text: str = ""
    picture: str = ""  # the name by which the server has it
    problem: str = ""  # why it is not shown


class Pictures:
    """The pictures that were shown last, by the digests of their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._size = 0

    def keep(self, kind: str, data: bytes) -> str:
        """Keep a picture, and return its name."""
        name = Digest.of(data).hex()
        with self._lock:
            if name not in self._kept:
                self._size += len(data)
            self._kept[name] = kind, data
            self._kept.move_to_end(name)
            while self._size > _KEPT_BYTES:
                self._size -= len(self._kept.popitem(last=False)[1][1])
        return name

    def get(self, name: str) -> tuple[str, bytes] | None:
        """Return the kind and the bytes of a picture; `None` if it is not kept any more."""
        with self._lock:
            return self._kept.get(name)


def samples_of(entries: Sequence[Mapping[str, Any]], pictures: Pictures) -> Iterator[Sample]:
    """Yield the newest texts and pictures of a stream, the newest first."""
    found = (
        (entry["step"], key, value)
        for entry in reversed(entries)
        for key, value in entry.items()
        if isinstance(value, str | bytes)
    )
    for step, key, value in islice(found, SHOWN):
        if isinstance(value, str):
            cut = " ..." if len(value) > _MOST_TEXT else ""
            yield Sample(step, key, text=value[:_MOST_TEXT] + cut)
            continue
        kind, problem = kind_of(value)
        name = "" if problem else pictures.keep(kind, value)
        yield Sample(step, key, picture=name, problem=problem)


def kind_of(data: bytes) -> tuple[str, str]:
    """Return `png`, `jpeg` or `webp`, and why the bytes are not shown, if they are not."""
    try:
        kind, width, height = _header(data)
    except (struct.error, IndexError):
        return "", f"{len(data):,} bytes: the header of the picture is damaged"
    if not kind:
        return "", f"{len(data):,} bytes: no PNG, JPEG or WebP of a single picture"
    if not 0 < width * height <= _MOST_PIXELS or len(data) > _MOST_BYTES:
        most = f"at most {_MOST_PIXELS:,} pixels and {_MOST_BYTES:,} bytes are shown"
        return "", f"{width:,} x {height:,} pixels in {len(data):,} bytes: {most}"
    return kind, ""


def _header(data: bytes) -> tuple[str, int, int]:
    """Return the kind, width and height that a header says; no kind for anything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"):
        is_animated = b"acTL" in data.partition(b"IDAT")[0]
        return ("" if is_animated else "png", *struct.unpack_from(">II", data, 16))
    if data.startswith(b"\xff\xd8\xff"):
        return ("jpeg", *_jpeg_size(data))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return "", 0, 0


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while True:
        mark, kind, length = struct.unpack_from(">BBH", data, at)
        if kind in _SOF:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        if mark != 0xFF or length < 2:
            raise struct.error("no marker")
        at += 2 + length


def _webp(data: bytes) -> tuple[str, int, int]:
    match data[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return "webp", width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return "webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X" if not data[20] & 2:  # no animation
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
            return "webp" if len(data) >= 30 else "", width, height
    return "", 0, 0
