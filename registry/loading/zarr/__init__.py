"""Stored states as Zarr groups, and Zarr arrays of other programs as bytes.

- `layout`: a state as a Zarr v3 hierarchy: nodes, metadata, the keys of chunks.
- `group`: that hierarchy as a read-only `zarr.Group`, with the chunks that were read last;
  bfloat16 and float8 as types of zarr, where `ml_dtypes` is installed.
- `nodes`: checks the metadata of foreign arrays before zarr sees it.
- `foreign_arrays`: reads foreign arrays through zarr, their chunks checked before. Only it and
  `group` import zarr.

zarr is an extra: this module imports it when one of its functions is called. Specified in
docs/spec.md, section 31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.backends.errors import install_extra
from holdfast.registry.errors import InvalidInput
from holdfast.registry.objects import TensorEntry
from holdfast.registry.store import Source
from holdfast.registry.values import Digest
from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.loading.zarr.layout import (
        BITS,
        DOCUMENT,
        STATE_ATTRIBUTE,
        ArrayLayout,
        ZarrLayout,
        is_position,
    )
    from holdfast.registry.loading.zarr.nodes import ArrayNode, array_v2, array_v3, check_version
else:
    __getattr__ = at_first_use(__name__)


def open_zarr(source: Source, ref: str, digest: Digest, tensors: Mapping[str, TensorEntry]) -> Any:
    """Return a state as a read-only `zarr.Group`."""
    try:
        from holdfast.registry.loading.zarr.group import open_group
    except ImportError as error:
        raise _not_installed(error) from error
    return open_group(source, ref, digest, tensors)


def native_types() -> frozenset[str]:
    """Return the element types without a name in Zarr that zarr reads in this process.

    It knows them once this was called; none if `ml_dtypes` or zarr is not installed.
    """
    try:
        from holdfast.registry.loading.zarr import group
    except ImportError:
        return frozenset()
    return group.native_types()


def read_zarr_array(
    node: ArrayNode,
    read: Callable[[str, slice], bytes | None],
    there: Sequence[tuple[int, ...]],
    into: memoryview,
) -> None:
    """Fill memory with a foreign array of Zarr."""
    try:
        from holdfast.registry.loading.zarr.foreign_arrays import read_array
    except ImportError as error:
        raise _not_installed(error) from error
    read_array(node, read, there, into)


def _not_installed(error: ImportError) -> InvalidInput:
    return InvalidInput(
        "zarr cannot be imported",
        found=error,
        hint=install_extra("zarr"),
    )
