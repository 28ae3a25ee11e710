"""Stored states as Zarr groups, and Zarr arrays of other programs as bytes.

- `layout`: a state as a Zarr v3 hierarchy: nodes, metadata, the keys of chunks.
- `group`: that hierarchy as a read-only `zarr.Group`, with the chunks that were read last.
- `nodes`, `expansion`: check the metadata and the chunks of foreign arrays before zarr sees them.
- `element_types`: bfloat16 and float8 as types of zarr, where `ml_dtypes` is installed.
- `foreign_arrays`: reads foreign arrays through zarr. Only it, `group` and `element_types` import
  zarr.

zarr is an extra: this module imports it when one of its functions is called. `loading` and
`formats` depend on this room. Specified in docs/spec.md, section 31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.storage.lazy import Source
from holdfast.registry.storage.tensor_entry import TensorEntry
from holdfast.registry.values.digest import Digest
from holdfast.registry.zarr.nodes import ArrayNode

__all__ = ["native_types", "open_zarr", "read_zarr_array"]


def open_zarr(source: Source, ref: str, digest: Digest, tensors: Mapping[str, TensorEntry]) -> Any:
    """Return a state as a read-only `zarr.Group`.

    Args:
        source: The source of its chunks.
        ref: The ref of the state.
        digest: Its id.
        tensors: Its tensors by path.

    Raises:
        InvalidInput: zarr is not installed.
        IncompatibleState: A tensor has a path that Zarr cannot name.
    """
    try:
        from holdfast.registry.zarr.group import open_group
    except ImportError as error:
        raise _not_installed(error) from error
    return open_group(source, ref, digest, tensors)


def native_types() -> frozenset[str]:
    """Return the element types without a name in Zarr that zarr reads in this process.

    It knows them once this was called; none if `ml_dtypes` or zarr is not installed.
    """
    try:
        from holdfast.registry.zarr import element_types
    except ImportError:
        return frozenset()
    return element_types.native_types()


def read_zarr_array(
    node: ArrayNode,
    read: Callable[[str, slice], bytes | None],
    there: Sequence[tuple[int, ...]],
    into: memoryview,
) -> None:
    """Fill memory with a foreign array of Zarr.

    Args:
        node: Its metadata, checked.
        read: Returns a part of a chunk by its key, or None if the chunk is absent.
        there: Grid positions of the chunks that exist.
        into: Flat writable bytes of its size; C order, little-endian.

    Raises:
        InvalidInput: zarr is not installed, or cannot decode a chunk.
    """
    try:
        from holdfast.registry.zarr.foreign_arrays import read_array
    except ImportError as error:
        raise _not_installed(error) from error
    read_array(node, read, there, into)


def _not_installed(error: ImportError) -> InvalidInput:
    return InvalidInput(
        "zarr cannot be imported",
        found=error,
        hint="Install the extra: pip install 'holdfast[zarr]'.",
    )
