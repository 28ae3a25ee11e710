"""Check how long a compressed chunk of a foreign Zarr array is, before zarr decodes it.

A few bytes can expand to gigabytes, by a compressor or by filters, and codecs allocate memory for
the whole chunk before anybody compares it with the shape. So this module first decompresses each
chunk file in small parts, and drops each part at once, until the chunk ends or is longer than its
array allows once the filters are undone. In a shard it does this for each chunk in the index, as
often as the index names it, with a bound for each chunk and one for all of them. It does not need
zarr.
"""

from __future__ import annotations

import bz2
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from holdfast.registry.errors import InvalidInput
from holdfast.registry.loading.zarr.nodes import ArrayNode, Chunks, Shard

#: The most bytes of an element within filters: those of complex128.
_WIDEST = 16
#: Bytes for checksums, and for headers of inner codecs.
_SLACK_BYTES = 2**16
#: The same for each chunk within a shard.
_INNER_SLACK_BYTES = 2**8
#: The entry of an absent chunk in the index of a shard.
_ABSENT = 2**64 - 1
#: Bytes that are decompressed at once, and given to a decompressor at once.
_PART_BYTES = 2**20
_FED_BYTES = 2**14
#: The most streams of bzip2 in a chunk.
_MOST_STREAMS = 1024
#: More than any chunk may expand to.
_TOO_MUCH = 2**80


def check_expansion(node: ArrayNode, key: str, data: bytes) -> None:
    """Check that a chunk expands to no more bytes than its array can hold.

    A broken chunk passes: the codec itself reports it better.
    """
    limit = _limit(node.chunks)
    size = 0
    for length in _expanded(node.chunks, data):
        size += length
        if size > limit:
            raise InvalidInput(
                "a chunk of an array expands to more than the array can hold",
                where=f"{node.where}/{key}",
                expected=f"{node.chunk_bytes} bytes of {node.dtype}",
                found=f"more than {limit} bytes, out of {len(data)}",
                hint="Nothing was stored. The file is damaged, or somebody made it to use up "
                "memory.",
            )


def can_expand(chunks: Chunks) -> bool:
    """Return whether decoded chunks can be longer than their files."""
    return chunks.compressor is not None or chunks.shard is not None or chunks.growth > 1


def _limit(chunks: Chunks) -> int:
    """Return the most bytes that one of the chunks may expand to."""
    limit = math.prod(chunks.shape) * _WIDEST + _SLACK_BYTES
    count = 1
    while chunks.shard is not None:
        count *= chunks.shard.count
        chunks = chunks.shard.inner
        limit += count * _INNER_SLACK_BYTES
    return limit


def _expanded(chunks: Chunks, data: bytes) -> Iterator[int]:
    """Yield the lengths of a decompressed chunk, part by part; stop if the chunk is broken."""
    data = data[: len(data) - chunks.trailer_bytes]
    if chunks.shard is not None:
        yield from _expanded_shard(chunks.shard, data)
    elif chunks.compressor is not None:
        try:
            for length in _LENGTHS[chunks.compressor](data):
                yield length * chunks.growth
        except (OSError, EOFError, zlib.error, zstandard.ZstdError, struct.error):
            return
    else:
        yield len(data) * chunks.growth


def _expanded_shard(shard: Shard, data: bytes) -> Iterator[int]:
    numbers = struct.Struct(f"{shard.byte_order}{2 * shard.count}Q")
    length = numbers.size + shard.index_trailer_bytes
    if len(data) < length:
        return
    places = iter(numbers.unpack_from(data, len(data) - length if shard.is_index_last else 0))
    for start, size in zip(places, places, strict=True):
        if start == _ABSENT:
            continue
        rest = _limit(shard.inner)
        for part in _expanded(shard.inner, data[start : start + size]):
            rest -= part
            yield part if rest >= 0 else _TOO_MUCH


def _declared(offset: int) -> Callable[[bytes], Iterator[int]]:
    """Return a function that reads the length in a header; the codec trusts it too."""

    def lengths(data: bytes) -> Iterator[int]:
        yield struct.unpack_from("<I", data, offset)[0]

    return lengths


def _bz2(data: bytes) -> Iterator[int]:
    stream, streams = bz2.BZ2Decompressor(), 1
    for part in _fed(data):
        rest = part
        while rest or not stream.needs_input:
            if stream.eof:  # several streams can follow one another
                stream, streams = bz2.BZ2Decompressor(), streams + 1
                if streams > _MOST_STREAMS:
                    yield _TOO_MUCH  # the codec copies the whole rest at each stream
            yield len(stream.decompress(rest, _PART_BYTES))
            rest = stream.unused_data if stream.eof else b""
            if stream.eof and not rest:
                break


def _deflated(data: bytes) -> Iterator[int]:
    stream = _inflating()
    for part in _fed(data):
        rest = part
        while rest:
            if stream.eof:
                rest = rest.lstrip(b"\0")  # padding, which gzip skips
                if not rest:
                    break
                stream = _inflating()
            yield len(stream.decompress(rest, _PART_BYTES))
            rest = stream.unused_data if stream.eof else stream.unconsumed_tail


def _inflating() -> Any:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # zlib's header or gzip's


def _fed(data: bytes) -> Iterator[bytes]:
    """Yield the bytes in short parts: a decompressor copies the rest of a part each time."""
    for start in range(0, len(data), _FED_BYTES):
        yield data[start : start + _FED_BYTES]


def _zstd(data: bytes) -> Iterator[int]:
    declared = zstandard.frame_content_size(data)
    if declared > 0:
        yield declared  # the codec trusts it
        return
    with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
        while part := reader.read(_PART_BYTES):
            yield len(part)


#: Compressor -> function that yields the lengths of the expanded parts of a file.
_LENGTHS: dict[str, Callable[[bytes], Iterator[int]]] = {
    "blosc": _declared(4),
    "lz4": _declared(0),
    "bz2": _bz2,
    "gzip": _deflated,
    "zlib": _deflated,
    "zstd": _zstd,
}
