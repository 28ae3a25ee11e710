"""The components and tensors of a state, as its manifest lists them, and charts of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from holdfast.registry.comparing import Histogram
from holdfast.registry.loading import Stored, TensorInfo, tensors_by_path
from holdfast.registry.ui.charts import Chart, figure, table
from holdfast.registry.values import Digest, size

#: Number of tensors that are shown one by one, the largest; the rest of a component is one entry.
TENSORS_SHOWN = 1000
#: A part of a path: a name in quotes, or text between slashes and dots.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[^/.]+')


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
    tensors: tuple[TensorInfo, ...]  # the largest tensors, in the order of the state
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
        TensorInfo(path, entry.dtype, entry.shape, entry.nbytes, entry.content, entry.original)
        for path, entry in every
        if path in shown
    )
    return Contents(tuple(rows), tensors, stored.manifest.nbytes)


@dataclass(slots=True)
class _Node:
    """A part of the paths of tensors, with the parts below it."""

    label: str
    nbytes: int = 0
    about: str = ""
    is_lossy: bool = False
    below: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """A rectangle of a treemap."""

    number: str
    parent: str
    label: str
    nbytes: int
    about: str
    is_lossy: bool


def _trace(parts: Sequence[_Part]) -> dict[str, Any]:
    """Return the rectangles of a treemap, with their texts for the pointer."""
    return {
        "type": "treemap",
        "ids": [one.number for one in parts],
        "parents": [one.parent for one in parts],
        "labels": [one.label for one in parts],
        "values": [one.nbytes for one in parts],
        "customdata": [one.about for one in parts],
        "branchvalues": "total",
        "texttemplate": "%{label}",
        "hovertemplate": "%{label}<br>%{customdata}, %{percentRoot:.1%}<extra></extra>",
        "marker": {
            "pattern": {
                "shape": ["/" if one.is_lossy else "" for one in parts],
                "fillmode": "overlay",
                "fgcolor": "var(--paper)",
                "fgopacity": 0.5,
            },
            "line": {"width": 1.5, "color": "var(--paper)"},
            "depthfade": False,
        },
        "textfont": {"color": "var(--paper)"},
        "pathbar": {"visible": False},
        "maxdepth": 4,
    }


def treemap(contents: Contents) -> Chart:
    """Return the tensors of a state as a treemap by bytes; those with fewer bits are hatched."""
    rows = [
        (one.path, one.dtype, one.original or "", shape_text(one.shape), one.nbytes)
        for one in sorted(contents.tensors, key=lambda one: -one.nbytes)
    ]
    hidden = sum(part.others for part in contents.components)
    rows += [
        (f"{part.name}: {part.others} smaller tensors", "", "", "", part.other_bytes)
        for part in contents.components
        if part.others
    ]
    return figure(
        "Tensors by bytes",
        f"A treemap of {len(contents.tensors) + hidden} tensors in "
        f"{len(contents.components)} components, by bytes",
        [_trace(list(_flat(_tree(contents))))],
        {"margin": {"l": 0, "r": 0, "t": 4, "b": 0}},
        table(("tensor", "dtype", "was", "shape", "bytes"), rows),
        height_px=420,
    )


def histogram_chart(found: Histogram) -> Chart:
    """Return the histogram of a tensor."""
    pairs = list(zip(found.edges, found.edges[1:], found.counts, strict=False))
    trace = {
        "type": "bar",
        "x": [(low + high) / 2 for low, high, _ in pairs],
        "y": [count for _, _, count in pairs],
        "width": [high - low for low, high, _ in pairs],
        "customdata": [[_number(low), _number(high)] for low, high, _ in pairs],
        "hovertemplate": "%{customdata[0]} to %{customdata[1]}<br>%{y:,} elements<extra></extra>",
        "marker": {"color": "var(--accent)"},
    }
    return figure(
        f"Values of {found.path}",
        f"A histogram of {found.read:,} elements in {len(pairs)} bins",
        [trace],
        {
            "bargap": 0.03,
            "xaxis": {"title": {"text": "value"}},
            "yaxis": {"title": {"text": "elements"}},
        },
        table(
            ("from", "to", "elements"), [(_number(a), _number(b), count) for a, b, count in pairs]
        ),
    )


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape: `64 x 128`; a single number is `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def _flat(node: _Node, parent: str = "") -> Iterator[_Part]:
    """Yield everything below a node; a node with a single child is merged with the child."""
    for at, child in enumerate(node.below.values()):
        label, number = child.label, f"{parent}.{at}" if parent else str(at)
        while len(child.below) == 1 and not child.about:
            (child,) = child.below.values()
            label = f"{label}.{child.label}"
        about = child.about or f"{_count(child):,} tensors"
        about = f"{about}, {size(child.nbytes)}"
        yield _Part(number, parent, label, child.nbytes, about, _is_lossy(child))
        yield from _flat(child, number)


def _tree(contents: Contents) -> _Node:
    root = _Node("")
    for one in contents.tensors:
        about = f"{one.dtype} {shape_text(one.shape)}"
        about += f", was {one.original}" if one.original else ""
        names = _PART.findall(one.path) or [one.path]
        _add(root, names, one.nbytes, about, is_lossy=one.original is not None)
    for part in contents.components:
        if part.others:
            name = f"{part.others:,} smaller tensors"
            _add(root, [*_PART.findall(part.name), name], part.other_bytes, f"of {part.name}")
    return root


def _add(
    root: _Node, names: Iterable[str], nbytes: int, about: str, *, is_lossy: bool = False
) -> None:
    node = root
    for name in names:
        node = node.below.setdefault(name, _Node(name))
        node.nbytes += nbytes
    node.about, node.is_lossy = about, is_lossy


def _count(node: _Node) -> int:
    return sum(map(_count, node.below.values())) + bool(node.about)


def _is_lossy(node: _Node) -> bool:
    """Return whether everything in a part lost precision."""
    return node.is_lossy if node.about else all(map(_is_lossy, node.below.values()))


def _number(value: float) -> str:
    return f"{value:.6g}"
