"""Stored states under the interfaces of other libraries, each imported at its first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.digest import Digest
from registry.errors import InvalidInput
from registry.lazy import Source
from registry.manifest import TensorEntry

__all__ = ["open_zarr"]


def open_zarr(source: Source, ref: str, digest: Digest, tensors: Mapping[str, TensorEntry]) -> Any:
    """Return a state as a `zarr.Group` that can only be read.

    Args:
        source: Where its chunks come from.
        ref: A name that finds the state again.
        digest: Its id.
        tensors: Its tensors by path.

    Raises:
        InvalidInput: zarr is not installed.
        IncompatibleState: A tensor has a path that Zarr cannot name.
    """
    try:
        from registry.integrations.zarr import open_group
    except ImportError as error:
        raise InvalidInput(
            "zarr cannot be imported",
            found=error,
            hint="Install the extra: pip install 'holdfast[zarr]'.",
        ) from error
    return open_group(source, ref, digest, tensors)
