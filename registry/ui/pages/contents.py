"""The components and tensors of a state, as its manifest lists them."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

from holdfast.registry.loading import Stored, tensors_by_path
from holdfast.registry.values import Digest

#: Number of tensors that are shown one by one, the largest; the rest of a component is one entry.
TENSORS_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor."""

    path: str  # component and keys joined with `/`
    dtype: str  # name of its element type
    shape: tuple[int, ...]  # axis lengths
    nbytes: int
    original: str | None  # its wider type before it lost precision; `None` if it lost none


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """A component."""

    name: str
    digest: Digest
    tensors: int  # number of its tensors
    nbytes: int
    others: int  # number of tensors that are too small to be shown one by one
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Components and largest tensors of a state, from its manifest."""

    components: tuple[ComponentRow, ...]  # its components, in order
    tensors: tuple[TensorRow, ...]  # the largest tensors, in the order of the state
    nbytes: int  # bytes of all its tensors


def contents_of(stored: Stored) -> Contents:
    """Return the contents of a state by its manifest, which is read once."""
    parts = stored.manifest.components
    found = {name: tensors_by_path({name: part}) for name, part in parts.items()}
    every = [one for paths in found.values() for one in paths.items()]
    largest = nlargest(TENSORS_SHOWN, every, key=lambda one: one[1].nbytes)
    shown = {path for path, _ in largest}
    rows = []
    for name, part in parts.items():
        others = [entry.nbytes for path, entry in found[name].items() if path not in shown]
        counts = len(found[name]), part.nbytes, len(others), sum(others)
        rows.append(ComponentRow(name, part.digest, *counts))
    tensors = tuple(
        TensorRow(path, entry.dtype, entry.shape, entry.nbytes, entry.original)
        for path, entry in every
        if path in shown
    )
    return Contents(tuple(rows), tensors, stored.manifest.nbytes)
