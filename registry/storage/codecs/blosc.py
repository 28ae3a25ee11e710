"""Blosc frames: bytes shuffled by the size of an element, then zstd or lz4.

The compressor is numcodecs'. Its decoder trusts the lengths in a frame's header, so they are held
against what is known before it sees the frame: the length that was stored, and the length that the
manifest gives the chunk. No more memory is taken than the caller has provided.
"""

from __future__ import annotations

import struct

import numpy as np
from numcodecs import blosc

from holdfast.backends import Buffer
from holdfast.registry.errors import Damaged, Malformed
from holdfast.registry.storage.codecs import LZ4, ZSTD

_COMPRESSORS = {ZSTD: b"zstd", LZ4: b"lz4"}
#: What a frame says in its flags of the compressor inside.
_FORMATS = {ZSTD: 4, LZ4: 1}
_LEVEL = 1
#: Bytes that are compressed together. Of its own accord Blosc takes so few at this level that the
#: planes of bytes are cut into pieces that gain little: moments in fp32 keep .93 instead of .86.
_BLOCK_BYTES = 512 * 1024
_HEADER = struct.Struct("<BBBBIII")


def encode(data: Buffer, item_bytes: int, codec: str) -> bytes:
    """Return the frame of some bytes.

    Args:
        data: The bytes; at most 2 GiB.
        item_bytes: Size of an element, by which bytes are shuffled.
        codec: `ZSTD` or `LZ4`.
    """
    name = _COMPRESSORS[codec]
    frame: bytes = blosc.compress(data, name, _LEVEL, blosc.SHUFFLE, _BLOCK_BYTES, item_bytes)
    return frame


def decode(frame: Buffer, codec: str, into: memoryview, *, where: str) -> None:
    """Decode a frame into memory of exactly its decoded length.

    Raises:
        Malformed: It is not a frame of this codec, or one of another length.
        Damaged: Its contents cannot be decoded.
    """
    check(frame, codec, len(into), where=where)
    try:
        blosc.decompress(frame, into)
    except (RuntimeError, ValueError) as error:
        raise Damaged("damaged Blosc frame", where=where, found=error) from error


def join(delta: memoryview, base: Buffer) -> None:
    """Turn a difference into what it is the difference of, or back, in place."""
    target = np.frombuffer(delta, np.uint8)
    np.bitwise_xor(target, np.frombuffer(base, np.uint8), out=target)


def check(frame: Buffer, codec: str, raw_bytes: int, *, where: str) -> None:
    """Hold a frame's header against what is known of it.

    Raises:
        Malformed: It says another thing.
    """
    if len(frame) < _HEADER.size:
        raise Malformed("not a Blosc frame", where=where, found=f"{len(frame)} bytes")
    version, _, flags, item, decoded, block, encoded = _HEADER.unpack_from(frame)
    told = (version, decoded, encoded)
    expected = (2, raw_bytes, len(frame))
    if told != expected or not item or not 0 < block <= max(decoded, 1):
        raise Malformed(
            "a Blosc frame of other lengths",
            where=where,
            expected="version {}, {} bytes out of {}".format(*expected),
            found="version {}, {} bytes out of {}".format(*told),
        )
    memcpyed = flags & 2
    if not memcpyed and flags >> 5 != _FORMATS[codec]:
        raise Malformed(
            "a Blosc frame of another compressor",
            where=where,
            expected=codec,
            found=f"format {flags >> 5}",
        )
