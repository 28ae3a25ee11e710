"""Replace the weights of a model in place by a checkpoint's weights.

Finds the chunks that the model lacks, fetches and verifies them in other memory, and copies them
into the model: all of them, or none unless a device fails meanwhile. `ResidentTensor` maps a chunk
of the grid to a part of an existing tensor, on the host or not, contiguous or not.
`holdfast.registry.loading.following.following` chooses the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.history import PlacedState
from holdfast.registry.loading.destinations import Destination, Extent
from holdfast.registry.loading.fit import (
    LoadReport,
    check_any_fits,
    check_component,
    check_components,
    check_fit,
    filled_once,
    leaves_by_path,
    widened_paths,
)
from holdfast.registry.loading.tensors import tensors_by_path
from holdfast.registry.objects import Component, Manifest, TensorEntry, grid
from holdfast.registry.spec import precision
from holdfast.registry.store import Fetch, Store, index_chunks
from holdfast.registry.values import Digest, collector_paused


class Resident:
    """One tensor or array of a model.

    It keeps the memory alive, so that no other tensor can get the same memory unnoticed.
    """

    def __init__(
        self, source: Any, dtype: str, shape: tuple[int, ...], stored_dtype: str | None = None
    ) -> None:
        self.grid = grid(stored_dtype or dtype, shape)  # the grid by which a checkpoint cuts it
        self._dtype = dtype
        self._stored_dtype = stored_dtype
        self._shape = shape
        # torch tensors know `detach`, NumPy arrays do not.
        self._is_torch = hasattr(source, "detach")
        self._plain = source.detach() if self._is_torch else source
        self._view = pytree.view_of(self._plain) if stored_dtype is None else None

    def read(self, number: int, into: memoryview) -> None:
        """Copy a chunk's bytes out of the tensor."""
        if self._view is not None:
            start = self._start(number)
            into[:] = self._view[start : start + len(into)]
            return
        own = self._own(number)
        into[:] = own if self._stored_dtype is None else self._narrowed(own, self._stored_dtype)

    def peek(self, number: int, size: int) -> memoryview | None:
        """Return a chunk's bytes in the tensor, if they lie there as a checkpoint has them."""
        return None if self._view is None else self._view[self._start(number) :][:size]

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
            precision.widen_all([destination.widening], pool)
        return destination.settle

    def examine(self, number: int, size: int) -> tuple[Digest, bool]:
        """Return the digest of a chunk in the tensor, and whether the tensor holds it exactly.

        Widened numbers are rounded before they are hashed. Other numbers may round to the same
        chunk: these can serve as the base of a delta, but the tensor must not keep them.
        """
        if self._view is not None:
            start = self._start(number)
            return Digest.of(self._view[start : start + size]), True
        own = self._own(number)
        if self._stored_dtype is None:
            return Digest.of(own), True
        data = self._narrowed(own, self._stored_dtype)
        again = memoryview(bytearray(len(own)))
        precision.stored_view(again, self._stored_dtype, self._dtype)[:] = data
        precision.rounding.widen(again, self._stored_dtype, self._dtype)
        return Digest.of(data), _equal(again, own)

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
        return precision.rounding.narrow(own, self._dtype, dtype)

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


def _equal(one: memoryview, other: memoryview) -> bool:
    # Much faster than a comparison of the views, and it releases the interpreter's lock.
    import numpy as np

    return np.array_equal(np.frombuffer(one, "<u4"), np.frombuffer(other, "<u4"))


class LiveChunks:
    """The chunks of a model as a `Cache`: they need not be fetched.

    The digests may be outdated. So a chunk is copied first, and the copy is hashed, here or by the
    caller.
    """

    def __init__(
        self, residents: Mapping[str, Resident], held: Mapping[str, Sequence[Digest]]
    ) -> None:
        self.was_outdated = False  # whether a chunk did not have its known digest any more
        self._where = {
            digest: (residents[path], number, size)
            for path, digests in held.items()
            for number, (digest, size) in enumerate(
                zip(digests, residents[path].grid.sizes(), strict=True)
            )
        }

    def fill(self, wanted: Mapping[Digest, memoryview], *, verified: bool = True) -> list[Digest]:
        """Fill memory with the chunks that the model holds; return the digests of the others."""
        return [
            digest
            for digest, view in wanted.items()
            if not self._fill(digest, view, verified=verified)
        ]

    def peek(self, digest: Digest, size: int) -> memoryview | None:
        """Return a chunk in the model's own memory, unverified."""
        resident, number, held = self._where.get(digest, (None, 0, -1))
        return None if resident is None or held != size else resident.peek(number, size)

    def _fill(self, digest: Digest, view: memoryview, *, verified: bool) -> bool:
        resident, number, size = self._where.get(digest, (None, 0, -1))
        if resident is None or size != len(view):
            return False
        resident.read(number, view)
        if not verified or Digest.of(view) == digest:
            return True
        self.was_outdated = True
        return False


_Chunks = tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """The chunks that a tensor was found to hold or was given, and its mark at that time."""

    resident: Resident
    mark: tuple[object, ...]
    chunks: _Chunks
    inexact: frozenset[int] = frozenset()


@dataclass(slots=True)
class Exchange:
    """The chunks of a checkpoint and of a model, and the chunks that the model lacks."""

    ref: str  # the checkpoint
    base: PlacedState  # its state and place
    #: The model's tensors by path; of those that share memory the first.
    residents: dict[str, Resident] = field(default_factory=dict)
    #: The digests of their chunks in the checkpoint.
    wanted: dict[str, _Chunks] = field(default_factory=dict)
    #: The digests of their chunks in the model.
    held: dict[str, _Chunks] = field(default_factory=dict)
    #: Numbers of chunks that equal the held digest only when they are rounded: they can be bases of
    #: deltas, but have to be replaced.
    inexact: dict[str, frozenset[int]] = field(default_factory=dict)
    #: Bytes that the manifest itself holds.
    inline: dict[Digest, memoryview] = field(default_factory=dict)
    #: Chunks that are fetched and verified.
    fetched: dict[Digest, memoryview] = field(default_factory=dict)
    moved_bytes: int = 0  # stored bytes of chunks that were read from the store

    def differing(self) -> Iterator[tuple[str, int, int, Digest]]:
        """Yield path, number, size and new digest of each chunk to replace."""
        for path, wanted in self.wanted.items():
            held, inexact = self.held[path], self.inexact[path]
            if wanted == held and not inexact:
                continue
            sizes = self.residents[path].grid.sizes()
            for number, (new, old, size) in enumerate(zip(wanted, held, sizes, strict=True)):
                if new != old or number in inexact:
                    yield path, number, size, new

    def lacking(self) -> dict[Digest, memoryview]:
        """Allocate memory for the chunks that are neither here nor in the manifest."""
        found: dict[Digest, memoryview] = {}
        for _, _, size, digest in self.differing():
            if digest in self.inline:
                self.fetched[digest] = self.inline[digest]
            elif digest not in self.fetched and digest not in found:
                found[digest] = pytree.allocate("uint8", (size,), "numpy")[1]
        return found


class SwappedModel:
    """A model whose weights are replaced in place."""

    def __init__(
        self,
        store: Store,
        model: object,
        *,
        component: str | None,
        strict: bool,
        rehash: bool | None,
    ) -> None:
        self._store = store
        self._model = model
        self._component = check_component(component)
        self._strict = strict
        self._rehash = rehash
        self._known: dict[str, _Known] = {}
        self.changed: tuple[str, ...] = ()  # paths of the tensors that the last exchange wrote to
        self.changed_bytes = 0  # bytes that it wrote

    def prepare(self, ref: str, base: PlacedState, before: Exchange | None = None) -> Exchange:
        """Fetch the chunks that the model lacks of a checkpoint; the model itself is only read."""
        with collector_paused():
            made = self._plan(ref, base)
        if before is not None:
            made.fetched, made.moved_bytes = before.fetched, before.moved_bytes
        index = index_chunks(base.manifest, base.placement, base.lists)
        rehash = self._rehash
        while True:
            self._survey(made, rehash)
            live = LiveChunks(made.residents, made.held)
            fetch = Fetch(self._store, base.placement, index, (live,))
            lacking = made.lacking()
            if lacking:
                fetch.read(lacking)
            made.fetched.update(lacking)
            made.moved_bytes += fetch.moved_bytes
            if rehash or not live.was_outdated:
                return made
            rehash = True  # one uncounted write was found; there may be more

    def put(self, exchange: Exchange) -> None:
        """Copy the prepared chunks into the model; nobody may have written to it since.

        Everything that needs the host's memory is done before the first chunk is copied. If a
        device fails during the copies, the model may have only some of the chunks; then the next
        exchange hashes the whole model.
        """
        self._known = {}  # until all of it is there
        pool, changed = self._store.pools.hashing, dict[str, int]()
        differing = list(exchange.differing())
        uses = Counter(digest for *_, digest in differing)
        staged: list[Callable[[], None]] = []
        for path, number, size, digest in differing:
            data = exchange.fetched[digest]
            staged.append(exchange.residents[path].stage(number, data, pool))
            changed[path] = changed.get(path, 0) + size
            uses[digest] -= 1
            if not uses[digest]:
                del exchange.fetched[digest]  # it may be staged: do not keep it twice
        for copy in staged:
            copy()
        self._known = {
            path: _Known(resident, resident.mark(), exchange.wanted[path])
            for path, resident in exchange.residents.items()
        }
        self.changed, self.changed_bytes = tuple(changed), sum(changed.values())

    def _plan(self, ref: str, base: PlacedState) -> Exchange:
        """Compare a checkpoint with the model as it is now: a module may have new tensors."""
        sources = tensors_by_path(self._parts(ref, base.manifest))
        leaves = self._leaves()
        report = LoadReport.of(sources, leaves)
        widened = widened_paths(sources, leaves)
        check_fit(ref, report, sources, leaves, strict=self._strict, widened=widened)
        check_any_fits(ref, report)
        made = Exchange(ref, base)
        for path in filled_once(ref, sources, leaves):
            entry, leaf = sources[path], leaves[path]
            resident = Resident(leaf.source, leaf.dtype, leaf.shape, widened.get(path))
            if not resident.grid.nbytes:
                continue
            chunks = _chunks(entry, base.lists)
            made.residents[path], made.wanted[path] = resident, chunks
            if entry.inline is not None:
                made.inline[chunks[0]] = memoryview(entry.inline)
        return made

    def _survey(self, exchange: Exchange, rehash: bool | None) -> None:
        """Find the digests of the chunks in the model: known ones, or by hashing.

        A known digest may be wrong, because not every write is counted. That is harmless for a
        chunk that is replaced; if it is the base of a delta, the result is hashed. A chunk that
        stays is hashed here; otherwise the model could differ from the checkpoint.
        """
        marks = {path: resident.mark() for path, resident in exchange.residents.items()}
        held: dict[str, list[Digest | None]] = {}
        inexact: dict[str, set[int]] = {path: set() for path in exchange.residents}
        unknown: list[tuple[str, int, int]] = []
        for path, resident in exchange.residents.items():
            known = self._known.get(path)
            trusts = resident.is_counted if rehash is None else not rehash
            chunks: list[Digest | None] = [None] * resident.grid.count
            if known is not None and trusts and known.mark == marks[path]:
                chunks, inexact[path] = list(known.chunks), set(known.inexact)
                if rehash is None:
                    stays = zip(chunks, exchange.wanted[path], strict=True)
                    chunks = [None if old == new else old for old, new in stays]
            held[path] = chunks
            sizes = resident.grid.sizes()
            unknown += [(path, n, sizes[n]) for n, digest in enumerate(chunks) if digest is None]
        examined = self._store.pools.hashing.map(
            lambda one: exchange.residents[one[0]].examine(one[1], one[2]), unknown
        )
        for (path, number, _), (digest, is_exact) in zip(unknown, examined, strict=True):
            held[path][number] = digest
            inexact[path].discard(number)
            if not is_exact:
                inexact[path].add(number)
        exchange.held = {path: tuple(filter(None, chunks)) for path, chunks in held.items()}
        exchange.inexact = {path: frozenset(numbers) for path, numbers in inexact.items()}
        self._known = {
            path: _Known(resident, marks[path], exchange.held[path], exchange.inexact[path])
            for path, resident in exchange.residents.items()
        }

    def _leaves(self) -> dict[str, pytree.ArrayLeaf]:
        component = self._component
        flat = pytree.flatten(self._model if component is None else {component: self._model})
        pytree.await_devices(flat)
        return leaves_by_path(flat)

    def _parts(self, ref: str, manifest: Manifest) -> Mapping[str, Component]:
        name = self._component
        if name is None:
            return manifest.components
        check_components(ref, [name], manifest.components)
        return {name: manifest.components[name]}


def _chunks(entry: TensorEntry, lists: Mapping[Digest, bytes]) -> _Chunks:
    """Return the digests of a tensor's chunks; an inline tensor counts as one chunk."""
    if entry.inline is not None:
        return (Digest.of(entry.inline),)
    return tuple(entry.chunk_digests(lists))
