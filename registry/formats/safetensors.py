"""Files of safetensors: `{"model": {name: tensor}}`, and the file's own metadata if it has some.

`holdfast.registry.formats.safetensors_header` checks the header, so that a refusal names the broken
rule. Bytes go from file to store and back without becoming tensors, so neither torch nor the
library of safetensors is needed. That library's own output differs from call to call if there are
two metadata keys, and lacks some element types.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.formats.safetensors_header import NAMES, Header, encode_header, read_header
from holdfast.registry.formats.source import read_exactly, stable
from holdfast.registry.formats.state_file import FileState, WrittenFile
from holdfast.registry.formats.target import new_file
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.stored import load_portable
from holdfast.registry.pytree import ArrayLeaf, FlatComponent

COMPONENT = "model"
METADATA = "metadata"


# Reading


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
    return FileState(state, "safetensors", size)


def _tensors(file: BinaryIO, header: Header, path: Path) -> dict[str, Any]:
    """Read the tensors, one behind the other; return them sorted by name."""
    found = {}
    for name, dtype, shape in header.tensors:
        try:
            found[name], data = pytree.allocate(dtype, shape, "tensor")
        except (MemoryError, ValueError) as error:
            raise IncompatibleState(
                "a tensor does not fit into memory", where=f"{path}: {name}", found=error
            ) from error
        read_exactly(file, data, path)
    return dict(sorted(found.items()))


# Writing


def write(
    path: Path, checkpoint: Checkpoint, *, only: Iterable[str] | None, force: bool
) -> WrittenFile:
    """Write one component of a checkpoint; equal components give equal files.

    Raises:
        IncompatibleState: The wanted parts are not only tensors by name; the message names the
            path.
    """
    wanted = _choose(checkpoint, only)
    state = pytree.flatten(load_portable(checkpoint, wanted))
    leaves: dict[str, ArrayLeaf] = {}
    metadata: dict[str, str] = {}
    for part in state.components:
        if part.name == METADATA and len(wanted) > 1 and not part.leaves:
            metadata = _metadata(part)
        else:
            leaves |= _flat(part, path)
    head, order = encode_header(leaves, metadata)
    size = len(head) + sum(leaf.nbytes for leaf in leaves.values())
    with new_file(path, size, force=force) as file:
        file.write(head)
        for leaf in order:
            file.write(leaf.buffer())
    return WrittenFile(path, "safetensors", size)


def _choose(checkpoint: Checkpoint, only: Iterable[str] | None) -> list[str]:
    """Return the components to load, from the manifest alone."""
    parts = checkpoint.manifest.components
    wanted = list(parts if only is None else only)
    bare = [name for name in wanted if name in parts and _is_bare(parts[name].skeleton)]
    if len(bare) == len(wanted) or len([name for name in wanted if name != METADATA]) == 1:
        return wanted
    raise IncompatibleState(
        "a safetensors file holds the tensors of one component",
        where=checkpoint.ref,
        found=", ".join(wanted) or "none",
        hint="Choose one, such as `--only model`, or pull to a .pt file.",
    )


def _is_bare(skeleton: object) -> bool:
    return isinstance(skeleton, dict) and set(skeleton) <= {"t", "n"}


def _flat(part: FlatComponent, path: Path) -> dict[str, ArrayLeaf]:
    if part.is_bare:
        return {part.name: part.leaves[0]}
    skeleton: Any = part.skeleton
    match skeleton:
        case {"d": pairs} | {"od": pairs} | {"sd": [pairs, *_]}:
            return {name: _leaf(part, name, node, path) for name, node in pairs}
    raise _unfit(path, part.name, "the component is not a dict of tensors")


def _leaf(part: FlatComponent, name: Any, node: Any, path: Path) -> ArrayLeaf:
    where = f"{part.name}/{name}"
    match node:
        case {"t": int(index)} | {"n": int(index)} if isinstance(name, str):
            leaf = part.leaves[index]
            if leaf.dtype in NAMES and name != "__metadata__":
                return leaf
            raise _unfit(path, where, f"safetensors has no element type for {leaf.dtype}")
        case {"d": _} | {"od": _} | {"sd": _}:
            raise _unfit(path, where, "safetensors cannot keep dicts inside the component")
    raise _unfit(path, where, "safetensors can only keep tensors by name, and this is none")


def _unfit(path: Path, where: str, message: str) -> IncompatibleState:
    return IncompatibleState(
        message,
        where=where,
        expected=f"what fits into {path.name}",
        hint="Pull to a .pt file, or load it in Python: holdfast.open(URL).checkpoint(REF).load().",
    )


def _metadata(part: FlatComponent) -> dict[str, str]:
    value = pytree.unflatten_component(part.skeleton, ())
    if not isinstance(value, dict) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        raise IncompatibleState(
            "the metadata of a safetensors file can only be strings by name",
            where=METADATA,
            hint="Leave it out with `--only`.",
        )
    return value
