"""One file of safetensors: its header, and its tensors by name."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.safetensors_header import Header, header_faults, read_header
from holdfast.registry.formats.size_limit import check_room
from holdfast.registry.formats.source import read_exactly, stable
from holdfast.registry.formats.state_file import problem


def header_of(path: Path) -> tuple[Header, int]:
    """Return the header of a file, and the size of the file.

    Raises:
        InvalidInput: It breaks a rule of the format; the message names the rule.
    """
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        return read_header(file, size, path), size


def file_problems(path: Path) -> list[str]:
    """Return every rule of the format that a file breaks, each a line of text."""
    try:
        with stable(path) as file:
            return header_faults(file, os.fstat(file.fileno()).st_size, path)
    except InvalidInput as error:
        return [problem(error)]


def read_file(path: Path) -> tuple[dict[str, object], Header, int]:
    """Read a file: return its tensors, its header and its size.

    Raises:
        InvalidInput: It breaks a rule of the format; the message names the rule.
        IncompatibleState: It does not fit into memory.
    """
    with stable(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, path)
        check_room(size, path)
        tensors: dict[str, object] = {}
        for name, dtype, shape in header.tensors:
            try:
                tensors[name], data = pytree.allocate(dtype, shape, "tensor")
            except InvalidInput:
                raise
            except (MemoryError, ValueError) as error:
                raise IncompatibleState(
                    "a tensor does not fit into memory", where=f"{path}: {name}", found=error
                ) from error
            read_exactly(file, data, path)
    return tensors, header, size
