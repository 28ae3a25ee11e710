"""The tensors of a stored state by path, as its manifest describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.registry import pytree
from holdfast.registry.objects import Component, Manifest, TensorEntry
from holdfast.registry.values import Digest


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, as its manifest describes it.

    Attributes:
        path: Component and keys joined with `/`.
        dtype: Name of its element type.
        shape: Axis lengths.
        nbytes: Size in bytes.
        content: Identity of its content: equal for equal dtype, shape and bytes, and only then.
        original: Its original, wider element type, if it was saved with less precision; otherwise
            `None`.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Digest
    original: str | None = None


def tensors_by_path(parts: Mapping[str, Component]) -> dict[str, TensorEntry]:
    """Return the tensors of components by path, in the order of the manifest."""
    found = {}
    for name, part in parts.items():
        for index, (path, _) in pytree.array_paths(name, part.skeleton).items():
            found[path] = part.tensors[index]
    return found


def tensors_of(manifest: Manifest) -> dict[str, TensorInfo]:
    """Return every tensor of a state by path."""
    return {
        path: TensorInfo(
            path, entry.dtype, entry.shape, entry.nbytes, entry.content, entry.original
        )
        for path, entry in tensors_by_path(manifest.components).items()
    }
