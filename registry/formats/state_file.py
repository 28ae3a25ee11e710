"""What reading a file gives, and what writing one says: the values that all formats share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.pytree import FlatState

#: The component that an opaque file is: its name, and its bytes as an array.
OPAQUE = "file"

Format = Literal["torch", "safetensors", "zarr", "opaque"]


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as a state.

    Attributes:
        state: What `Run.save` takes; taken apart already where the file says of tensors that they
            were saved with less precision, which a tensor itself cannot.
        format: How the file was read; `opaque` means not at all.
        size_bytes: Size of the file.
    """

    state: dict[str, Any] | FlatState
    format: Format
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        path: Where.
        format: In which format.
        size_bytes: Size of the file.
    """

    path: Path
    format: Format
    size_bytes: int


def opaque_name(checkpoint: Checkpoint) -> str | None:
    """Return the name of the file that a checkpoint is, or `None` where it is a state."""
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
