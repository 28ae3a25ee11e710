"""Blosc frames: bytes shuffled by the size of an element, then zstd or lz4.

numcodecs does the work. Its decoder trusts the lengths in a frame's header, so these are first
compared with the stored length and with the length that the manifest gives the chunk. No memory is
used but the caller's.
"""

from __future__ import annotations

import struct

import numpy as np
from numcodecs import blosc

from holdfast.backends import Buffer
from holdfast.registry.errors import Damaged, Malformed
from holdfast.registry.objects.codecs import LZ4, ZSTD

_COMPRESSORS = {ZSTD: b"zstd", LZ4: b"lz4"}
#: The number of the compressor in the flags of a frame.
_FORMATS = {ZSTD: 4, LZ4: 1}
_LEVEL = 1
#: Bytes that are compressed together. Blosc's own choice at this level is so small that compression
#: gains little: fp32 moments keep .93 of their size instead of .86.
_BLOCK_BYTES = 512 * 1024
_HEADER = struct.Struct("<BBBBIII")


def encode(data: Buffer, item_bytes: int, codec: str) -> bytes:
    """Return the frame of some bytes."""
    name = _COMPRESSORS[codec]
    frame: bytes = blosc.compress(data, name, _LEVEL, blosc.SHUFFLE, _BLOCK_BYTES, item_bytes)
    return frame


def decode(frame: Buffer, codec: str, into: memoryview, *, where: str) -> None:
    """Decode a frame into memory of exactly its decoded length."""
    check(frame, codec, len(into), where=where)
    try:
        blosc.decompress(frame, into)
    except (RuntimeError, ValueError) as error:
        raise Damaged("damaged Blosc frame", where=where, found=error) from error


def join(delta: memoryview, base: Buffer) -> None:
    """Turn a delta into its chunk, or a chunk into its delta, in place."""
    target = np.frombuffer(delta, np.uint8)
    np.bitwise_xor(target, np.frombuffer(base, np.uint8), out=target)


def check(frame: Buffer, codec: str, raw_bytes: int, *, where: str) -> None:
    """Compare a frame's header with the known codec and lengths."""
    if len(frame) < _HEADER.size:
        raise Malformed("not a Blosc frame", where=where, found=f"{len(frame)} bytes")
    version, _, flags, item, decoded, block, encoded = _HEADER.unpack_from(frame)
    found = (version, decoded, encoded)
    expected = (2, raw_bytes, len(frame))
    if found != expected or not item or not 0 < block <= max(decoded, 1):
        raise Malformed(
            "a Blosc frame of other lengths",
            where=where,
            expected="version {}, {} bytes out of {}".format(*expected),
            found="version {}, {} bytes out of {}".format(*found),
        )
    memcpyed = flags & 2
    if not memcpyed and flags >> 5 != _FORMATS[codec]:
        raise Malformed(
            "a Blosc frame of another compressor",
            where=where,
            expected=codec,
            found=f"format {flags >> 5}",
        )
