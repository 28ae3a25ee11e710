"""Zarr v3 folders: write the tensors of a state as the hierarchy that `ck.zarr()` shows.

The folder has the nodes, metadata and chunks of the view (section 31 of the specification), one
file each, for any reader of Zarr v3. Plain values are kept in an attribute of the root, and long
strings are arrays of bytes, so that `holdfast.registry.formats.zarr_reading` reads the folder as
the same checkpoint. At most 16 MiB of chunks are in memory at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, NotFound
from holdfast.registry.formats.state_file import WrittenFile
from holdfast.registry.formats.target import fail
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.fit import arrays_in
from holdfast.registry.loading.stored import commit_keys, reader_of
from holdfast.registry.storage.manifest import Component, TensorEntry
from holdfast.registry.values.canonical import Json
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.suggest import near
from holdfast.registry.zarr.layout import STATE_ATTRIBUTE, ArrayLayout, Layout

#: Chunks are fetched together up to this many bytes.
_HELD_BYTES = 16 * 2**20


def write(path: Path, checkpoint: Checkpoint, *, only: Iterable[str] | None) -> WrittenFile:
    """Write the tensors of a state as a folder, which appears whole or not at all.

    Raises:
        IncompatibleState: There is no tensor, or one has a path that Zarr cannot name.
        InvalidInput: `path` exists already.
        NotFound: There is no such component.
        IntegrityError: An object in the registry is damaged.
        StoreFull: The disk is full.
    """
    parts = _parts(checkpoint, only)
    attributes = {STATE_ATTRIBUTE: _described(checkpoint, parts, whole=only is None)}
    layout = Layout(checkpoint.ref, checkpoint.digest, _leaves(parts), attributes)
    if not any(arrays_in(part.skeleton) for part in parts.values()):
        raise IncompatibleState("there is no tensor to write", where=checkpoint.ref)
    temporary = path.with_name(f".{path.name[:100]}.{token_hex(6)}.part")
    size = 0
    try:
        temporary.mkdir()
        try:
            for key, document in layout.documents.items():
                size += _put(temporary / key, document)
            for array in layout.arrays.values():
                size += _put_chunks(temporary, array, checkpoint)
            _sync_folders(temporary)
            _give_name(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        fail(error, path, checkpoint.size_bytes)
    return WrittenFile(path, "zarr", size)


def _parts(checkpoint: Checkpoint, only: Iterable[str] | None) -> dict[str, Component]:
    parts = checkpoint.manifest.components
    wanted = list(parts if only is None else only)
    for name in wanted:
        if name not in parts:
            raise NotFound(
                "no such component",
                where=f"{checkpoint.ref}: {name}",
                expected=", ".join(parts),
                hint=near(name, parts),
            )
    return {name: part for name, part in parts.items() if name in wanted}


def _described(
    checkpoint: Checkpoint, parts: Mapping[str, Component], *, whole: bool
) -> dict[str, Any]:
    """Return kind and skeletons, with the keys that the commit keeps in their order."""
    nodes: dict[str, Json] = {name: part.skeleton for name, part in parts.items()}
    order = list(nodes)
    kept = commit_keys(checkpoint)
    if kept is not None and whole:
        values: Any = kept.values
        nodes.update(values["d"])
        order = list(kept.order)
    return {
        "kind": checkpoint.manifest.kind,
        "components": [[name, nodes[name]] for name in order],
    }


def _leaves(parts: Mapping[str, Component]) -> dict[str, TensorEntry]:
    """Return tensors and arrays by path, and the bytes of long strings too."""
    found = {}
    for name, part in parts.items():
        paths = pytree.leaf_paths(name, part.skeleton)
        found.update({paths[index]: entry for index, entry in enumerate(part.tensors)})
    return found


def _put_chunks(folder: Path, array: ArrayLayout, checkpoint: Checkpoint) -> int:
    entry = array.entry
    if entry.inline is not None:
        return sum(_put(folder / key, entry.inline) for key in array.chunk_keys())
    size = 0
    for batch in _batches(array, checkpoint):
        # Zeros follow a chunk that is shorter than Zarr has it.
        chunks = {digest: memoryview(bytearray(array.chunk_bytes)) for _, digest, _ in batch}
        wanted = {digest: chunks[digest][:raw] for _, digest, raw in batch}
        reader_of(checkpoint).read_chunks(wanted)
        size += sum(_put(folder / key, chunks[digest]) for key, digest, _ in batch)
    return size


def _batches(array: ArrayLayout, checkpoint: Checkpoint) -> Iterator[list[tuple[str, Digest, int]]]:
    """Yield the chunks of an array in batches: key, digest, and length without padding."""
    batch: list[tuple[str, Digest, int]] = []
    digests = reader_of(checkpoint).chunk_digests(array.entry)
    for number, (key, digest) in enumerate(zip(array.chunk_keys(), digests, strict=True)):
        batch.append((key, digest, array.raw_bytes(number)))
        if len(batch) * array.chunk_bytes >= _HELD_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _put(path: Path, data: bytes | memoryview) -> int:
    if "\0" in str(path):
        raise IncompatibleState("a tensor's path is not a file name", where=quoted(str(path)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return len(data)


def _sync_folders(folder: Path) -> None:
    for name, _, _ in os.walk(folder, topdown=False):
        _sync_folder(Path(name))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _give_name(temporary: Path, path: Path) -> None:
    try:
        path.mkdir()  # fails if the path exists; an empty folder can be renamed over
    except FileExistsError as error:
        raise InvalidInput(
            "the path exists", where=path, expected="the path of a new folder"
        ) from error
    temporary.replace(path)
    _sync_folder(path.parent)
