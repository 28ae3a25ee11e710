"""The tensors of a model in memory, read and written chunk by chunk.

Maps a chunk of the grid to a part of an existing tensor, on the host or not, contiguous or not, and
marks a tensor to detect writes. `holdfast.registry.loading.following.swapping` decides which chunks
the tensor gets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.loading.destinations import Destination, Extent
from holdfast.registry.objects import grid
from holdfast.registry.spec.precision import stored_view, widen_all
from holdfast.registry.values import Digest


class Resident:
    """One tensor or array of a model.

    It keeps the memory alive, so that no other tensor can get the same memory unnoticed.

    Attributes:
        grid: The grid by which a checkpoint cuts it.
    """

    def __init__(
        self, source: Any, dtype: str, shape: tuple[int, ...], stored_dtype: str | None = None
    ) -> None:
        self.grid = grid(stored_dtype or dtype, shape)
        self._dtype = dtype
        self._stored_dtype = stored_dtype
        self._shape = shape
        # torch tensors know `detach`, NumPy arrays do not.
        self._is_torch = hasattr(source, "detach")
        self._plain = source.detach() if self._is_torch else source
        self._view = pytree.view_of(self._plain) if stored_dtype is None else None

    def sizes(self) -> tuple[int, ...]:
        """Return the length of every chunk, in order."""
        return self.grid.sizes()

    def read(self, number: int, into: memoryview) -> None:
        """Copy a chunk's bytes out of the tensor."""
        if self._view is not None:
            start = self._start(number)
            into[:] = self._view[start : start + len(into)]
            return
        own = self._own(number)
        into[:] = own if self._stored_dtype is None else self._narrowed(own, self._stored_dtype)

    def stage(self, number: int, data: memoryview, pool: Executor) -> Callable[[], None]:
        """Prepare the copy of a chunk into the tensor; the tensor does not change yet."""
        if self._view is not None:
            start = self._start(number)
            return partial(_copy, self._view[start : start + len(data)], data)
        destination = Destination(
            self._plain[self._index(number)], self._stored_dtype, is_aside=True
        )
        destination.view[:] = data
        if destination.widening is not None:
            widen_all([destination.widening], pool)
        return destination.settle

    def examine(self, number: int, size: int) -> tuple[Digest, bool]:
        """Return the digest of a chunk in the tensor, and whether the tensor holds it exactly.

        Widened numbers are rounded before they are hashed. Other numbers may round to the same
        chunk: these can serve as the base of a delta, but the tensor must not keep them.
        """
        if self._view is not None:
            start = self._start(number)
            return Digest(hashlib.sha256(self._view[start : start + size]).digest()), True
        own = self._own(number)
        if self._stored_dtype is None:
            return Digest(hashlib.sha256(own).digest()), True
        data = self._narrowed(own, self._stored_dtype)
        again = memoryview(bytearray(len(own)))
        stored_view(again, self._stored_dtype, self._dtype)[:] = data
        _rounding().widen(again, self._stored_dtype, self._dtype)
        return Digest(hashlib.sha256(data).digest()), _equal(again, own)

    @property
    def is_counted(self) -> bool:
        """Whether torch counts writes to the tensor.

        It counts writes in place to a tensor, its views and `detach()`, unless the tensor was made
        in inference mode. It does not count writes through `.data`, NumPy or foreign kernels. NumPy
        counts nothing.
        """
        return self._is_torch and not self._plain.is_inference()

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes with another tensor or a counted write."""
        extent = Extent.of(self._plain, self._dtype, self._shape)
        return extent, self._plain._version if self.is_counted else None

    def _own(self, number: int) -> memoryview:
        """Return a chunk's bytes in the tensor; they are copied only from another device."""
        part = self._plain[self._index(number)]
        view = pytree.view_of(part)
        if view is not None:
            return view
        kind = "torch" if self._is_torch else "numpy"
        made, view = pytree.allocate(self._dtype, tuple(part.shape), kind)
        staged: Any = made
        if self._is_torch:
            staged.copy_(part)
        else:
            staged[...] = part
        return view

    def _narrowed(self, own: memoryview, dtype: str) -> memoryview:
        """Round as a save does: a widened number gets the bits that were stored."""
        made: memoryview = _rounding().narrow(own, self._dtype, dtype)
        return made

    def _start(self, number: int) -> int:
        run, at = divmod(number, self.grid.chunks_per_run)
        return run * (self.grid.nbytes // self.grid.runs) + at * self.grid.chunk_bytes

    def _index(self, number: int) -> tuple[Any, ...]:
        if not self._shape:
            return (...,)
        run, at = divmod(number, self.grid.chunks_per_run)
        position: list[int] = []
        for length in reversed(self._shape[: self.grid.axis]):
            run, inside = divmod(run, length)
            position.insert(0, inside)
        rows = self.grid.rows
        return (*position, slice(at * rows, (at + 1) * rows), ...)


def _copy(into: memoryview, data: memoryview) -> None:
    into[:] = data


def _rounding() -> Any:
    # Imported late, because it imports numpy.
    from holdfast.registry.spec.precision import rounding

    return rounding


def _equal(one: memoryview, other: memoryview) -> bool:
    # Much faster than a comparison of the views, and it releases the interpreter's lock.
    import numpy as np

    return np.array_equal(np.frombuffer(one, "<u4"), np.frombuffer(other, "<u4"))


class LiveChunks:
    """The chunks of a model as a `Cache`: they need not be fetched.

    The digests may be outdated. So a chunk is copied first, and the copy is hashed, here or by the
    caller.

    Attributes:
        was_outdated: Whether a chunk did not have its known digest any more.
    """

    def __init__(
        self, residents: Mapping[str, Resident], held: Mapping[str, Sequence[Digest]]
    ) -> None:
        self.was_outdated = False
        self._where = {
            digest: (residents[path], number, size)
            for path, digests in held.items()
            for number, (digest, size) in enumerate(
                zip(digests, residents[path].sizes(), strict=True)
            )
        }

    def fill(self, wanted: Mapping[Digest, memoryview], *, verified: bool = True) -> list[Digest]:
        """Fill memory with the chunks that the model holds; return the digests of the others."""
        return [
            digest
            for digest, view in wanted.items()
            if not self._fill(digest, view, verified=verified)
        ]

    def _fill(self, digest: Digest, view: memoryview, *, verified: bool) -> bool:
        resident, number, size = self._where.get(digest, (None, 0, -1))
        if resident is None or size != len(view):
            return False
        resident.read(number, view)
        if not verified or hashlib.sha256(view).digest() == digest:
            return True
        self.was_outdated = True
        return False
