"""Zarr v3 folders: write the tensors of a state as the hierarchy that `ck.zarr()` shows.

The folder has the nodes, metadata and chunks of the view (section 31 of the specification), one
file each, for any reader of Zarr v3. Plain values are kept in an attribute of the root, and long
strings are arrays of bytes, so that `holdfast.registry.formats.zarr_reading` reads the folder as
the same checkpoint. At most 16 MiB of chunks are in memory at once.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.state_file import WrittenFile
from holdfast.registry.formats.target import new_folder, put_file
from holdfast.registry.formats.zarr_reading import detect, inspect, read, validate
from holdfast.registry.loading.fit import arrays_in
from holdfast.registry.zarr.layout import STATE_ATTRIBUTE, ArrayLayout, Layout

__all__ = ["detect", "inspect", "read", "validate", "write"]

#: Chunks are fetched together up to this many bytes.
_HELD_BYTES = 16 * 2**20


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write the tensors of a state as a folder, which appears whole or not at all.

    Raises:
        IncompatibleState: There is no tensor, or one has a path that Zarr cannot name.
        InvalidInput: `path` exists already; `force` replaces no folder.
        IntegrityError: An object in the registry is damaged.
        StoreFull: The disk is full.
    """
    attributes = {STATE_ATTRIBUTE: {"kind": content.kind, "components": content.skeletons}}
    layout = Layout(content.where, content.digest, content.tensors, attributes)
    if not any(arrays_in(part.skeleton) for part in content.parts.values()):
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
