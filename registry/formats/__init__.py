"""Read files of other programs as states, and write states as such files.

The extension of the file's name decides the format:

| extension | read as | written |
|---|---|---|
| `.pt`, `.pth`, `.ckpt` | `torch.load(weights_only=True)` | `torch.save` of the state |
| `.safetensors` | tensors as component `model`, the file's metadata as `metadata` | one component |
| `.zarr` | a folder: Zarr v3 or v2, any hierarchy of numbers | a folder: Zarr v3 |
| any other | an opaque file: its bytes, unread | an opaque file comes back under any name |

The table is closed: nothing is guessed from a file's bytes, and no plugin is looked up. Each format
is one module, imported when a file needs it: it may wrap a heavy library. `state_file` has the
values that all formats share, `source` reads a file that may change meanwhile, `target` writes one
whole or not at all. A file is hostile: no length in it is trusted, and nothing in it is run.

Only the command line depends on this room. docs/cli.md, "push" and "pull", describes it for users;
CONTRIBUTING.md tells how to add a format.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.state_file import OPAQUE, FileState, Format, WrittenFile, opaque_name
from holdfast.registry.formats.target import check_target
from holdfast.registry.loading.checkpoint import Checkpoint

__all__ = ["FORMATS", "FileState", "WrittenFile", "format_of", "opaque_name", "read", "write"]

#: Extension, in lower case -> format.
FORMATS: dict[str, Format] = {
    ".ckpt": "torch",
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "safetensors",
    ".zarr": "zarr",
}


def format_of(path: str | os.PathLike[str]) -> Format:
    """Return the format for the extension of a file's name."""
    return FORMATS.get(Path(path).suffix.lower(), "opaque")


def read(path: str | os.PathLike[str]) -> FileState:
    """Read a file, or a folder of Zarr, as a state for `Run.save`. Nothing in it is ever run.

    Raises:
        InvalidInput: There is no such file, it breaks its format, or it changed meanwhile.
        UnsupportedValue: A value in it could only be loaded by running code.
        IncompatibleState: A library that reads it is not installed.
    """
    path = Path(path)
    match format_of(path):
        case "torch":
            return _torch(path).read(path)  # type: ignore[no-any-return]
        case "safetensors":
            from holdfast.registry.formats import safetensors

            return safetensors.read(path)
        case "zarr" if path.is_dir():
            from holdfast.registry.formats import zarr_reading

            return zarr_reading.read(path)
        case "opaque" | "zarr":
            from holdfast.registry.formats import opaque

            return opaque.read(path)


def write(
    path: str | os.PathLike[str],
    checkpoint: Checkpoint,
    *,
    only: Iterable[str] | None = None,
    force: bool = False,
) -> WrittenFile:
    """Write a checkpoint to a file, whole or not at all; every byte is verified.

    Args:
        path: The file; its extension decides the format, unless the checkpoint is an opaque file,
            whose bytes are written under any name.
        checkpoint: The checkpoint to write.
        only: Names of the wanted components; all without it.
        force: Whether to replace an existing file.

    Raises:
        IncompatibleState: The state does not fit the format; the message names the path in it.
        InvalidInput: `path` exists already.
        IntegrityError: An object in the registry is damaged; nothing was written.
        StoreFull: The disk is full; nothing was written.
    """
    path = Path(path)
    check_target(path, force=force)
    only = None if only is None else list(only)
    if opaque_name(checkpoint) is not None and only in (None, [OPAQUE]):
        from holdfast.registry.formats import opaque

        return opaque.write(path, checkpoint, force=force)
    match format_of(path):
        case "torch":
            return _torch(path).write(  # type: ignore[no-any-return]
                path, checkpoint, only=only, force=force
            )
        case "safetensors":
            from holdfast.registry.formats import safetensors

            return safetensors.write(path, checkpoint, only=only, force=force)
        case "zarr":
            if path.exists():
                raise InvalidInput(
                    "the path exists", where=path, expected="the path of a new folder"
                )
            from holdfast.registry.formats import zarr

            return zarr.write(path, checkpoint, only=only)
    raise IncompatibleState(
        f"a state cannot be written as {path.suffix or 'a file without extension'}",
        where=checkpoint.ref,
        expected=", ".join(FORMATS),
        hint="Choose the format by the extension of the path.",
    )


def _torch(path: Path) -> Any:
    try:
        from holdfast.registry.formats import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise IncompatibleState(
            "torch is not installed",
            where=path,
            hint="Install it: pip install torch.",
        ) from error
    return torch
