"""Two checkpoints side by side. Tensors are read where the URL asks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from holdfast.registry.comparing import (
    ComponentDiff,
    Diff,
    Distance,
    TensorDiff,
    diff,
    differing_bytes,
    distances,
)
from holdfast.registry.history import ValueDiff, compare_configs, step_ref
from holdfast.registry.loading import Checkpoint
from holdfast.registry.ui.charts import Cell, Grid, tone
from holdfast.registry.ui.pages.checkpoint import BUDGET_MIB, MOST_MIB, find_checkpoint
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, tried
from holdfast.registry.ui.source import Source
from holdfast.registry.values import Digest

#: Budget of a written page for the tensors of each run, in MiB.
_WRITTEN_MIB = 16
#: Exponents of ten that a heat map shows below its greatest value.
_DECADES = 4

#: Maximum bytes of chunks, of both checkpoints together, that one request reads.
BUDGET_BYTES = 64 * 2**20
#: Maximum rows of a table; the page counts the rest.
SHOWN = 500
#: Maximum number of layers, and of parameters of a layer, in a heat map.
LAYERS, PARAMETERS = 200, 60

_NUMBER = re.compile(r"(?:^|[/.])\d+(?=[/.]|$)")


#: Number of names that the form offers for each side.
OFFERED = 100


@dataclass(frozen=True, slots=True)
class DiffPage:
    """Page that compares two checkpoints."""

    before: str  # the given ref of the first checkpoint
    after: str  # the given ref of the second
    found: Comparison | None  # the comparison; `None` until both are named
    heat: HeatMap | None  # how far tensors moved, if the URL asks
    grid: Grid | None  # the same by layer; `None` if nothing was read
    budget_mib: int  # the budget for reading tensors
    offered: tuple[str, ...]  # refs that the form offers


def _ask(source: Source, asked: Asked) -> Shown:
    before, after = asked.text("before").strip(), asked.text("after").strip()
    budget_mib = asked.number("budget", BUDGET_MIB, least=4, most=MOST_MIB)
    troubles: list[Trouble] = []
    found = heat = None
    if before and after:
        found = tried(lambda: comparison(source, before, after), troubles)
    if found is not None and asked.text("values"):
        budget_bytes = budget_mib * 2**20
        heat = tried(lambda: heat_map(source, before, after, budget_bytes=budget_bytes), troubles)
    grid = heat_grid(heat) if heat is not None and heat.cells else None
    page = DiffPage(before, after, found, heat, grid, budget_mib, offered(source, (before, after)))
    title = "Compare two checkpoints"
    if found is not None:
        title = f"{found.before.ref} and {found.after.ref}"
    return Shown(title, page, tuple(troubles))


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:
    """Yield for each run a comparison of its best checkpoint, or else its first, and its latest."""
    for run in source.runs(runs).runs.values():
        latest = run.manifest.latest()
        first = run.manifest.best(run.manifest.monitors[0]) if run.manifest.monitors else None
        if first is None or first is latest:
            first = next(iter(run.manifest.live()), None)
        if first is not None and latest is not None and first.n != latest.n:
            yield asked_of(*(run.history.checkpoint(one.n).ref for one in (first, latest)))


def asked_of(before: str, after: str) -> Asked:
    """Return the question of a report about two checkpoints."""
    values = {"values": ["1"], "budget": [str(_WRITTEN_MIB)]}
    return Asked(query={"before": [before], "after": [after], **values})


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    ref: str
    id: Digest
    time_ms: int  # when it was saved


@dataclass(frozen=True, slots=True)
class MetricPair:
    """A metric of either checkpoint."""

    name: str
    before: float | None  # its value in the first; `None` where it has none
    after: float | None  # its value in the second

    @property
    def change(self) -> float | None:
        """The second minus the first; `None` if one is absent."""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints compared without reading tensors."""

    before: Side  # the first one
    after: Side  # the second one
    is_same: bool  # whether both are the same state
    #: Number of tensors, and their bytes, by kind of change.
    counts: tuple[tuple[str, int, int], ...]
    components: tuple[ComponentDiff, ...]  # every component of either
    tensors: tuple[TensorDiff, ...]  # the tensors that differ; the first `SHOWN`, larger ones first
    tensor_count: int  # number of tensors that differ
    values: tuple[ValueDiff, ...]  # the plain values of the states that differ; the first `SHOWN`
    value_count: int  # number of these values
    metrics: tuple[MetricPair, ...]  # the metrics of both, by name
    #: The differences of the configurations; empty for checkpoints of one run.
    configs: tuple[ValueDiff, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """How far one tensor moved."""

    path: str
    #: The part of its path up to the last number: `model/layers.3`; without a number, up to the
    #: last name.
    layer: str
    parameter: str  # the rest: `attn.weight`
    distance: Distance  # the distance of its elements


@dataclass(frozen=True, slots=True)
class HeatMap:
    """How far tensors moved, by layer and parameter."""

    tensors: tuple[Moved, ...]  # the tensors that changed and were read, in the order of the state
    layers: tuple[str, ...]  # their layers, in order; at most `LAYERS`
    parameters: tuple[str, ...]  # their parameters, in order; at most `PARAMETERS`
    #: The relative norms of the differences, by layer and parameter; `None` where no tensor was
    #: read. Tensors that did not change are 0.
    cells: tuple[tuple[float | None, ...], ...]
    hidden: int  # number of tensors beyond these layers and parameters; `tensors` has them
    read_bytes: int  # upper bound of the chunk bytes that were read, of both checkpoints
    left: int  # number of changed tensors beyond the budget
    left_bytes: int  # bytes of their different chunks, of both checkpoints


def comparison(source: Source, before: str, after: str) -> Comparison:
    """Compare two checkpoints of the registry by their manifests and records."""
    old, new = find_checkpoint(source, before), find_checkpoint(source, after)
    found = diff(old.handle, new.handle)
    differing = found.differing
    return Comparison(
        _side(old),
        _side(new),
        found.is_same,
        _counts(found),
        found.components,
        tuple(sorted(differing, key=lambda one: -one.nbytes)[:SHOWN]),
        len(differing),
        found.values[:SHOWN],
        len(found.values),
        _metrics(old, new),
        _configs(old, new),
    )


def heat_map(
    source: Source, before: str, after: str, *, budget_bytes: int = BUDGET_BYTES
) -> HeatMap:
    """Read chunks that differ, tensor by tensor until the budget is spent, and compare elements."""
    old, new = (find_checkpoint(source, ref).handle for ref in (before, after))
    tensors = diff(old, new).tensors
    changed = [one.path for one in tensors if one.kind == "changed"]
    sizes = differing_bytes(old, new, changed)
    chosen, spent, left = list[str](), 0, 0
    for path in changed:
        if spent + sizes[path] <= budget_bytes:
            chosen.append(path)
            spent += sizes[path]
        else:
            left += sizes[path]
    found = distances(old, new, chosen)
    moved = tuple(Moved(path, *split_path(path), found[path]) for path in chosen)
    same = [one.path for one in tensors if one.kind in ("same", "moved")]
    return _grid(
        moved,
        same,
        HeatMap(moved, (), (), (), 0, spent, len(changed) - len(chosen), left),
    )


def offered(source: Source, refs: Iterable[str]) -> tuple[str, ...]:
    """Return refs that may be compared: of the runs in `refs`, or else the latest of any run.

    Each open run costs one request; if none is open, the names are listed.
    """
    names = dict.fromkeys(ref.partition("/")[0] for ref in refs if "/" in ref)
    found = source.runs(list(names)).runs.values()
    if not found:
        return tuple(f"{name}/latest" for name in source.names()[-OFFERED:])
    known = []
    for run in found:
        known += [f"{run.id}/latest", *([f"{run.id}/best"] if run.manifest.monitors else [])]
        known += [f"{run.id}/{pin.ref}" for pin in run.manifest.pins if pin.kind in ("gate", "tag")]
        newest = islice(run.manifest.newest_first(), OFFERED)
        known += [f"{run.id}/{step_ref(one)}" for one in newest]
    return tuple(known)


def split_path(path: str) -> tuple[str, str]:
    """Return the layer of a tensor and its name in that layer, by the last number in its path."""
    *_, last = [None, *_NUMBER.finditer(path)]
    end = last.end() if last is not None else 0
    if not 0 < end < len(path):
        end = max(path.rfind("/"), path.rfind("."))
    return (path[:end], path[end + 1 :]) if end > 0 else ("", path)


def _grid(moved: Iterable[Moved], same: Iterable[str], found: HeatMap) -> HeatMap:
    changed = {(one.layer, one.parameter): one.distance.relative for one in moved}
    values = {split_path(path): 0.0 for path in same} | changed
    # Skip layers without a change; the others also show their unchanged tensors.
    within = {layer for layer, _ in changed}
    layers = sorted(within, key=_natural)[:LAYERS]
    names = dict.fromkeys(parameter for layer, parameter in values if layer in within)
    parameters = list(names)[:PARAMETERS]
    cells = tuple(tuple(values.get((row, name)) for name in parameters) for row in layers)
    hidden = sum(layer not in layers or parameter not in parameters for layer, parameter in changed)
    return replace(
        found, layers=tuple(layers), parameters=tuple(parameters), cells=cells, hidden=hidden
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `layers.10` after `layers.9`."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _side(checkpoint: Checkpoint) -> Side:
    return Side(checkpoint.ref, checkpoint.digest, checkpoint.handle.newest_record().time_ms)


def _counts(found: Diff) -> tuple[tuple[str, int, int], ...]:
    kinds = dict.fromkeys(one.kind for one in found.tensors)
    return tuple((kind, found.count(kind), found.nbytes(kind)) for kind in kinds)


def _metrics(old: Checkpoint, new: Checkpoint) -> tuple[MetricPair, ...]:
    before, after = old.metrics, new.metrics
    names = dict.fromkeys([*after, *before])
    return tuple(MetricPair(name, before.get(name), after.get(name)) for name in names)


def _configs(old: Checkpoint, new: Checkpoint) -> tuple[ValueDiff, ...]:
    if old.run_id == new.run_id:
        return ()
    before, after = (one.handle.log.run.created for one in (old, new))
    assert before is not None  # a run with a checkpoint was created
    assert after is not None
    return compare_configs(before.config, after.config)[:SHOWN]


def heat_grid(found: HeatMap) -> Grid:
    """Return how far tensors moved, by layer and parameter, on a logarithmic scale of colours."""
    finite = [cell for row in found.cells for cell in row if cell and math.isfinite(cell)]
    top = math.log10(max(finite)) if finite else 0.0
    bottom = min(max(math.log10(min(finite)), top - _DECADES), top - 1) if finite else -1.0

    def cell(row: str, column: str, value: float | None) -> Cell | None:
        if value is None:
            return None
        if value == 0:
            return Cell("0", f"{row} {column}: did not change")
        at = math.log10(value) if math.isfinite(value) else top
        text = f"{value:.2g}"
        return Cell(text, f"{row} {column}: {value:.6g}", tone((at - bottom) / (top - bottom)))

    rows = tuple(
        (row, tuple(cell(row, *pair) for pair in zip(found.parameters, cells, strict=True)))
        for row, cells in zip(found.layers, found.cells, strict=True)
    )
    return Grid(
        "Norm of the difference by layer",
        "The norm of the difference relative to the norm before, by layer and parameter",
        found.parameters,
        rows,
        (f"{10**bottom:.2g} and less", f"{10**top:.2g} of the norm before"),
    )


VIEW = View("diff", "Compare", "/compare", "diff.html", _ask, place="registry", parts=_parts)
