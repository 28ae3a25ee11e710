"""Blosc frames: bytes shuffled by the size of an element, then zstd or lz4.

numcodecs does the work. Its decoder trusts the lengths in a frame's header, so these are first
compared with the stored length and with the length that the manifest gives the chunk. No memory is
used but the caller's.

Of floats, the low bytes are noise, and the high ones are entropy without repetition. numcodecs has
zstd search both for matches; `encode_planes` makes frames in which the first are raw and the second
only Huffman-coded. They take fewer bytes and less time, and any decoder of Blosc reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard
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
#: Decoders take shorter streams as one.
_LEAST_STREAM_BYTES = 128
#: A plane that keeps more than this share of its length is not worth decoding.
_WORTH = 0.95
#: Elements whose lowest bytes are tried.
_SAMPLE_ITEMS = 16 * 1024
#: A table for matches that is so small finds runs and little else: matches of exponents are chance.
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    _LEVEL, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
)


def encode_planes(data: Buffer, item_bytes: int) -> bytes:
    """Return a frame of zstd whose blocks are split: a stream for each plane, many of them raw."""
    items, odd = divmod(len(data), item_bytes)
    blocks = -(-len(data) // _BLOCK_BYTES)
    each = items // max(blocks, 1)
    if odd or each < _LEAST_STREAM_BYTES:
        return encode(data, item_bytes, ZSTD)
    array = np.frombuffer(data, np.uint8)
    compress = zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress
    lowest = array[: _SAMPLE_ITEMS * item_bytes : item_bytes].tobytes()
    if len(compress(lowest)) <= len(lowest) * _WORTH:
        return encode(data, item_bytes, ZSTD)  # no noise: let zstd search for matches
    planes = _planes(array, item_bytes)
    most = int(each * _WORTH)
    streams: list[list[Buffer]] = []
    for start in range(0, each * blocks, each):
        parts = [plane[start : start + each] for plane in planes]
        streams.append([p if len(p := compress(part)) <= most else part for part in parts])
    if items > each * blocks:
        streams.append([b"".join(plane[each * blocks :] for plane in planes)])
    return _frame(streams, item_bytes, len(data), each * item_bytes)


def _planes(data: npt.NDArray[np.uint8], item_bytes: int) -> list[memoryview]:
    """Return the first bytes of all elements, their second bytes, and so on; of 1, 2, 4 or 8."""
    if item_bytes == 1:
        return [data.data]
    half = item_bytes // 2
    elements = data.view(f"<u{item_bytes}")
    parts = np.empty((2, len(elements)), f"<u{half}")
    # Casts are vectorised, copies with a stride are not.
    np.copyto(parts[0], elements, casting="unsafe")
    np.right_shift(elements, 8 * half, out=parts[1], casting="unsafe")
    return [plane for part in parts for plane in _planes(part.view(np.uint8), half)]


def _frame(
    streams: Sequence[Sequence[Buffer]], item_bytes: int, raw_bytes: int, block_bytes: int
) -> bytes:
    at = _HEADER.size + 4 * len(streams)
    starts, parts = [], []
    for block in streams:
        starts.append(at)
        for stream in block:
            parts += [struct.pack("<I", len(stream)), stream]
            at += 4 + len(stream)
    flags = 1 | _FORMATS[ZSTD] << 5  # shuffled; blocks are split
    header = _HEADER.pack(2, 1, flags, item_bytes, raw_bytes, block_bytes, at)
    return b"".join([header, struct.pack(f"<{len(starts)}I", *starts), *parts])


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
