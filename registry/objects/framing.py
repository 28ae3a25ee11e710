"""The two file formats that prove their own bytes: lines and frames with a closing digest.

A JSON file is one or more lines of canonical JSON and a last line with the SHA-256, in hexadecimal,
of all bytes before it. A manifest or placement file is a zstd frame followed by the 32 bytes of the
SHA-256 of the frame. This module does not know what the content means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import zstandard

from holdfast.registry.errors import Damaged, Malformed
from holdfast.registry.values import DIGEST_BYTES, check_bytes

_DIGEST_LINE = 65
#: The memory of a line in addition to its bytes.
_LINE_BYTES = 64


def join_lines(lines: Sequence[bytes]) -> bytes:
    """Return the file that holds these lines."""
    body = b"".join(line + b"\n" for line in lines)
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


def split_lines(data: bytes, *, where: str) -> list[bytes]:
    """Verify a file of lines and return them."""
    lines = data.count(b"\n") * _LINE_BYTES
    check_bytes(2 * len(data) + lines, "reading its lines", where=where)
    body, closing = data[:-_DIGEST_LINE], data[-_DIGEST_LINE:]
    found = hashlib.sha256(body).hexdigest().encode() + b"\n"
    if closing != found or not body.endswith(b"\n"):
        raise Damaged(
            "damaged file: the closing digest does not match its bytes",
            where=where,
            expected=closing[:12].decode("ascii", "replace") + "...",
            found=f"{found[:12].decode()}... over {len(body)} bytes",
            hint="Run `holdfast verify` to see what is affected; restore it from a backup.",
        )
    return body[:-1].split(b"\n")


def wrap_frame(content: bytes) -> bytes:
    """Return the file that holds this content, compressed."""
    frame = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(content)
    return frame + hashlib.sha256(frame).digest()


def content_bytes(data: bytes) -> int:
    """Return the content size that a frame file states; 0 if it states none."""
    try:
        size: int = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError:
        return 0
    return size


def unwrap_frame(data: bytes, *, where: str) -> bytes:
    """Verify a frame file and return its content."""
    frame, closing = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    found = hashlib.sha256(frame).digest()
    if closing != found:
        raise Damaged(
            "damaged file: the closing digest does not match its bytes",
            where=where,
            expected=closing[:6].hex() + "...",
            found=f"{found[:6].hex()}... over {len(frame)} bytes",
            hint="Run `holdfast verify`; a mirror can restore it.",
        )
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise Malformed("a zstd frame that does not state its size", where=where)
        check_bytes(size, "unpacking it", where=where)
        # max_output_size bounds the allocation even if the header is wrong.
        return zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=max(size, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise Malformed("not a zstd frame", where=where, found=error) from error
