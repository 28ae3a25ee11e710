"""Two checkpoints side by side. Tensors are read where the URL asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.registry.ui.grids import Grid
from holdfast.registry.ui.pages.checkpoint import BUDGET_MIB, MOST_MIB
from holdfast.registry.ui.pages.compare import (
    Comparison,
    HeatMap,
    comparison,
    heat_map,
    offered,
)
from holdfast.registry.ui.pages.tensor_charts import heat_grid
from holdfast.registry.ui.pages.trouble import Trouble, tried
from holdfast.registry.ui.pages.view import Asked, Shown, View
from holdfast.registry.ui.source import Source

#: Budget of a written page for the tensors of each run, in MiB.
_WRITTEN_MIB = 16


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
    """Yield for each run a comparison of its first kept checkpoint and its latest."""
    for run in source.runs(runs).runs.values():
        first, latest = next(iter(run.manifest.live()), None), run.manifest.latest()
        if first is not None and latest is not None and first.n != latest.n:
            refs = {"before": [run.find(first.n).ref], "after": [run.find(latest.n).ref]}
            yield Asked(query={**refs, "values": ["1"], "budget": [str(_WRITTEN_MIB)]})


VIEW = View("diff", "Compare", "/compare", "diff.html", _ask, place="registry", parts=_parts)
