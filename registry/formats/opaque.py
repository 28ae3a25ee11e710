"""Any file, kept byte for byte: its content is never parsed or run.

The metadata of a record of Burn's Bin recorders is read, as it has no other names. Its state is
`{"file": {"name": str, "bytes": <uint8 array>}}`. Writing copies the bytes straight
from the registry into the new file.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats import burn
from holdfast.registry.formats.content import Content, opaque_name
from holdfast.registry.formats.source import stable, whole
from holdfast.registry.formats.state_file import (
    FileReport,
    FileState,
    TensorHeader,
    WrittenFile,
    problems,
)
from holdfast.registry.formats.target import new_file
from holdfast.registry.loading import OPAQUE

_PATH = f"{OPAQUE}/bytes"


def detect(path: Path) -> bool:  # noqa: ARG001
    """Return whether a file is of this format: any file can be, so nothing shows it."""
    return False


def read(path: Path) -> FileState:
    """Read the bytes of a file."""
    data = np.frombuffer(whole(path)[0], np.uint8)
    try:
        path.name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("the file's name is not Unicode", where=quoted(path.name)) from error
    state = {OPAQUE: {"name": path.name, "bytes": data}}
    return FileState(state, "opaque", data.nbytes, burn.bin_metadata(path))


def validate(path: Path) -> list[str]:
    """Return the first rule that a file breaks, if it breaks one."""
    return problems(read, path)


def inspect(path: Path) -> FileReport:
    """Return the size of a file."""
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
    tensors = {_PATH: TensorHeader("uint8", (size,))}
    return FileReport("opaque", size, tensors, burn.bin_metadata(path))


def write(path: Path, content: Content, *, metadata: None, force: bool) -> WrittenFile:  # noqa: ARG001
    """Write the bytes to a path of any name."""
    if opaque_name(content.parts) is None:
        raise IncompatibleState(
            "the state is no opaque file",
            where=content.where,
            expected="a state that was read from an opaque file",
            found=", ".join(content.parts),
        )
    size = content.size_bytes
    with new_file(path, size, force=force) as file:
        for part in content.stream([_PATH]):
            file.write(part)
    return WrittenFile(path, "opaque", size)
