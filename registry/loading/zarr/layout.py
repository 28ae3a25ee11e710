"""The layout of a state as a Zarr v3 hierarchy: nodes, their metadata, the keys of chunks.

A pure function of the tensors' entries: it reads no store and does not need zarr. The grid `rows/1`
(section 5 of the specification) is a regular grid of Zarr: a chunk has length 1 along the axes
before the cut axis, its rows along that axis, and the full length along the axes after it. Only the
last chunk along the cut axis is shorter than in Zarr. That axis is the slowest of a chunk, so the
missing bytes are at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import product
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IncompatibleState, Malformed
from holdfast.registry.objects import TensorEntry
from holdfast.registry.values import Digest

#: The metadata of a node.
DOCUMENT = "zarr.json"
#: Element types without a name in Zarr, and the unsigned integers of the same bits. Readers that
#: have `ml_dtypes` see most of them as they are (`element_types`).
BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "complex32": "uint32",
}
#: The attribute of an array that names its true element type.
DTYPE_ATTRIBUTE = "holdfast_dtype"
#: The attribute of an array that names the wider type that it had before it lost precision.
ORIGINAL_ATTRIBUTE = "holdfast_original"
#: The attribute of the root that describes how to rebuild a written state.
STATE_ATTRIBUTE = "holdfast_state"
#: The most digits of a position.
_DIGITS = 19


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """A tensor as an array of Zarr."""

    path: str  # the path of its node and of the tensor
    entry: TensorEntry
    chunk_shape: tuple[int, ...]  # axis lengths of a chunk, every one at least 1
    counts: tuple[int, ...]  # chunks along each axis; empty for a tensor without axes
    chunk_bytes: int  # size of a chunk in Zarr; the last chunks count as full

    @classmethod
    def of(cls, path: str, entry: TensorEntry) -> ArrayLayout:
        """Return the layout of a tensor."""
        grid, shape = entry.grid, entry.shape
        rows = (*(1,) * grid.axis, grid.rows, *shape[grid.axis + 1 :])
        # An empty tensor has no chunk, but Zarr requires the shape of one.
        chunk = tuple(max(1, n) for n in (rows if grid.count else shape)) if shape else ()
        counts = tuple(-(-n // m) for n, m in zip(shape, chunk, strict=True))
        return cls(path, entry, chunk, counts, grid.chunk_bytes)

    def raw_bytes(self, number: int) -> int:
        """Return the stored length of a chunk, without padding."""
        grid = self.entry.grid
        last = number % grid.chunks_per_run == grid.chunks_per_run - 1
        return grid.tail_bytes if last else grid.chunk_bytes

    def number(self, position: tuple[int, ...]) -> int | None:
        """Return the number of the chunk at a position of the grid."""
        if len(position) != len(self.counts) or not self.entry.grid.count:
            return None
        number = 0
        for at, count in zip(position, self.counts, strict=True):
            if at >= count:
                return None
            number = number * count + at
        return number

    def chunk_keys(self) -> Iterator[str]:
        """Yield the key of every chunk, in order."""
        if self.entry.grid.count:
            for position in product(*map(range, self.counts)):
                yield "/".join((self.path, "c", *map(str, position)))

    def document(self, native: AbstractSet[str] = frozenset()) -> dict[str, Any]:
        """Return the metadata of the array; types in `native` are shown as they are."""
        dtype = self.entry.dtype
        shown = dtype if dtype in native else BITS.get(dtype, dtype)
        # xarray requires that axes of equal names have equal lengths throughout a group.
        names = [f"axis{axis}_{length}" for axis, length in enumerate(self.entry.shape)]
        attributes = {DTYPE_ATTRIBUTE: dtype}
        if self.entry.original is not None:
            attributes[ORIGINAL_ATTRIBUTE] = self.entry.original
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.entry.shape),
            "data_type": shown,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(self.chunk_shape)},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _zero(shown),
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": attributes,
            "dimension_names": names,
            "storage_transformers": [],
        }


class ZarrLayout:
    """A state as a Zarr hierarchy."""

    def __init__(
        self,
        ref: str,
        digest: Digest | None,
        tensors: Mapping[str, TensorEntry],
        attributes: Mapping[str, Any] | None = None,
        native: AbstractSet[str] = frozenset(),
    ) -> None:
        self.documents: dict[str, bytes] = {}  # the metadata of every node by its key, encoded once
        self.arrays: dict[str, ArrayLayout] = {}  # the arrays by path
        self._children: dict[str, dict[str, None]] = {"": {}}
        named = {} if digest is None else {"ref": ref, "id": str(digest)}
        self._add(DOCUMENT, _group({**named, **(attributes or {})}))
        for path, entry in tensors.items():
            _check_path(ref, path)
            self._add_parents(path)
            self.arrays[path] = ArrayLayout.of(path, entry)
            self._add(f"{path}/{DOCUMENT}", self.arrays[path].document(native))
        for path in self._children:
            if path in self.arrays:
                raise Malformed("a tensor is within another tensor", where=f"{ref}: {path}")

    def find(self, key: str) -> tuple[ArrayLayout, int] | None:
        """Return the array and the number of the chunk that a key names."""
        steps = key.split("/")
        position: list[int] = []
        while steps and is_position(steps[-1]):
            position.append(int(steps.pop()))
        if not steps or steps.pop() != "c":
            return None
        array = self.arrays.get("/".join(steps))
        number = None if array is None else array.number(tuple(reversed(position)))
        return None if array is None or number is None else (array, number)

    def size_of(self, key: str) -> int | None:
        """Return the length of the value of a key, without reading it."""
        if key in self.documents:
            return len(self.documents[key])
        found = self.find(key)
        return None if found is None else found[0].chunk_bytes

    def all_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield every key that begins with a prefix."""
        yield from (key for key in self.documents if key.startswith(prefix))
        for path, array in self.arrays.items():
            if path.startswith(prefix) or prefix.startswith(f"{path}/"):
                yield from (key for key in array.chunk_keys() if key.startswith(prefix))

    def names(self, path: str) -> Iterator[str]:
        """Yield the names directly below a path."""
        if path in self._children:
            yield DOCUMENT
            yield from self._children[path]
            return
        below = f"{path}/"
        yield from dict.fromkeys(key[len(below) :].split("/")[0] for key in self.all_keys(below))

    def _add_parents(self, path: str) -> None:
        """Add the groups above a node, and the node to the last of them."""
        above = ""
        for step in path.split("/"):
            if above not in self._children:
                self._children[above] = {}
                self._add(f"{above}/{DOCUMENT}", _group({}))
            self._children[above][step] = None
            above = f"{above}/{step}" if above else step

    def _add(self, key: str, document: Mapping[str, Any]) -> None:
        self.documents[key] = json.dumps(document).encode()


def _group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _zero(dtype: str) -> object:
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return False if dtype == "bool" else 0.0 if dtype.startswith("float") else 0


def _check_path(ref: str, path: str) -> None:
    """Refuse a path that Zarr would normalise into another one, or read as metadata."""
    for step in path.split("/"):
        if step in ("", ".", "..", DOCUMENT) or "\\" in step:
            raise IncompatibleState(
                "a tensor has a path that Zarr cannot name",
                where=f"{ref}: {path}",
                expected=f"no step that is empty, '.', '..' or '{DOCUMENT}', and no backslash",
                found=quoted(step),
                hint="Read it as it is: ck[path][...].",
            )


def is_position(step: str) -> bool:
    """Return whether a step of a key is a decimal number in Zarr's spelling."""
    return (
        step.isascii()
        and step.isdecimal()
        and len(step) <= _DIGITS
        and (step == "0" or step[0] != "0")
    )
