"""The results of reading and writing a file, for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.pytree import FlatState

#: The component of an opaque file: its name, and its bytes as an array.
OPAQUE = "file"

Format = Literal["torch", "safetensors", "zarr", "opaque"]


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as a state.

    Attributes:
        state: The state for `Run.save`; flat already where the file marks tensors as saved with
            less precision, which a tensor itself cannot say.
        format: The format that the file was read as; `opaque` files are not parsed.
        size_bytes: Size of the file.
    """

    state: dict[str, Any] | FlatState
    format: Format
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        path: Its path.
        format: Its format.
        size_bytes: Its size.
    """

    path: Path
    format: Format
    size_bytes: int


def opaque_name(checkpoint: Checkpoint) -> str | None:
    """Return the file name of a checkpoint that is an opaque file; `None` of any other state."""
    parts = checkpoint.manifest.components
    if set(parts) != {OPAQUE}:
        return None
    (part,) = parts.values()
    skeleton: Any = part.skeleton
    match skeleton:
        case {"d": [["name", str(name)], ["bytes", {"n": 0}]]}:
            (tensor,) = part.tensors
            return name if tensor.dtype == "uint8" and len(tensor.shape) == 1 else None
    return None
