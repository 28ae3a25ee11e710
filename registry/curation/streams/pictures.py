"""Samples of a stream: texts and pictures of a step, and which bytes are a picture.

A picture is PNG, JPEG or WebP by its first bytes; SVG and all else is none, since it can hold
programs. Its pixels are counted from its header, and nothing here decodes it.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

#: Limits of a picture: bytes, and pixels, which a browser needs memory for.
_MOST_BYTES, _MOST_PIXELS = 8 * 2**20, 2**24
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
#: The colour types of PNG, by channels: grey, grey and alpha, RGB, RGB and alpha.
_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}


def split_samples(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str | bytes]]:
    """Return the numbers of logged values, and the samples: of a list each by its place."""
    numbers: dict[str, object] = {}
    samples: dict[str, str | bytes] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple):
            samples |= {f"{name}/{at}": _sample(name, one) for at, one in enumerate(value)}
        elif _is_sample(value):
            samples[name] = _sample(name, value)
        else:
            numbers[name] = value
    return numbers, samples


def _is_sample(value: Any) -> bool:
    if isinstance(value, str | bytes | bytearray) or hasattr(value, "savefig"):
        return True
    return hasattr(value, "save") or math.prod(getattr(value, "shape", ())) > 1


def _sample(name: str, value: Any) -> str | bytes:
    """Return a text, or the bytes of the file of a picture; refuse what no page would show."""
    data = value if isinstance(value, str) else _file_of(value)
    if isinstance(data, str):
        kind, problem = "text", "" if len(data) <= _MOST_BYTES else f"{len(data):,} characters"
    else:
        kind, problem = kind_of(data)
    if not kind or problem:
        raise InvalidInput("a sample is not kept", where=quoted(name), found=problem)
    return data


def _file_of(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    made = io.BytesIO()
    if hasattr(value, "savefig"):  # a figure of matplotlib
        value.savefig(made, format="png")
    elif hasattr(value, "save"):  # an image of Pillow
        value.save(made, "PNG")
    elif getattr(value, "ndim", 0) > 1:
        return _png(value)
    else:
        raise InvalidInput("neither a number, a text nor a picture", found=type(value).__name__)
    return made.getvalue()


def _png(pixels: Any) -> bytes:
    """Return an array or a tensor as PNG; floats are 0 to 1, and a tensor has channels first."""
    import numpy as np

    if hasattr(pixels, "detach"):  # of torch
        pixels = pixels.detach().cpu()
        pixels = (pixels.float() if pixels.is_floating_point() else pixels).numpy()
        pixels = np.moveaxis(pixels, 0, -1) if pixels.ndim == 3 else pixels
    shape = pixels.shape if pixels.ndim == 3 else (*pixels.shape, 1)
    if len(shape) != 3 or shape[2] not in _COLOURS or not 0 < shape[0] * shape[1] <= _MOST_PIXELS:
        raise InvalidInput(
            "an array of this shape is no picture",
            expected=f"height x width (x 1 to 4 channels), at most {_MOST_PIXELS:,} pixels",
            found=" x ".join(map(str, pixels.shape)),
        )
    if pixels.dtype.kind in "bf":
        pixels = np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255 + 0.5
    height, width, channels = shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row after its filter: none
    rows[:, 1:] = pixels.clip(0, 255).reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunks(parts))


def _chunks(parts: tuple[tuple[bytes, bytes], ...]) -> Iterator[bytes]:
    for kind, data in parts:
        yield struct.pack(">I", len(data)) + kind + data
        yield struct.pack(">I", zlib.crc32(kind + data))


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
        return ("" if _is_animated(data) else "png", *struct.unpack_from(">II", data, 16))
    if data.startswith(b"\xff\xd8\xff"):
        return ("jpeg", *_jpeg_size(data))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return "", 0, 0


def _is_animated(data: bytes) -> bool:
    """Return whether a PNG has the chunk of an animation before its pixels."""
    at = 8
    while (kind := data[at + 4 : at + 8]) not in (b"acTL", b"IDAT", b""):
        at += 12 + int.from_bytes(data[at : at + 4])
    return kind == b"acTL"


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while True:
        mark, kind, length = struct.unpack_from(">BBH", data, at)
        if kind in _SOF:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        # Markers without a length, and bytes that fill up: a browser would find another frame.
        if mark != 0xFF or length < 2 or kind < 0xC0 or 0xD0 <= kind <= 0xDA or kind == 0xFF:
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
