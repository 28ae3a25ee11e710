"""Files of safetensors: `{"model": {name: tensor}}`, and the file's own metadata if it has some.

The file may also be the index of a model in shards (`safetensors_index`), which are read as one.

`holdfast.registry.formats.safetensors_header` checks the header, so that a refusal names the broken
rule. Bytes go from file to store and back without becoming tensors, so neither torch nor the
library of safetensors is needed. That library's own output differs from call to call if there are
two metadata keys, and lacks some element types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import Content, NamedTensors
from holdfast.registry.formats.safetensors_header import (
    NAMES,
    encode_header,
    file_problems,
    header_of,
    looks_like_header,
    read_file,
)
from holdfast.registry.formats.safetensors_index import (
    SUFFIX,
    headers,
    index_problems,
    looks_like_index,
    read_shards,
)
from holdfast.registry.formats.source import stable
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problems,
)
from holdfast.registry.formats.target import new_file

FORMAT: Final = "safetensors"
COMPONENT = "model"
METADATA = "metadata"


# Reading


def detect(path: Path) -> bool:
    """Return whether a file begins with a header of this format, or is an index of shards."""
    with stable(path) as file:
        is_file = looks_like_header(file.read(9), os.fstat(file.fileno()).st_size)
    return is_file or looks_like_index(path)


def read(path: Path) -> FileState:
    """Read a file, or all shards of an index as one component."""
    if _is_index(path):
        tensors, metadata, size = read_shards(path)
    else:
        tensors, header, size = read_file(path)
        metadata = header.metadata
    state: dict[str, Any] = {COMPONENT: dict(sorted(tensors.items()))}
    if metadata is not None:
        state[METADATA] = metadata
    return FileState(state, FORMAT, size, metadata)


def validate(path: Path) -> list[str]:
    """Return every rule that a file breaks, or an index and its shards."""
    return (index_problems(path) if _is_index(path) else file_problems(path)) or problems(
        read, path
    )


def inspect(path: Path) -> FileReport:
    """Read the header of a file, or of each shard of an index."""
    if _is_index(path):
        shards, size = headers(path)
        found = list(shards.values())
    else:
        header, size = header_of(path)
        found = [header]
    tensors = {
        f"{COMPONENT}/{name}": TensorHeader(dtype, shape)
        for name, dtype, shape in sorted(one for header in found for one in header.tensors)
    }
    return FileReport(FORMAT, size, tensors, found[0].metadata)


def _is_index(path: Path) -> bool:
    return path.name.endswith(SUFFIX) or looks_like_index(path)


# Writing


def write(
    path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
) -> WrittenFile:
    """Write one component of a state; equal components give equal files."""
    if path.name.endswith(SUFFIX):
        raise IncompatibleState(
            "an index of shards is not written",
            where=path,
            expected="a path that ends with .safetensors, or a folder of format hf",
        )
    fitting = NamedTensors(FORMAT, path.name, NAMES, aside=METADATA)
    leaves, aside = fitting.of(content)
    if "__metadata__" in leaves:
        raise fitting.unfit("__metadata__", "safetensors has this name for its own metadata")
    kept = {} if aside is None else pytree.unflatten_component(aside.skeleton, ())
    if metadata is not None and aside is not None and kept != metadata:
        raise InvalidInput(
            "the state has other metadata", where=METADATA, expected=kept, found=metadata
        )
    head, order = encode_header(leaves, _checked(metadata or kept))
    size = len(head) + sum(leaf.nbytes for leaf in leaves.values())
    with new_file(path, size, force=force) as file:
        file.write(head)
        for part in content.stream(leaf.path for leaf in order):
            file.write(part)
    return WrittenFile(path, FORMAT, size)


def _checked(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for pair in metadata.items() for text in pair
    ):
        raise IncompatibleState(
            "the metadata of a safetensors file can only be strings by name",
            where=METADATA,
            hint="Leave it out with `--only`.",
        )
    return metadata
