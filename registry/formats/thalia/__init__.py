"""Files of Thalia: `.thalia`, also compressed, deltas, and the layout that its document describes.

The state that is read has the components `regions` and `pathways`, and those that the file keeps in
its metadata: `config`, `theta`, `scheduler`, `trial_state`, `training_steps`. All other metadata is
`metadata`, and also the file's own metadata. Tensors have the types of the file.

- `brain`: features of these files alone: precision, compression levels, deltas, single regions.
- `framing`: open a file, undo its compression, and check its checksum.
- `header`: the 256 bytes at the beginning, and the index of regions.
- `tensors`: one tensor, dense or sparse.
- `regions`: the JSON of a region, in which tensors are references.
- `container`: read a whole file; `writing`: write one; `checking`: list all problems of one.
- `document`: the layout of the document; no program wrote it.
- `delta`: the difference to a base file, and chains of them; `delta_writing`: write one.
- `precision`: which tensors a policy narrows.

The programs that write these files changed the frame of compressed files once, and the document
differs from both. All three are told apart by content.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.registry.formats.content import Content
from holdfast.registry.formats.state_file import FileReport, FileState, WrittenFile
from holdfast.registry.formats.thalia import checking, container, delta, framing, writing
from holdfast.registry.formats.thalia.brain import load, migrate, save, save_delta
from holdfast.registry.formats.thalia.precision import POLICIES, PrecisionPolicy

__all__ = [
    "POLICIES",
    "PrecisionPolicy",
    "detect",
    "inspect",
    "load",
    "migrate",
    "read",
    "save",
    "save_delta",
    "validate",
    "write",
]


def detect(path: Path) -> bool:
    """Return whether a file begins as one of Thalia's files, once it is decompressed."""
    return framing.kind_of(path) is not None


def read(path: Path) -> FileState:
    """Read a file; for a delta also its base, the very file that the delta was made from."""
    with framing.opened(path) as body:
        if body.is_delta:
            return delta.read(body, path)
        return container.read_any(body)


def inspect(path: Path) -> FileReport:
    """Describe a file from its header, index and JSON; its checksum is not compared.

    The index is at the end, so a compressed file is decompressed, and a delta is read as a whole.
    """
    with framing.opened(path, verify=False) as body:
        if body.is_delta:
            return delta.inspect(body)
        return container.inspect_any(body)


def validate(path: Path) -> list[str]:
    """Return every problem of a file, each a line of text."""
    return checking.validate(path)


def write(
    path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
) -> WrittenFile:
    """Write a state; the name decides the compression: `.thalia`, `.thalia.zst`, `.thalia.lz4`."""
    state, options = writing.plain(content), writing.Options()
    return writing.write(path, state, metadata=metadata, force=force, options=options)
