"""A state that is to be written to a file: one that a registry stores, or one in memory.

A format writes both in the same way. The chunks of a stored state are read while the file is
written, so a format that takes `outline` and `stream` needs no memory for the whole state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState
from holdfast.registry.loading import OPAQUE, Stored, check_components, to_device
from holdfast.registry.objects import Component, TensorEntry
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState, TensorBytes, as_torch
from holdfast.registry.store import abandon
from holdfast.registry.values import Digest, Json

#: Tensors are streamed in windows of this many bytes. This many are in memory, each read by one
#: thread, which may need three chunks of 4 MiB more to decode: below 128 MiB in all.
_WINDOW_BYTES = 8 * 2**20
_WINDOWS = 6

#: Some chunks of the tensor of a path: the memory for each, by its number.
_Chunks = tuple[str, Mapping[int, memoryview]]


@dataclass(frozen=True, slots=True)
class Part:
    """A component: its skeleton, and the entry of each tensor, array and long string."""

    skeleton: Json
    tensors: Sequence[TensorEntry]


class Content(ABC):
    """A state, or some of its components."""

    where: str  # its ref, or a name for messages
    digest: Digest | None  # its id; `None` in memory, where nobody has computed it
    kind: str  # `dict` or `odict`
    parts: Mapping[str, Part]  # the wanted components by name
    #: Name and skeleton of each component; of a whole state also the keys that its commit keeps, at
    #: their positions.
    skeletons: list[list[Any]]
    size_bytes: int  # bytes of all its tensors
    stored: Stored | None = None  # the stored state that it is, if a registry has it

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """Tensors, arrays and the bytes of long strings by path."""
        found = {}
        for name, part in self.parts.items():
            paths = pytree.leaf_paths(name, part.skeleton)
            found.update({paths[index]: entry for index, entry in enumerate(part.tensors)})
        return found

    @abstractmethod
    def load(self) -> Any:
        """Return the state, with tensors of torch; the caller owns them."""

    @abstractmethod
    def flat(self, names: Iterable[str]) -> FlatState:
        """Return some components as leaves, for which no torch is needed."""

    @abstractmethod
    def outline(self, names: Iterable[str]) -> FlatState:
        """Return components like `flat`; only `stream` may be asked for the bytes of leaves."""

    @abstractmethod
    def only(self, name: str) -> Content:
        """Return one component."""

    @abstractmethod
    def read_chunks(self, path: str, wanted: Mapping[int, memoryview]) -> None:
        """Fill memory with chunks of a tensor."""

    @abstractmethod
    def stream(self, paths: Iterable[str]) -> Iterator[memoryview]:
        """Yield the bytes of tensors one after the other; each part is valid until the next."""


class StoredContent(Content):
    """A state that a registry stores; every byte of it is verified."""

    stored: Stored

    def __init__(self, stored: Stored, only: Sequence[str] | None) -> None:
        manifest, kept = stored.manifest, stored.handle.commit_keys()
        check_components(
            stored.ref, only or (), manifest.components if kept is None else kept.order
        )
        self.where, self.digest, self.size_bytes = stored.ref, stored.digest, stored.size_bytes
        self.kind = manifest.kind
        self.parts = {
            name: Part(part.skeleton, part.tensors)
            for name, part in manifest.components.items()
            if only is None or name in only
        }
        nodes, order = {name: part.skeleton for name, part in self.parts.items()}, list(self.parts)
        if kept is not None and only is None:
            values: Any = kept.values
            nodes.update(values["d"])
            order = list(kept.order)
        self.skeletons = [[name, nodes[name]] for name in order]
        self.stored = stored
        self._only = only

    def load(self) -> Any:
        """Return the state; a whole release with the keys that its preset names for files."""
        state = self.stored.load(only=self._only, precision="stored")
        extra = self.stored.handle.file_keys() if self._only is None else {}
        return {**extra, **state} if extra else state

    def flat(self, names: Iterable[str]) -> FlatState:
        """Read components."""
        return pytree.flatten(self.stored.handle.load(names, portable=True))

    def outline(self, names: Iterable[str]) -> FlatState:
        """Return components; only their long strings and parts of sparse tensors are read."""
        parts = []
        for name in names:
            skeleton, tensors = self.parts[name].skeleton, self.parts[name].tensors
            paths, kinds = pytree.leaf_paths(name, skeleton), pytree.portable_kinds(skeleton)
            arrays = [self._array(paths[n], kinds[n], one) for n, one in enumerate(tensors)]
            parts.append((name, skeleton, arrays))
        flat = pytree.flatten(pytree.unflatten(self.kind, parts, adapter=pytree.Adapted.of))
        for leaf in flat.leaves:
            leaf.nbytes = self.tensors[leaf.path].nbytes
        return flat

    def _array(self, path: str, kind: str, entry: TensorEntry) -> object:
        if kind in ("numpy", "tensor"):
            try:
                return pytree.unread(entry.dtype, entry.shape, kind)
            except ValueError as error:
                raise IncompatibleState(
                    "no library makes an array of this shape",
                    where=f"{self.where}: {path}",
                    found=f"{list(entry.shape)}: {error}",
                ) from error
        array, view = pytree.allocate(entry.dtype, entry.shape, kind)
        start = 0
        for part in self.stream([path]):
            view[start : start + len(part)] = part
            start += len(part)
        return array

    def only(self, name: str) -> StoredContent:
        """Return one component."""
        return StoredContent(self.stored, [name])

    def read_chunks(self, path: str, wanted: Mapping[int, memoryview]) -> None:
        """Read chunks; equal ones are read once."""
        self._read([(path, wanted)])

    def _read(self, pieces: Iterable[_Chunks]) -> None:
        first: dict[Digest, memoryview] = {}
        copies, reader = [], self.stored.handle.reader
        for path, wanted in pieces:
            entry = self.tensors[path]
            digests = () if entry.inline is not None else reader.chunk_digests(entry)
            for number, view in wanted.items():
                if entry.inline is not None:
                    view[:] = entry.inline
                elif first.setdefault(digests[number], view) is not view:
                    copies.append((view, first[digests[number]]))
        reader.read_chunks(first)
        for view, source in copies:
            view[:] = source

    def stream(self, paths: Iterable[str]) -> Iterator[memoryview]:
        """Read windows ahead, and yield them in order; a chunk is read once for each window."""
        bulk = self.stored.handle.store.pools.bulk
        free = [memoryview(mmap(-1, _WINDOW_BYTES)) for _ in range(_WINDOWS)]
        reading: deque[tuple[Future[None], memoryview, int]] = deque()
        try:
            for pieces in self._windows(paths):
                if not free:
                    yield from _first_of(reading, free)
                memory, at = free.pop(), 0
                window = []
                for path, sizes in pieces:
                    views = {}
                    for number, size in sizes.items():
                        views[number] = memory[at : at + size]
                        at += size
                    window.append((path, views))
                reading.append((bulk.submit(self._read, window), memory, at))
            while reading:
                yield from _first_of(reading, free)
        finally:
            abandon(future for future, _, _ in reading)

    def _windows(self, paths: Iterable[str]) -> Iterator[list[tuple[str, dict[int, int]]]]:
        """Yield the chunks of tensors in windows: by path the size of each chunk by its number."""
        window: list[tuple[str, dict[int, int]]] = []
        held = 0
        for path in paths:
            sizes: dict[int, int] = {}
            for number, size in enumerate(self.tensors[path].grid.sizes()):
                if held + size > _WINDOW_BYTES:
                    yield [*window, (path, sizes)]
                    window, sizes, held = [], {}, 0
                sizes[number] = size
                held += size
            window.append((path, sizes))
        if held:
            yield window


def _first_of(
    reading: deque[tuple[Future[None], memoryview, int]], free: list[memoryview]
) -> Iterator[memoryview]:
    """Yield the bytes of the window that was begun first, and free its memory."""
    future, memory, size = reading[0]
    future.result()
    reading.popleft()
    yield memory[:size]
    free.append(memory)


class MemoryContent(Content):
    """A state in memory."""

    def __init__(self, state: object, only: Sequence[str] | None, where: str) -> None:
        flat = state if isinstance(state, FlatState) else pytree.flatten(state)
        check_components(where, only or (), [part.name for part in flat.components])
        chosen = tuple(part for part in flat.components if only is None or part.name in only)
        self.where, self.digest, self.kind = where, None, flat.kind
        self.parts = {
            part.name: Part(
                part.skeleton, [TensorEntry(leaf.dtype, leaf.shape) for leaf in part.leaves]
            )
            for part in chosen
        }
        self.skeletons = [[part.name, part.skeleton] for part in chosen]
        self._flat = FlatState(flat.kind, chosen)
        self.size_bytes = self._flat.nbytes

    @cached_property
    def _leaves(self) -> dict[str, ArrayLeaf]:
        return {leaf.path: leaf for leaf in self._flat.leaves}

    def load(self) -> Any:
        """Return a copy of the state."""
        return _rebuilt(self._flat, shares=False)

    def flat(self, names: Iterable[str]) -> FlatState:
        """Return components."""
        wanted = set(names)
        return FlatState(
            self.kind, tuple(part for part in self._flat.components if part.name in wanted)
        )

    outline = flat

    def only(self, name: str) -> MemoryContent:
        """Return one component."""
        return MemoryContent(self._flat, [name], self.where)

    def stream(self, paths: Iterable[str]) -> Iterator[memoryview]:
        """Yield the bytes of each tensor."""
        return (self._leaves[path].buffer() for path in paths)

    def read_chunks(self, path: str, wanted: Mapping[int, memoryview]) -> None:
        """Copy chunks."""
        data, grid = self._leaves[path].buffer(), self.tensors[path].grid
        for number, view in wanted.items():
            run, at = divmod(number, grid.chunks_per_run)
            start = run * (grid.nbytes // grid.runs) + at * grid.chunk_bytes
            view[:] = data[start : start + len(view)]


def _rebuilt(state: FlatState, *, shares: bool, device: object = "cpu") -> Any:
    parts = []
    for part in state.components:
        kinds = pytree.leaf_kinds(part.skeleton)
        arrays = [
            _array_of(leaf, kinds[index], shares=shares) for index, leaf in enumerate(part.leaves)
        ]
        moved = arrays if str(device) == "cpu" else to_device(arrays, device)
        parts.append((part.name, part.skeleton, moved))
    return pytree.unflatten(state.kind, parts, adapter=_of_file)


def _of_file(name: str) -> Callable[[Any], Any]:
    """Return the adapter of a dataclass of a file, or keep the form that it has in the file."""
    return pytree.registered(name) or (lambda plain: {"_dataclass": name, "_fields": plain})


def _array_of(leaf: ArrayLeaf, kind: str, *, shares: bool) -> object:
    if shares and isinstance(leaf.source, TensorBytes):
        return as_torch(leaf.source)
    array, view = pytree.allocate(str(leaf.dtype), leaf.shape, kind)
    view[:] = leaf.buffer()
    return array


def portable(
    content: Content, names: Iterable[str] | None = None, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return a state of `pytree.TensorBytes`, arrays of NumPy and `pytree.Adapted`.

    Tensors of a component without sparse ones share their memory with the content.
    """
    wanted = content.parts if names is None else names
    flat = content.flat([name for name in wanted if name not in without])
    parts = []
    for part in flat.components:
        kinds = pytree.portable_kinds(part.skeleton)
        arrays: list[Any] = []
        for index, leaf in enumerate(part.leaves):
            if kinds[index] == "tensor":
                arrays.append(TensorBytes(str(leaf.dtype), leaf.shape, leaf.buffer()))
                continue
            array, view = pytree.allocate(str(leaf.dtype), leaf.shape, kinds[index])
            view[:] = leaf.buffer()
            arrays.append(array)
        parts.append((part.name, part.skeleton, arrays))
    state: dict[str, Any] = dict(pytree.unflatten(flat.kind, parts, adapter=pytree.Adapted.of))
    if names is not None:
        return state
    kept = {name: skeleton for name, skeleton in content.skeletons if name not in content.parts}
    return state | {name: pytree.unflatten_component(node, ()) for name, node in kept.items()}


def with_torch(state: Any, device: object = "cpu") -> Any:
    """Return a state that was just read, with tensors of torch, and values of known adapters.

    The tensors have the memory that was read, where that is possible.
    """
    flat = state if isinstance(state, FlatState) else pytree.flatten(state)
    if not any(isinstance(leaf.source, TensorBytes) for leaf in flat.leaves) and not any(
        pytree.has_tags(part.skeleton, {"ad"}) for part in flat.components
    ):
        return state
    made = _rebuilt(flat, shares=True, device=device)
    if type(state) is OrderedDict:
        vars(made).update(vars(state))  # the metadata of a state_dict
    return made


def check_dtype(program: str, dtype: str, known: Collection[str], where: object) -> None:
    """Refuse a tensor of an element type that a program does not have."""
    if dtype not in known:
        message, expected = f"{program} has no such element type", ", ".join(known)
        raise IncompatibleState(message, where=where, expected=expected, found=dtype)


def opaque_name(parts: Mapping[str, Part | Component]) -> str | None:
    """Return the file name of a state that is an opaque file; `None` of any other state."""
    if set(parts) != {OPAQUE}:
        return None
    (part,) = parts.values()
    skeleton: Any = part.skeleton
    match skeleton:
        case {"d": [["name", str(name)], ["bytes", {"n": 0}]]}:
            (tensor,) = part.tensors
            return name if tensor.dtype == "uint8" and len(tensor.shape) == 1 else None
    return None


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The names, element types and tags that a format can hold."""

    format: str  # its name, for messages
    file: str  # the name of the file, for messages
    dtypes: Container[str]  # element types that it has
    #: The tags of `holdfast.registry.pytree` that it has: tensors, arrays, times.
    tags: frozenset[str] = frozenset({"t", "n"})
    #: The name of a component of plain values that it keeps beside the tensors.
    aside: str | None = None

    def of(self, content: Content) -> tuple[dict[str, ArrayLeaf], FlatComponent | None]:
        """Return the tensors by name, not yet read, and the component that is kept beside them."""
        wanted = self._choose(content)
        leaves: dict[str, ArrayLeaf] = {}
        aside = None
        for part in content.outline(wanted).components:
            if part.name == self.aside and len(wanted) > 1 and not part.leaves:
                aside = part
            else:
                leaves |= self._flat(part)
        return leaves, aside

    def unfit(self, where: str, message: str) -> IncompatibleState:
        """Return the error for a value that the format cannot keep."""
        return IncompatibleState(
            message,
            where=where,
            expected=f"what fits into {self.file}",
            hint=Hint(
                "Pull to a .zarr, which keeps all of it, or load it: "
                "holdfast.open(URL).checkpoint(REF).load().",
                "Pull to a .zarr, which keeps all of it.",
            ),
        )

    def _choose(self, content: Content) -> list[str]:
        """Return the components to load, from their skeletons alone."""
        parts = content.parts
        bare = [name for name, part in parts.items() if self._is_bare(part.skeleton)]
        if len(bare) == len(parts) or len([name for name in parts if name != self.aside]) == 1:
            return list(parts)
        raise IncompatibleState(
            f"a {self.format} file holds the tensors of one component",
            where=content.where,
            found=", ".join(parts) or "none",
            hint="Choose one, such as `--only model`, or pull to a .zarr, which keeps all.",
        )

    def _flat(self, part: FlatComponent) -> dict[str, ArrayLeaf]:
        if part.is_bare:
            return {part.name: self._checked(part.leaves[0], part.name)}
        skeleton: Any = part.skeleton
        match skeleton:
            case {"d": pairs} | {"od": pairs} | {"sd": [pairs, *_]}:
                return {name: self._leaf(part, name, node) for name, node in pairs}
        raise self.unfit(part.name, "the component is not a dict of tensors")

    def _leaf(self, part: FlatComponent, name: Any, node: Any) -> ArrayLeaf:
        where = f"{part.name}/{name}"
        match node:
            case {"t": int(index)} | {"n": int(index)} | {"nt": [int(index), _]} if isinstance(
                name, str
            ) and self._is_bare(node):
                return self._checked(part.leaves[index], where)
            case {"d": _} | {"od": _} | {"sd": _}:
                raise self.unfit(where, f"{self.format} cannot keep dicts inside the component")
        raise self.unfit(where, f"{self.format} can only keep tensors by name, not this value")

    def _checked(self, leaf: ArrayLeaf, where: str) -> ArrayLeaf:
        if leaf.dtype not in self.dtypes:
            raise self.unfit(where, f"{self.format} has no element type for {leaf.dtype}")
        return leaf

    def _is_bare(self, skeleton: object) -> bool:
        return isinstance(skeleton, dict) and set(skeleton) <= self.tags
