"""Zarr v3 folders: write the tensors of a state as the hierarchy that `ck.zarr()` shows.

The folder has the nodes, metadata and chunks of the view (section 31 of the specification), one
file each, for any reader of Zarr v3. Plain values are kept in an attribute of the root, and long
strings are arrays of bytes, so that `holdfast.registry.formats.zarr` reads the folder as
the same checkpoint. At most 16 MiB of chunks are in memory at once.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, Malformed
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.source import (
    available_bytes,
    check_size,
    json_object,
    read_exactly,
    stable,
    walk,
)
from holdfast.registry.formats.state_file import (
    RAISED,
    Faults,
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problem,
    problems,
)
from holdfast.registry.formats.target import new_folder, put_file
from holdfast.registry.loading.zarr import (
    BITS,
    DOCUMENT,
    STATE_ATTRIBUTE,
    ArrayLayout,
    ArrayNode,
    ZarrLayout,
    array_v2,
    array_v3,
    check_version,
    read_zarr_array,
)
from holdfast.registry.objects import NarrowedDtype
from holdfast.registry.pytree import FlatState

# Read Zarr folders as states: any hierarchy of numbers, and the folders that Holdfast wrote.


#: The component for an array without a group.
ALONE = "array"
#: Longest metadata of one node, in bytes.
_MAX_DOCUMENT_BYTES = 100_000_000
#: Metadata of version 2 that makes no node, and the files that must be in the same folder.
_BESIDE = {".zattrs": (".zarray", ".zgroup"), ".zmetadata": (".zgroup",)}
_HINT = "The folder itself must be a Zarr node: it holds zarr.json, or .zgroup or .zarray."


def detect(path: Path) -> bool:
    """Return whether a folder holds the metadata of a node of Zarr."""
    return any((path / name).is_file() for name in (DOCUMENT, ".zgroup", ".zarray"))


def validate(path: Path) -> list[str]:
    """Return the problems of each node of a folder, or else of the whole."""
    faults = Faults()
    with faults:
        folder = _Folder(path)
        arrays, _, _ = folder.nodes(faults)
        if not faults:
            for name in folder.strays(arrays):
                faults.note(problem(folder.stray(name)))
            for name, node in arrays.items():  # only one of them is in memory
                with faults:
                    _check_memory({name: node}, path)
                    _loaded(folder, name, node)
    return faults.lines or problems(read, path)


def inspect(path: Path) -> FileReport:
    """Read the metadata of a folder."""
    folder = _Folder(path)
    arrays, _, _ = folder.nodes()
    folder.check_strays(arrays)
    tensors = {name or ALONE: TensorHeader(one.dtype, one.shape) for name, one in arrays.items()}
    return FileReport("zarr", folder.size_bytes, tensors)


def read(path: Path) -> FileState:
    """Read a folder. No name in it is ever imported or run."""
    folder = _Folder(path)
    arrays, groups, attributes = folder.nodes()
    _check_memory(arrays, path)
    folder.check_strays(arrays)
    if STATE_ATTRIBUTE in attributes:
        state = _restored(folder, arrays, attributes[STATE_ATTRIBUTE])
    elif not arrays:
        raise InvalidInput("the hierarchy holds no array", where=path)
    else:
        state = _nested(folder, arrays, groups)
    folder.check_unchanged()
    return FileState(_marked(folder, state), "zarr", folder.size_bytes)


class _Folder:
    """A folder, with its files as they were when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Size and identity of each file, by path; the size comes first.
        self.files = dict(_files(path))
        #: Positions of the chunks that are there, by the path of their array.
        self.chunks: dict[str, list[tuple[int, ...]]] = {}
        #: The original types of tensors that were saved with less precision, by the value's `id`.
        self.narrowed: dict[int, str] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(identity[0] for identity in self.files.values())

    def check_unchanged(self) -> None:
        if dict(_files(self.path)) != self.files:
            raise InvalidInput(
                "the folder changed while it was read",
                where=self.path,
                hint="Nothing was stored. Push it again once its writer is done.",
            )

    def nodes(
        self, faults: Faults = RAISED
    ) -> tuple[dict[str, ArrayNode], set[str], dict[str, Any]]:
        """Return the arrays by path, the paths of the groups, and the attributes of the root."""
        arrays: dict[str, ArrayNode] = {}
        groups: set[str] = set()
        root: dict[str, Any] | None = None
        for name in sorted(self.files):
            above, _, last = name.rpartition("/")
            is_v3 = last == DOCUMENT
            if not is_v3 and (last not in (".zarray", ".zgroup") or f"{above}/{DOCUMENT}" in self):
                continue
            node: ArrayNode | None = None
            attributes: dict[str, Any] = {}
            with faults:
                node, attributes = self._node(above, last)
            if node is None:
                groups.add(above)
            else:
                arrays[above] = node
            if not above:
                root = attributes
        if root is None:
            raise InvalidInput("not a Zarr folder", where=self.path, hint=_HINT)
        for path in (*arrays, *groups):
            for outer in _above(path):
                if outer in arrays:
                    raise InvalidInput("a node is inside an array", where=self.where(path))
        return arrays, groups, root

    def check_strays(self, arrays: Mapping[str, ArrayNode]) -> None:
        """Refuse files that would be ignored: they may be of an array that lost its metadata."""
        if strays := self.strays(arrays):
            raise self.stray(*strays)

    def strays(self, arrays: Mapping[str, ArrayNode]) -> list[str]:
        """Return the files that belong to no node, and note the positions of chunks."""
        return sorted(name for name in self.files if not self._belongs(name, arrays))

    def stray(self, *names: str) -> InvalidInput:
        """Return the error for files that belong to no node."""
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return InvalidInput(
            f"{len(names)} of the files belong to no node of the hierarchy",
            where=self.where(names[0]),
            expected="metadata, and chunks within the grid of an array that has its metadata",
            found=some,
            hint="Nothing was stored. Metadata may be missing or wrong; remove the files if they "
            "are of no use.",
        )

    def _belongs(self, name: str, arrays: Mapping[str, ArrayNode]) -> bool:
        above, _, last = name.rpartition("/")
        if last in (DOCUMENT, ".zarray", ".zgroup"):
            return True
        if last in _BESIDE:
            return any(f"{above}/{other}" in self for other in _BESIDE[last])
        array = next((outer for outer in _above(name) if outer in arrays), None)
        if array is None:
            return False
        position = arrays[array].position(name[len(array) :].lstrip("/"))
        if position is not None:
            self.chunks.setdefault(array, []).append(position)
        return position is not None

    def __contains__(self, name: str) -> bool:
        return name.lstrip("/") in self.files

    def _node(self, path: str, name: str) -> tuple[ArrayNode | None, dict[str, Any]]:
        """Return the array that a document describes, or None for a group; and its attributes."""
        prefix = f"{path}/" if path else ""
        document = self._document(prefix + name)
        check_version(self.where(path), document, 3 if name == DOCUMENT else 2)
        if name == DOCUMENT:
            attributes = document.get("attributes")
            found = None
            if document.get("node_type") != "group":
                found = array_v3(self.where(path), document)
        else:
            beside = f"{prefix}.zattrs"
            attributes = self._document(beside) if beside in self else None
            found = array_v2(self.where(path), document, attributes) if name == ".zarray" else None
        return found, attributes if isinstance(attributes, dict) else {}

    def _document(self, name: str) -> dict[str, Any]:
        if self.files[name][0] > _MAX_DOCUMENT_BYTES:
            raise InvalidInput(
                "metadata of a Zarr node is too long",
                where=self.where(name),
                expected=f"at most {_MAX_DOCUMENT_BYTES} bytes",
                found=self.files[name][0],
            )
        return json_object(self.read(name, slice(None)), self.where(name))

    def read(self, name: str, part: slice) -> bytes:
        """Return a part of a file."""
        with stable(self.path / name) as file:
            start, stop, _ = part.indices(self.files[name][0])
            data = bytearray(max(0, stop - start))
            file.seek(start)
            read_exactly(file, memoryview(data), self.path / name)
        return bytes(data)

    def load(self, path: str, node: ArrayNode, into: memoryview) -> None:
        """Fill memory with an array."""
        prefix = f"{path}/" if path else ""

        def read(key: str, part: slice) -> bytes | None:
            name = prefix + key
            return self.read(name, part) if name in self.files else None

        if node.nbytes:
            read_zarr_array(node, read, self.chunks.get(path, ()), into)

    def where(self, path: str) -> str:
        """Return the path of a file or node, for a message."""
        return f"{self.path}: {path}" if path else str(self.path)


def _files(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every file below a folder; refuse links and special files."""
    for name, seen in walk(folder):
        if stat.S_ISREG(seen.st_mode):
            yield name, (seen.st_size, seen.st_mtime_ns, seen.st_ino, seen.st_dev)
        elif not stat.S_ISDIR(seen.st_mode):
            kind = "a link" if stat.S_ISLNK(seen.st_mode) else "neither file nor folder"
            raise InvalidInput(
                "a Zarr folder holds more than files", where=folder / name, found=kind
            )


def _check_memory(arrays: Mapping[str, ArrayNode], path: Path) -> None:
    """Refuse arrays that do not fit into memory: a few bytes of metadata can declare any shape.

    Arrays without elements do not count: their chunks are never read, however large.
    """
    read = [node for node in arrays.values() if node.nbytes]
    wanted, available = sum(node.nbytes for node in read), available_bytes()
    check_size(wanted, path)
    widest = max((node.chunk_bytes for node in read), default=0)
    if wanted + widest <= available:
        return
    largest = max(read, key=lambda node: node.nbytes + node.chunk_bytes)
    raise IncompatibleState(
        "the arrays do not fit into memory",
        where=largest.where,
        expected=f"at most {available} bytes",
        found=f"{wanted} bytes, and {widest} for a chunk; of that array {largest.nbytes}",
    )


# Foreign hierarchies


def _nested(folder: _Folder, arrays: dict[str, ArrayNode], groups: set[str]) -> dict[str, Any]:
    if "" in arrays:
        return {ALONE: _loaded(folder, "", arrays[""])}
    state: dict[str, Any] = {}
    for path in sorted({*arrays, *groups} - {""}, key=lambda path: path.split("/")):
        *outer, last = path.split("/")
        _check_text(folder, path)
        inside = state
        for step in outer:
            inside = inside.setdefault(step, {})
        if path in arrays:
            inside[last] = _loaded(folder, path, arrays[path])
        else:
            inside.setdefault(last, {})
    return state


def _loaded(folder: _Folder, path: str, node: ArrayNode) -> Any:
    # A type that NumPy lacks becomes a tensor: most users have no ml_dtypes.
    return _filled(folder, path, node, "tensor" if node.dtype in BITS else "numpy")


def _filled(folder: _Folder, path: str, node: ArrayNode, kind: str) -> Any:
    value, view = _allocated(node, kind)
    folder.load(path, node, view)
    if node.original is not None:
        folder.narrowed[id(value)] = node.original
    return value


def _marked(folder: _Folder, state: dict[str, Any]) -> dict[str, Any] | FlatState:
    """Return a state that marks the tensors that were saved with less precision, if there are any.

    A tensor has no such mark, but the leaf of a flat state has.
    """
    if not folder.narrowed:
        return state
    flat = pytree.flatten(state)
    for leaf in flat.leaves:
        original = folder.narrowed.pop(id(leaf.source), None)
        if original is not None:
            leaf.dtype = NarrowedDtype(leaf.dtype, original)
    assert not folder.narrowed  # every array is a leaf, and the same object still
    return flat


def _allocated(node: ArrayNode, kind: str) -> tuple[Any, memoryview]:
    try:
        return pytree.allocate(node.dtype, node.shape, kind)
    except (MemoryError, RuntimeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise IncompatibleState(
            "an array does not fit into memory", where=node.where, found=error
        ) from error


def _check_text(folder: _Folder, path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            "a node's name is not Unicode", where=folder.where(repr(path))
        ) from error


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the nodes above one, the root first."""
    steps = path.split("/") if path else []
    for count in range(len(steps)):
        yield "/".join(steps[:count])


# Folders that Holdfast wrote


def _restored(folder: _Folder, arrays: Mapping[str, ArrayNode], described: Any) -> dict[str, Any]:
    """Put a state together from the skeletons in its root; every array must be in one of them."""
    try:
        kind, components = described["kind"], list(described["components"])
        used: set[str] = set()
        parts = []
        for name, skeleton in components:
            if type(name) is not str:
                raise TypeError(f"a component named {name!r}")
            kinds = pytree.portable_kinds(skeleton)
            paths = pytree.leaf_paths(name, skeleton)
            used.update(paths.values())
            parts.append((name, skeleton, [(paths[index], kinds[index]) for index in kinds]))
        if set(arrays) != used:
            odd = sorted(set(arrays) ^ used)
            raise KeyError(f"{odd[0]} is not on both sides")
        loaded = [
            (name, skeleton, [_filled(folder, path, arrays[path], kind) for path, kind in leaves])
            for name, skeleton, leaves in parts
        ]
        return pytree.unflatten(kind, loaded)
    except (Malformed, TypeError, KeyError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"the attribute {STATE_ATTRIBUTE!r} does not describe the arrays",
            where=folder.path,
            found=error,
            hint="Remove it from zarr.json to read the hierarchy as it is.",
        ) from error


#: Chunks are fetched together up to this many bytes.
_HELD_BYTES = 16 * 2**20


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write the tensors of a state as a folder, which appears whole or not at all."""
    attributes = {STATE_ATTRIBUTE: {"kind": content.kind, "components": content.skeletons}}
    layout = ZarrLayout(content.where, content.digest, content.tensors, attributes)
    if not any(pytree.array_paths(name, part.skeleton) for name, part in content.parts.items()):
        raise IncompatibleState("there is no tensor to write", where=content.where)
    size = 0
    with new_folder(path, content.size_bytes) as folder:
        for key, document in layout.documents.items():
            size += _put(folder / key, document)
        for array in layout.arrays.values():
            size += _put_chunks(folder, array, content)
    return WrittenFile(path, "zarr", size)


def _put_chunks(folder: Path, array: ArrayLayout, content: Content) -> int:
    size = 0
    keys = enumerate(array.chunk_keys())
    each = max(1, _HELD_BYTES // max(1, array.chunk_bytes))
    while batch := list(islice(keys, each)):
        # Zeros follow a chunk that is shorter than Zarr has it.
        chunks = {number: memoryview(bytearray(array.chunk_bytes)) for number, _ in batch}
        wanted = {number: view[: array.raw_bytes(number)] for number, view in chunks.items()}
        content.read_chunks(array.path, wanted)
        size += sum(_put(folder / key, chunks[number]) for number, key in batch)
    return size


def _put(path: Path, data: bytes | memoryview) -> int:
    if "\0" in str(path):
        raise IncompatibleState("a tensor's path is not a file name", where=quoted(str(path)))
    return put_file(path, data)
