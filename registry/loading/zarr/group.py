"""A stored state as a Zarr v3 group: the same chunks, read through a store of our own.

Owns the methods that zarr calls on a store. A chunk is fetched and verified as a whole before any
byte of it is returned, even if zarr asks for a part; nothing can be written.
`holdfast.registry.loading.zarr.layout` decides how a state looks as a hierarchy.

bfloat16 and float8 are the element types of `ml_dtypes`, registered with zarr, which has no such
types. Other writers of Zarr use their names, too. A type that another package has registered under
its name stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, ClassVar, TypeGuard

import numpy as np
import zarr
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import data_type_registry

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.loading.zarr.layout import BITS, ArrayLayout, ZarrLayout
from holdfast.registry.objects import RECENT_BYTES, RecentChunks, TensorEntry
from holdfast.registry.store import Source
from holdfast.registry.values import ITEM_SIZES, Digest


@dataclass(frozen=True, kw_only=True)
class _MlFloat(BaseFloat[Any, Any]):
    """A type of `ml_dtypes`; its subclasses name it."""

    native: ClassVar[np.dtype[Any]]
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Size of an element in bytes."""
        return self.native.itemsize

    def to_native_dtype(self) -> Any:
        """Return the type of NumPy."""
        return self.native

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Any:
        """Return this type for the type of NumPy; for another one raise zarr's own error."""
        # Where zarr defines that error depends on its version; its base class raises it.
        return cls() if dtype == cls.native else super().from_native_dtype(dtype)

    def _check_scalar(self, data: object) -> TypeGuard[Any]:
        return isinstance(data, self.native.type) or super()._check_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> float | str:  # noqa: ARG002
        """Return a fill value for metadata."""
        # zarr would look at its type, which is no type of NumPy's own.
        found = np.float64(self.cast_scalar(data))
        return "NaN" if np.isnan(found) else _INFINITE.get(float(found), float(found))

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """Return a fill value of metadata: a number, its name, or its bits as `0x...`."""
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(bits, self.native)[0]
        return super().from_json_scalar(data, zarr_format=zarr_format)


_INFINITE: dict[float, float | str] = {np.inf: "Infinity", -np.inf: "-Infinity"}


@cache
def native_types() -> frozenset[str]:
    """Register the types with zarr, once; return their names."""
    try:
        import ml_dtypes
    except ImportError:
        return frozenset()
    floats = (name for name in BITS if "float" in name)
    known = frozenset(name for name in floats if hasattr(ml_dtypes, name))
    for name in known:
        if name not in data_type_registry.contents:
            data_type_registry.register(name, _type_of(name, np.dtype(getattr(ml_dtypes, name))))
    return known


def _type_of(name: str, native: np.dtype[Any]) -> type[_MlFloat]:
    """Make the type of zarr for a type of NumPy."""
    assert native.itemsize == ITEM_SIZES[name]
    members = {
        "native": native,
        "dtype_cls": type(native),
        "_zarr_v3_name": name,
        "__module__": __name__,
        "__doc__": f"{name} of ml_dtypes.",
    }
    made = type(f"{name.title()}Type", (_MlFloat,), members)
    globals()[made.__name__] = made  # pickle finds it by its name
    return made


def open_group(
    source: Source, ref: str, digest: Digest, tensors: Mapping[str, TensorEntry]
) -> zarr.Group:
    """Return a state as a read-only group."""
    store = CheckpointStore(source, ref, digest, tensors)
    return zarr.open_group(store, mode="r", zarr_format=3)


class ReadOnlyStore(Store):
    """The part of a store of Zarr that is the same for every read-only one."""

    supports_writes: bool = False
    supports_deletes: bool = False

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several parts, each as `get` does."""
        parts = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*parts))

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        """Refuse."""
        self._check_writable()

    async def delete(self, key: str) -> None:  # noqa: ARG002
        """Refuse."""
        self._check_writable()


class CheckpointStore(ReadOnlyStore):
    """A state's metadata and chunks under the keys of a Zarr v3 hierarchy."""

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
        self._layout = ZarrLayout(ref, digest, tensors, native=native_types())
        self._recent = RecentChunks(RECENT_BYTES)
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
        """Return a value or a part of it; None if there is none."""
        part = part_of(byte_range)
        data: bytes | memoryview
        if key in self._layout.documents:
            data = self._layout.documents[key]
        else:
            found = self._layout.find(key)
            if found is None:
                return None
            data = await asyncio.to_thread(self._chunk, *found)
        return prototype.buffer.from_bytes(data[part])

    async def exists(self, key: str) -> bool:
        """Return whether there is such a value; fetches nothing."""
        return self._layout.size_of(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the length of a value in bytes; fetches nothing."""
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

        # The key has the size too: the last chunk of one tensor can be a full chunk of another.
        return self._recent.get((digest, array.chunk_bytes), read)

    def _digests_of(self, array: ArrayLayout) -> Sequence[Digest]:
        with self._lock:
            if array.path not in self._digests:
                # Reads the placement once, before many threads need it.
                self._source.index()
                self._digests[array.path] = self._source.chunk_digests(array.entry)
            return self._digests[array.path]


def part_of(byte_range: ByteRequest | None) -> slice:
    """Return the part of a value that a request asks for; it may reach beyond the end."""
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
