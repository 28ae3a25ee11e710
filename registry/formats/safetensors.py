"""Files of safetensors: `{"model": {name: tensor}}`, and the file's own metadata if it has some.

`holdfast.registry.formats.safetensors_header` checks the header, so that a refusal names the broken
rule. Bytes go from file to store and back without becoming tensors, so neither torch nor the
library of safetensors is needed. That library's own output differs from call to call if there are
two metadata keys, and lacks some element types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.named_tensors import NamedTensors
from holdfast.registry.formats.safetensors_header import (
    NAMES,
    Header,
    encode_header,
    looks_like_header,
    read_header,
)
from holdfast.registry.formats.source import read_exactly, stable
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problems,
)
from holdfast.registry.formats.target import new_file

COMPONENT = "model"
METADATA = "metadata"


# Reading


def detect(path: Path) -> bool:
    """Return whether a file begins with a header of this format."""
    with stable(path) as file:
        return looks_like_header(file.read(9), os.fstat(file.fileno()).st_size)


def read(path: Path) -> FileState:
    """Read a file.

    Raises:
        InvalidInput: It breaks a rule of the format; the message names the rule.
        IncompatibleState: It does not fit into memory.
    """
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, path)
        state: dict[str, Any] = {COMPONENT: _tensors(file, header, path)}
    if header.metadata is not None:
        state[METADATA] = header.metadata
    return FileState(state, "safetensors", size, header.metadata)


def validate(path: Path) -> list[str]:
    """Return the first rule that a file breaks, if it breaks one."""
    return problems(read, path)


def inspect(path: Path) -> FileReport:
    """Read the header of a file.

    Raises:
        InvalidInput: It breaks a rule of the format; the message names the rule.
    """
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, path)
    tensors = {
        f"{COMPONENT}/{name}": TensorHeader(dtype, shape)
        for name, dtype, shape in sorted(header.tensors)
    }
    return FileReport("safetensors", size, tensors, header.metadata)


def _tensors(file: BinaryIO, header: Header, path: Path) -> dict[str, Any]:
    """Read the tensors, one behind the other; return them sorted by name."""
    found = {}
    for name, dtype, shape in header.tensors:
        try:
            found[name], data = pytree.allocate(dtype, shape, "tensor")
        except InvalidInput:
            raise
        except (MemoryError, ValueError) as error:
            raise IncompatibleState(
                "a tensor does not fit into memory", where=f"{path}: {name}", found=error
            ) from error
        read_exactly(file, data, path)
    return dict(sorted(found.items()))


# Writing


def write(
    path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
) -> WrittenFile:
    """Write one component of a state; equal components give equal files.

    Raises:
        IncompatibleState: The wanted parts are not only tensors by name; the message names the
            path.
        InvalidInput: The state has other metadata than `metadata`.
    """
    fitting = NamedTensors("safetensors", path.name, NAMES, aside=METADATA)
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
        for leaf in order:
            file.write(leaf.buffer())
    return WrittenFile(path, "safetensors", size)


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
