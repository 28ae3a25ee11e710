"""Any file, kept byte for byte: its content is never parsed or run.

Its state is `{"file": {"name": str, "bytes": <uint8 array>}}`. Writing copies the bytes straight
from the registry into the new file.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats.source import read_exactly, stable
from holdfast.registry.formats.state_file import OPAQUE, FileState, WrittenFile
from holdfast.registry.formats.target import new_file
from holdfast.registry.loading.checkpoint import Checkpoint

_PATH = f"{OPAQUE}/bytes"


def read(path: Path) -> FileState:
    """Read the bytes of a file."""
    with stable(path) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
        read_exactly(file, data.data, path)
    try:
        path.name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("the file's name is not Unicode", where=quoted(path.name)) from error
    return FileState({OPAQUE: {"name": path.name, "bytes": data}}, "opaque", data.nbytes)


def write(path: Path, checkpoint: Checkpoint, *, force: bool) -> WrittenFile:
    """Write the verified bytes to a path of any name."""
    size = checkpoint.tensors()[_PATH].nbytes
    with new_file(path, size, force=force) as file:
        if size:
            _take_space(file.fileno(), size)
            # It closes with its last view, which the traceback of an error may hold.
            memory = mmap.mmap(file.fileno(), size)
            array = np.frombuffer(memory, dtype=np.uint8)
            checkpoint.load_into({OPAQUE: {"bytes": array}}, strict=False)
            memory.flush()
    return WrittenFile(path, "opaque", size)


def _take_space(fd: int, size: int) -> None:
    # Reserve the space first: a disk that fills up under a mapping would kill the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS
        os.truncate(fd, size)
