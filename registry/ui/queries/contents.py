"""The components and tensors of a state, as its manifest lists them."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

from holdfast.registry.loading.fit import tensors_by_path
from holdfast.registry.loading.stored import Stored
from holdfast.registry.values.digest import Digest

#: The largest tensors that are shown one by one; the others of a component are shown together.
TENSORS_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor.

    Attributes:
        path: Component and keys joined with `/`.
        dtype: Name of its element type.
        shape: Axis lengths.
        nbytes: Size in bytes.
        original: Its wider element type before it lost precision; `None` if it lost none.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    original: str | None


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """A component.

    Attributes:
        name: Its name.
        digest: Its digest.
        tensors: Number of its tensors.
        nbytes: Their bytes.
        others: Number of tensors that are too small to be shown one by one.
        other_bytes: Their bytes.
    """

    name: str
    digest: Digest
    tensors: int
    nbytes: int
    others: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a manifest says of a state.

    Attributes:
        components: Its components, in order.
        tensors: The largest tensors, in the order of the state.
        nbytes: Bytes of all its tensors.
    """

    components: tuple[ComponentRow, ...]
    tensors: tuple[TensorRow, ...]
    nbytes: int


def contents_of(stored: Stored) -> Contents:
    """Return what the manifest of a state says; it is read if it was not yet.

    Raises:
        IntegrityError: The manifest is damaged or gone.
    """
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
