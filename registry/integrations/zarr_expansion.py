"""What a compressed chunk of a foreign Zarr array expands to, found out before zarr decodes it.

Some bytes can stand for gigabytes, and codecs take memory for all that a chunk expands to before
anybody compares it with the shape. So each chunk file is decompressed here first, by parts that are
let go at once, until it is whole or longer than its array allows. Chunks within shards are not
looked at: codecs alone bound what they expand to. Nothing here needs zarr.
"""

from __future__ import annotations

import bz2
import math
import struct
import zlib
from collections.abc import Callable, Iterator

import zstandard

from registry.errors import InvalidInput
from registry.integrations.zarr_nodes import ArrayNode

#: Bytes that an element may have on its way through filters, at most: complex128 has.
_WIDEST = 16
#: Checksums, and the headers of codecs within.
_SLACK_BYTES = 2**16
#: Decompressed at once.
_PART_BYTES = 2**20


def check_expansion(node: ArrayNode, key: str, data: bytes) -> None:
    """Check that a chunk expands to no more than its array can make use of.

    What is broken is left to the codec itself, which says so better.

    Args:
        node: The array; its `compressor` is what decodes the file first.
        key: The chunk.
        data: Its file.

    Raises:
        InvalidInput: It expands to more.
    """
    if node.compressor is None:
        return
    limit = math.prod(node.chunk_shape) * _WIDEST + _SLACK_BYTES
    data = data[: len(data) - node.trailer_bytes]
    size = 0
    try:
        for length in _LENGTHS[node.compressor](data):
            size += length
            if size > limit:
                break
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, struct.error):
        return
    if size > limit:
        raise InvalidInput(
            "a chunk of an array expands to more than the array can hold",
            where=f"{node.where}/{key}",
            expected=f"{node.chunk_bytes} bytes of {node.dtype}",
            found=f"more than {limit} bytes, out of {len(data)} of {node.compressor}",
            hint="Nothing was stored. The file is damaged, or was made to fill the memory.",
        )


def _declared(place: int) -> Callable[[bytes], Iterator[int]]:
    """Return how to read a length out of a header, which the codec takes for granted too."""

    def lengths(data: bytes) -> Iterator[int]:
        yield struct.unpack_from("<I", data, place)[0]

    return lengths


def _bz2(data: bytes) -> Iterator[int]:
    while data:  # several streams can stand one behind the other
        stream = bz2.BZ2Decompressor()
        while not stream.eof:
            part = stream.decompress(data, _PART_BYTES)
            data = b""
            if not part and stream.needs_input:
                return  # cut short
            yield len(part)
        data = stream.unused_data


def _deflated(data: bytes) -> Iterator[int]:
    while data:
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # zlib's header or gzip's
        while not stream.eof:
            part = stream.decompress(data, _PART_BYTES)
            data = stream.unconsumed_tail
            if not part and not data and not stream.eof:
                return  # cut short
            yield len(part)
        data = stream.unused_data.lstrip(b"\0")  # padding, which gzip passes over


def _zstd(data: bytes) -> Iterator[int]:
    declared = zstandard.frame_content_size(data)
    if declared > 0:
        yield declared  # taken for granted by the codec
        return
    with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
        while part := reader.read(_PART_BYTES):
            yield len(part)


#: Compressor -> how to tell, part by part, what a file expands to.
_LENGTHS: dict[str, Callable[[bytes], Iterator[int]]] = {
    "blosc": _declared(4),
    "lz4": _declared(0),
    "bz2": _bz2,
    "gzip": _deflated,
    "zlib": _deflated,
    "zstd": _zstd,
}
