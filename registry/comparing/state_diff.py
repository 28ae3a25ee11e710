"""Compare two checkpoints from their manifests; read tensors only if that is asked for.

Tensors are compared by the digest of their content, plain values by their encoding; both are exact
to the bit. Only the distance between the elements of a changed tensor needs its bytes: then the
chunks whose digests differ are read, in bounded memory, and every byte is verified.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from holdfast.registry.comparing.chunkwise import Piece, reduce_pieces
from holdfast.registry.history import ValueDiff, compare_values, plain_values
from holdfast.registry.loading import StateHandle, TensorInfo, tensors_by_path, tensors_of
from holdfast.registry.objects import TensorEntry
from holdfast.registry.values import Digest, markup, number, size

if TYPE_CHECKING:
    from holdfast.registry.comparing.elements import Change

#: `reshaped` is another shape or element type, or another original type before precision was lost.
#: `moved` is the same content under another path.
Kind = Literal["same", "changed", "reshaped", "moved", "added", "removed"]
KINDS: tuple[Kind, ...] = ("same", "changed", "reshaped", "moved", "added", "removed")


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor of either checkpoint."""

    kind: Kind  # how it changed
    #: The tensor in the first checkpoint; `None` where it was added.
    before: TensorInfo | None
    #: The tensor in the second; `None` where it was removed.
    after: TensorInfo | None
    #: The distance between the elements of a changed tensor, if it was asked for.
    distance: Distance | None = None

    @property
    def path(self) -> str:
        """Its path, in the first checkpoint if it was removed."""
        found = self.after or self.before
        return found.path if found else ""

    @property
    def nbytes(self) -> int:
        """Its size in the second checkpoint, or in the first if it was removed."""
        found = self.after or self.before
        return found.nbytes if found else 0


@dataclass(frozen=True, slots=True)
class ComponentDiff:
    """A component of either checkpoint."""

    name: str
    kind: Kind  # `same`, `changed`, `added` or `removed`
    tensors: Mapping[Kind, int]  # number of tensors by kind of change
    nbytes: Mapping[Kind, int]  # bytes of these tensors
    values: int  # number of plain values that differ


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences between two checkpoints.

    Attributes:
        components: Every component of either, in order.
        tensors: Every tensor of either, same ones included.
        values: The plain values that differ.
    """

    components: tuple[ComponentDiff, ...]
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]

    @property
    def is_same(self) -> bool:
        """Whether both are the same state."""
        return all(part.kind == "same" for part in self.components)

    @property
    def differing(self) -> list[TensorDiff]:
        """The tensors that are not the same in both."""
        return [one for one in self.tensors if one.kind != "same"]

    def _repr_html_(self) -> str:
        return markup.safely("Diff", self._html)

    def _html(self) -> str:
        counts = {kind: self.count(kind) for kind in KINDS}
        facts = {
            f"{kind} tensors": f"{count:,}, {size(self.nbytes(kind))}"
            for kind, count in counts.items()
            if count
        }
        differing = self.differing
        norm = ["norm of the difference"] * any(one.distance for one in differing)
        heads = ("component", "difference", *KINDS, "values")
        parts = [
            (one.name, one.kind, *(one.tensors.get(kind, 0) for kind in KINDS), one.values)
            for one in self.components
        ]
        return markup.describe(
            "Diff",
            "the same state" if self.is_same else "different states",
            facts,
            markup.Rows(heads, parts, len(parts), "components"),
            markup.Rows(
                ("tensor", "difference", "size", *norm),
                (_tensor_row(one)[: 3 + len(norm)] for one in differing),
                len(differing),
                "tensors",
            ),
            markup.Rows(("value",), ((one,) for one in self.values), len(self.values), "values"),
        )

    def count(self, kind: Kind) -> int:
        """Return the number of tensors of a kind."""
        return sum(part.tensors.get(kind, 0) for part in self.components)

    def nbytes(self, kind: Kind) -> int:
        """Return the bytes of the tensors of a kind."""
        return sum(part.nbytes.get(kind, 0) for part in self.components)


def _tensor_row(tensor: TensorDiff) -> tuple[object, ...]:
    norm = None if tensor.distance is None else number(tensor.distance.norm)
    return tensor.path, tensor.kind, size(tensor.nbytes), norm


def diff(before: StateHandle, after: StateHandle, *, values: bool = False) -> Diff:
    """Compare two stored states, of any run and registry."""
    first, second = before.manifest, after.manifest
    tensors = compare_tensors(tensors_of(first), tensors_of(second))
    if values:
        apart = distances(before, after, (one.path for one in tensors if one.kind == "changed"))
        tensors = tuple(replace(one, distance=apart.get(one.path)) for one in tensors)
    plain = compare_values(plain_values(first.components), plain_values(second.components))
    old, new = (
        {name: part.digest for name, part in one.components.items()} for one in (first, second)
    )
    names = [*new, *(name for name in old if name not in new)]
    owned: dict[str, list[TensorDiff]] = {name: [] for name in names}
    for tensor in tensors:
        owned[_owner(tensor.path)].append(tensor)
    differing = Counter(_owner(value.path) for value in plain)
    parts = [
        _component(name, old.get(name), new.get(name), owned[name], differing[name])
        for name in names
    ]
    return Diff(tuple(parts), tensors, plain)


def compare_tensors(
    before: Mapping[str, TensorInfo], after: Mapping[str, TensorInfo]
) -> tuple[TensorDiff, ...]:
    """Compare tensors by path; compare tensors on only one side by content."""
    only_before: dict[Digest, list[TensorInfo]] = {}
    for path, old in before.items():
        if path not in after:
            only_before.setdefault(old.content, []).append(old)
    found = []
    for path, new in after.items():
        if path in before:
            found.append(TensorDiff(_kind(before[path], new), before[path], new))
        elif only_before.get(new.content):
            found.append(TensorDiff("moved", only_before[new.content].pop(0), new))
        else:
            found.append(TensorDiff("added", None, new))
    left = {old.path for same in only_before.values() for old in same}
    removed = [TensorDiff("removed", old, None) for path, old in before.items() if path in left]
    return (*found, *removed)


def _kind(old: TensorInfo, new: TensorInfo) -> Kind:
    if old.content == new.content:
        return "same" if old.original == new.original else "reshaped"
    return "changed" if (old.dtype, old.shape) == (new.dtype, new.shape) else "reshaped"


def _component(
    name: str, old: Digest | None, new: Digest | None, tensors: Iterable[TensorDiff], values: int
) -> ComponentDiff:
    counts: Counter[Kind] = Counter()
    sizes: Counter[Kind] = Counter()
    for tensor in tensors:
        counts[tensor.kind] += 1
        sizes[tensor.kind] += tensor.nbytes
    kind: Kind = "same" if old == new else "changed"
    if old is None or new is None:
        kind = "added" if old is None else "removed"
    return ComponentDiff(name, kind, counts, sizes, values)


def _owner(path: str) -> str:
    """Return the component of a path; a name with a slash is written as JSON in it."""
    if path.startswith('"'):
        name, _ = json.JSONDecoder().raw_decode(path)
        return str(name)
    return path.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between a tensor in two states."""

    norm: float  # L2 norm of the difference
    #: `norm` divided by the L2 norm before of the chunks that differ; unchanged chunks are not
    #: read. So it is at least the relative distance of the whole tensor, and equal to it where
    #: every chunk differs. Infinite where only zeros changed.
    relative: float
    max: int | float  # greatest absolute difference of an element; exact for integers
    count: int
    changed: int  # number of elements whose bits differ; the sign of a zero is a bit
    #: Changed elements that are NaN or infinite before or after. The norms and `max` leave them
    #: out.
    nonfinite: int

    @property
    def changed_share(self) -> float:
        """Share of the elements whose bits differ."""
        return self.changed / self.count if self.count else 0.0


def distances(before: StateHandle, after: StateHandle, paths: Iterable[str]) -> dict[str, Distance]:
    """Return the distances of tensors by path. Memory stays below 256 MiB."""
    from holdfast.registry.comparing import elements

    old, new = (tensors_by_path(one.manifest.components) for one in (before, after))
    pieces = {path: _pieces(before, old[path], after, new[path]) for path in paths}
    found = reduce_pieces(
        [before.reader, after.reader],
        (piece for parts in pieces.values() for piece in parts),
        lambda piece, views: elements.compare(views[0], views[1], piece.dtype),
    )

    def change(path: str) -> Change:
        one, two = old[path].inline, new[path].inline
        if one is not None and two is not None:
            return elements.compare(memoryview(one), memoryview(two), new[path].dtype)
        return elements.join_changes(found[piece] for piece in pieces[path])

    return {path: _distance(new[path], change(path)) for path in pieces}


def differing_bytes(
    before: StateHandle, after: StateHandle, paths: Iterable[str]
) -> dict[str, int]:
    """Return by path how many bytes of chunks `distances` reads, of both states together."""
    old, new = (tensors_by_path(one.manifest.components) for one in (before, after))
    return {
        path: sum(2 * piece.nbytes for piece in _pieces(before, old[path], after, new[path]))
        for path in paths
    }


def _pieces(
    before: StateHandle, old: TensorEntry, after: StateHandle, new: TensorEntry
) -> list[Piece]:
    if new.inline is not None:
        return []
    first, second = before.reader.chunk_digests(old), after.reader.chunk_digests(new)
    chunks = zip(first, second, new.grid.sizes(), strict=True)
    return [Piece((one, two), new.dtype, size) for one, two, size in chunks if one != two]


def _distance(entry: TensorEntry, found: Change) -> Distance:
    relative = 0.0
    if found.norm:
        relative = found.norm / found.norm_before if found.norm_before else math.inf
    return Distance(
        found.norm, relative, found.largest, math.prod(entry.shape), found.changed, found.nonfinite
    )
