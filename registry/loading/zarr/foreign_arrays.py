"""Read foreign Zarr arrays: zarr decodes them, but sees only checked metadata and chunks.

zarr reads through a store that shows it one array: the metadata that `nodes` checked, and chunks
whose length was checked. A few bytes can expand to gigabytes, by a compressor or by filters, and
codecs allocate memory for the whole chunk before anybody compares it with the shape. So this module
first decompresses each chunk file in small parts, and drops each part at once, until the chunk ends
or is longer than its array allows once the filters are undone. In a shard it does this for each
chunk in the index, as often as the index names it, with a bound for each chunk and one for all.
"""

from __future__ import annotations

import asyncio
import bz2
import math
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import zarr
import zstandard
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.loading.zarr.group import ReadOnlyStore, part_of
from holdfast.registry.loading.zarr.nodes import ArrayNode, Chunks, Shard, shorten

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


#: The most chunks of a foreign array that zarr is asked for at once.
_CHUNKS_AT_ONCE = 4096
#: The most chunks for each one that exists: absent chunks take as much time and memory.
_ABSENT_AT_ONCE = 64
#: The first chunk and the one after the last, along each axis of a grid.
_Ranges = list[tuple[int, int]]
#: Names of metadata, of either version.
_DOCUMENTS = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})


def read_array(
    node: ArrayNode,
    read: Callable[[str, slice], bytes | None],
    there: Sequence[tuple[int, ...]],
    into: memoryview,
) -> None:
    """Fill memory with a foreign array; an absent chunk has the fill value."""
    target = np.frombuffer(into, node.shown).reshape(node.shape)
    try:
        array = zarr.open_array(_ArrayStore(node, read), mode="r", zarr_format=node.version)
        if array.shape != node.shape or array.dtype.newbyteorder("=") != target.dtype:
            raise ValueError(f"zarr reads it as {array.dtype}{list(array.shape)}")
    except Exception as error:  # foreign metadata can make zarr raise anything
        raise InvalidInput(
            "zarr cannot read the array by its metadata",
            where=node.where,
            expected=f"metadata that follows the specification of Zarr {node.version}",
            found=shorten(error),
            hint="Nothing was stored. Correct its metadata, or write the array again with zarr.",
        ) from error
    grid = [(0, -(-n // m)) for n, m in zip(node.shape, node.chunk_shape, strict=True)]
    wrong = _fill_parts(array, target, grid, there, node.chunk_shape)
    if wrong is not None:
        key = node.chunk_key(_narrowed(array, target, node))
        raise InvalidInput(
            "a chunk of an array cannot be decoded",
            where=f"{node.where}/{key}",
            expected=f"{node.chunk_bytes} bytes of {node.dtype}, encoded by the codecs in the "
            "metadata",
            found=f"{len(read(key, slice(None)) or b'')} bytes of file: {shorten(wrong)}",
            hint="Nothing was stored. The file may be damaged or incomplete: copy it again.",
        ) from wrong


def _fill_parts(
    array: Any,
    target: Any,
    ranges: _Ranges,
    there: Sequence[tuple[int, ...]],
    chunk_shape: Sequence[int],
) -> Exception | None:
    """Read chunks within ranges of the grid; return the error, if there was one.

    zarr takes time and memory for each chunk, also for absent ones. So large ranges are read by
    halves, and in a half without any chunk only one chunk is requested.
    """
    count = math.prod(stop - start for start, stop in ranges)
    part = _slices(ranges, chunk_shape)
    if count <= min(_CHUNKS_AT_ONCE, _ABSENT_AT_ONCE * max(1, len(there))):
        return _fill(array, target, part)
    if not there:
        first = _slices([(start, start + 1) for start, _ in ranges], chunk_shape)
        wrong = _fill(array, target, first)
        if wrong is None:
            element = tuple(slice(one.start, one.start + 1) for one in first)
            target[part] = target[element].copy()
        return wrong
    for half in _halves(ranges):
        inside = [at for at in there if _is_within(at, half)]
        wrong = _fill_parts(array, target, half, inside, chunk_shape)
        if wrong is not None:
            return wrong
    return None


def _slices(ranges: _Ranges, chunk_shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the part of an array that ranges of its grid cover."""
    return tuple(
        slice(a * size, b * size) for (a, b), size in zip(ranges, chunk_shape, strict=True)
    )


def _halves(ranges: _Ranges) -> tuple[_Ranges, _Ranges]:
    """Divide ranges of a grid into halves along the longest of them."""
    axis = max(range(len(ranges)), key=lambda axis: ranges[axis][1] - ranges[axis][0])
    start, stop = ranges[axis]
    middle = (start + stop) // 2
    before, after = ranges[:axis], ranges[axis + 1 :]
    return [*before, (start, middle), *after], [*before, (middle, stop), *after]


def _is_within(position: tuple[int, ...], ranges: _Ranges) -> bool:
    return all(start <= at < stop for at, (start, stop) in zip(position, ranges, strict=True))


def _fill(array: Any, target: Any, part: tuple[slice, ...]) -> Exception | None:
    """Read a part of an array; return the error if a chunk cannot be decoded."""
    chosen: Any = part or ...  # () would copy the one element
    out = default_buffer_prototype().nd_buffer.from_numpy_array(target[chosen])
    try:
        array.get_basic_selection(chosen, out=out)
    except RegistryError:
        raise
    except MemoryError as error:
        raise IncompatibleState(
            "the array does not fit into memory", where=str(array.store), found=error
        ) from error
    except Exception as error:  # foreign bytes can make a codec raise anything
        return error
    return None


def _narrowed(array: Any, target: Any, node: ArrayNode) -> tuple[int, ...]:
    """Return the position of a chunk that cannot be read: halve the array until it is found."""
    ranges: _Ranges = [(0, -(-n // m)) for n, m in zip(node.shape, node.chunk_shape, strict=True)]
    while any(stop - start > 1 for start, stop in ranges):
        first, second = _halves(ranges)
        is_sound = _fill(array, target, _slices(first, node.chunk_shape)) is None
        ranges = second if is_sound else first
    return tuple(start for start, _ in ranges)


class _ArrayStore(ReadOnlyStore):
    """One foreign array as a read-only store of Zarr: its metadata and its chunks."""

    supports_listing: bool = False

    def __init__(self, node: ArrayNode, read: Callable[[str, slice], bytes | None]) -> None:
        super().__init__(read_only=True)
        self._node = node
        self._read = read
        self._checked: set[str] = set()

    def __str__(self) -> str:
        return self._node.where

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a value or a part of it; None if there is none."""
        part = part_of(byte_range)
        if key in self._node.documents:
            return prototype.buffer.from_bytes(self._node.documents[key][part])
        if key.rpartition("/")[2] in _DOCUMENTS:
            return None  # zarr also looks for other kinds of metadata
        data = await asyncio.to_thread(self._bounded, key, part)
        return None if data is None else prototype.buffer.from_bytes(data)

    def _bounded(self, key: str, part: slice) -> bytes | None:
        if key in self._checked or not can_expand(self._node.chunks):
            return self._read(key, part)
        data = self._read(key, slice(None))
        if data is None:
            return None
        check_expansion(self._node, key, data)
        self._checked.add(key)  # zarr reads a shard by parts
        return data[part]

    async def exists(self, key: str) -> bool:
        """Return whether there is such a value."""
        return key in self._node.documents or self._read(key, slice(0, 0)) is not None

    async def list(self) -> AsyncIterator[str]:
        """Yield the metadata."""
        for key in self._node.documents:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the metadata that begins with a prefix."""
        for key in self._node.documents:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the metadata: an array has no children."""
        async for key in self.list_prefix(prefix):
            yield key
