"""A stored state as a Zarr v3 group: the same chunks, read through a store of ours.

Owns what zarr asks of a store. A chunk is fetched and verified as a whole before a byte of it is
handed out, whatever part of it was asked for; nothing can be written. How a state is laid out as a
hierarchy is the business of `holdfast.registry.zarr.layout`. Foreign arrays are decoded by zarr
through another store, which shows it nothing but one array's checked metadata and its chunks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from holdfast.registry.errors import (
    IncompatibleState,
    InvalidInput,
    RegistryError,
    UnsupportedValue,
)
from holdfast.registry.storage.lazy import Source
from holdfast.registry.storage.manifest import TensorEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.zarr.expansion import can_expand, check_expansion
from holdfast.registry.zarr.kept_chunks import Kept
from holdfast.registry.zarr.layout import ArrayLayout, Layout
from holdfast.registry.zarr.nodes import ArrayNode, shorten

#: Chunks kept decoded in a store, at most.
_KEPT_BYTES = 64 * 2**20
#: The most chunks of a foreign array that zarr is asked for at once.
_CHUNKS_AT_ONCE = 4096
#: The same for each present chunk, since absent chunks cost as much.
_ABSENT_AT_ONCE = 64
#: The first chunk and the one after the last, along each axis of a grid.
_Ranges = list[tuple[int, int]]
#: Names of metadata, of either version.
_DOCUMENTS = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})


def open_group(
    source: Source, ref: str, digest: Digest, tensors: Mapping[str, TensorEntry]
) -> zarr.Group:
    """Return a state as a group that can only be read.

    Args:
        source: Where its chunks come from.
        ref: A name that finds the state again.
        digest: Its id.
        tensors: Its tensors by path.

    Raises:
        IncompatibleState: A tensor has a path that Zarr cannot name.
    """
    store = CheckpointStore(source, ref, digest, tensors)
    return zarr.open_group(store, mode="r", zarr_format=3)


def read_array(
    node: ArrayNode,
    read: Callable[[str, slice], bytes | None],
    there: Sequence[tuple[int, ...]],
    into: memoryview,
) -> None:
    """Fill memory with a foreign array; a chunk that is not there is the fill value.

    Args:
        node: Its metadata, checked.
        read: Returns a part of one of its chunks by key, or None where there is no such chunk.
        there: Positions in the grid of the chunks that are there.
        into: Flat writable bytes of its size; C order, little-endian.

    Raises:
        InvalidInput: zarr refuses the metadata, or cannot decode a chunk.
        IncompatibleState: Memory ran out.
    """
    target = np.frombuffer(into, node.shown).reshape(node.shape)
    try:
        array = zarr.open_array(_ArrayStore(node, read), mode="r", zarr_format=node.version)
        if array.shape != node.shape or array.dtype.newbyteorder("=") != target.dtype:
            raise ValueError(f"zarr reads it as {array.dtype}{list(array.shape)}")
    except Exception as error:  # Foreign metadata: whatever zarr dislikes is a bad array.
        raise InvalidInput(
            "zarr cannot read the array by its metadata",
            where=node.where,
            expected=f"metadata as the specification of Zarr {node.version} has it",
            found=shorten(error),
            hint="Nothing was stored. Mend its metadata, or write the array anew with zarr.",
        ) from error
    grid = [(0, -(-n // m)) for n, m in zip(node.shape, node.chunk_shape, strict=True)]
    wrong = _fill_parts(array, target, grid, there, node.chunk_shape)
    if wrong is not None:
        key = node.chunk_key(_narrowed(array, target, node))
        raise InvalidInput(
            "a chunk of an array cannot be decoded",
            where=f"{node.where}/{key}",
            expected=f"{node.chunk_bytes} bytes of {node.dtype}, encoded as the metadata says",
            found=f"{len(read(key, slice(None)) or b'')} bytes of file: {shorten(wrong)}",
            hint="Nothing was stored. The file may be cut short or damaged: copy it anew.",
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
    """Return the part of an array that ranges of its grid make up."""
    return tuple(
        slice(a * size, b * size) for (a, b), size in zip(ranges, chunk_shape, strict=True)
    )


def _halves(ranges: _Ranges) -> tuple[_Ranges, _Ranges]:
    """Cut ranges of a grid across the longest of them."""
    axis = max(range(len(ranges)), key=lambda axis: ranges[axis][1] - ranges[axis][0])
    start, stop = ranges[axis]
    middle = (start + stop) // 2
    before, after = ranges[:axis], ranges[axis + 1 :]
    return [*before, (start, middle), *after], [*before, (middle, stop), *after]


def _is_within(position: tuple[int, ...], ranges: _Ranges) -> bool:
    return all(start <= at < stop for at, (start, stop) in zip(position, ranges, strict=True))


def _fill(array: Any, target: Any, part: tuple[slice, ...]) -> Exception | None:
    """Read a part of an array; return what was wrong with its chunks, if anything was."""
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
    except Exception as error:  # Foreign bytes: whatever a codec dislikes is a bad chunk.
        return error
    return None


def _narrowed(array: Any, target: Any, node: ArrayNode) -> tuple[int, ...]:
    """Return the position of a chunk that cannot be read, by halves of the array that cannot."""
    ranges: _Ranges = [(0, -(-n // m)) for n, m in zip(node.shape, node.chunk_shape, strict=True)]
    while any(stop - start > 1 for start, stop in ranges):
        first, second = _halves(ranges)
        is_sound = _fill(array, target, _slices(first, node.chunk_shape)) is None
        ranges = second if is_sound else first
    return tuple(start for start, _ in ranges)


class _ArrayStore(Store):
    """The metadata and the chunks of one foreign array, to read only, as zarr asks for them."""

    supports_writes: bool = False
    supports_deletes: bool = False
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
        part = _slice(byte_range)
        if key in self._node.documents:
            return prototype.buffer.from_bytes(self._node.documents[key][part])
        if key.rpartition("/")[2] in _DOCUMENTS:
            return None  # zarr looks for what it might be besides
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

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Return several parts, each as `get` does."""
        parts = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*parts))

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
        """Yield the metadata: an array has nothing below it."""
        async for key in self.list_prefix(prefix):
            yield key

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        """Refuse.

        Raises:
            ValueError: Always.
        """
        self._check_writable()

    async def delete(self, key: str) -> None:  # noqa: ARG002
        """Refuse.

        Raises:
            ValueError: Always.
        """
        self._check_writable()


class CheckpointStore(Store):
    """A state's metadata and chunks under the keys of a Zarr v3 hierarchy.

    Args:
        source: Where its chunks come from.
        ref: A name that finds the state again.
        digest: Its id.
        tensors: Its tensors by path.
        read_only: Always true; zarr says so.

    Raises:
        IncompatibleState: A tensor has a path that Zarr cannot name.
        InvalidInput: `read_only` is false.
    """

    supports_writes: bool = False
    supports_deletes: bool = False
    supports_listing: bool = True

    def __init__(
        self,
        source: Source,
        ref: str,
        digest: Digest,
        tensors: Mapping[str, TensorEntry],
        *,
        read_only: bool = True,
    ) -> None:
        if not read_only:
            raise InvalidInput("a stored state cannot be written to", where=ref)
        super().__init__(read_only=True)
        self.ref = ref
        self.digest = digest
        self._source = source
        self._layout = Layout(ref, digest, tensors)
        self._kept = Kept(_KEPT_BYTES)
        self._digests: dict[str, Sequence[Digest]] = {}
        self._lock = Lock()

    def __str__(self) -> str:
        return self.ref  # zarr appends a node's path

    def __repr__(self) -> str:
        return f"<CheckpointStore {self.ref} {self.digest.short}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointStore):
            return NotImplemented
        return (self.ref, self.digest) == (other.ref, other.digest)

    def __hash__(self) -> int:
        return hash((self.ref, self.digest))

    def __reduce__(self) -> str:
        raise UnsupportedValue(
            "a view of a checkpoint cannot be pickled",
            where=self.ref,
            hint="Open the registry in each process; threads can share a view.",
        )

    # Reading

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a value or a part of it; None if there is none.

        Raises:
            IntegrityError: A chunk is damaged or gone.
            ValueError: `byte_range` is none of zarr's.
        """
        part = _slice(byte_range)
        data: bytes | memoryview
        if key in self._layout.documents:
            data = self._layout.documents[key]
        else:
            found = self._layout.find(key)
            if found is None:
                return None
            data = await asyncio.to_thread(self._chunk, *found)
        return prototype.buffer.from_bytes(data[part])

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Return several parts, each as `get` does."""
        parts = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*parts))

    async def exists(self, key: str) -> bool:
        """Return whether there is such a value; fetches nothing."""
        return self._layout.size_of(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the length of a value in bytes; fetches nothing.

        Raises:
            FileNotFoundError: There is no such value.
        """
        size = self._layout.size_of(key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    # Listing

    async def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        for key in self._layout.all_keys():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield every key that begins with a prefix."""
        for key in self._layout.all_keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below a path."""
        for name in self._layout.names(prefix.rstrip("/")):
            yield name

    # Writing, which is refused

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        """Refuse.

        Raises:
            ValueError: Always.
        """
        self._check_writable()

    async def delete(self, key: str) -> None:  # noqa: ARG002
        """Refuse.

        Raises:
            ValueError: Always.
        """
        self._check_writable()

    # Chunks

    def _chunk(self, array: ArrayLayout, number: int) -> memoryview:
        """Return a chunk, verified and filled up with zeros to the size that Zarr expects."""
        entry = array.entry
        if entry.inline is not None:
            return memoryview(entry.inline)
        digest, raw_bytes = self._digests_of(array)[number], array.raw_bytes(number)

        def read() -> memoryview:
            chunk = memoryview(bytearray(array.chunk_bytes))
            self._source.read_chunks({digest: chunk[:raw_bytes]})
            return chunk.toreadonly()

        # The last chunk of one tensor can be a full one of another.
        return self._kept.get((digest, array.chunk_bytes), read)

    def _digests_of(self, array: ArrayLayout) -> Sequence[Digest]:
        with self._lock:
            if array.path not in self._digests:
                # Finds out where the chunks lie, once and before many threads want to know.
                self._source.read_chunks({})
                self._digests[array.path] = self._source.chunk_digests(array.entry)
            return self._digests[array.path]


def _slice(byte_range: ByteRequest | None) -> slice:
    """Return what a request takes of a value; a range beyond its end takes what there is.

    Raises:
        ValueError: It is none of zarr's requests.
    """
    match byte_range:
        case None:
            return slice(None)
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix):
            return slice(-suffix, None) if suffix else slice(0, 0)
    raise ValueError(f"Unexpected byte_range, got {byte_range}.")
