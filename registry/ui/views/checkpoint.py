"""One checkpoint, release, artifact or entry of a pool. Tensors are read where the URL asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.registry.comparing.histograms import Histogram
from holdfast.registry.comparing.stats import TensorStats
from holdfast.registry.ui.charts import Chart
from holdfast.registry.ui.queries.checkpoint import StateView, state_view
from holdfast.registry.ui.queries.sharing import Sharing, sharing
from holdfast.registry.ui.queries.tensor_charts import histogram_chart, treemap
from holdfast.registry.ui.queries.tensor_values import Statistics, distribution, statistics
from holdfast.registry.ui.queries.trouble import tried
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View

#: MiB of tensors that a page reads at most, where it reads any, and what a URL may ask for.
BUDGET_MIB, MOST_MIB = 64, 1024


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """What the page of a stored state shows.

    Attributes:
        state: The state.
        treemap: Its tensors by bytes; `None` if its manifest is damaged.
        statistics: The statistics of its tensors, where they were asked for.
        by_path: The same by path.
        histogram: The histogram of the tensor that was asked for.
        values: The same as a chart; `None` if no element is finite.
        sharing: What it shares with its neighbours, where that was asked for.
        budget_mib: The budget for reading tensors.
    """

    state: StateView
    treemap: Chart | None
    statistics: Statistics | None
    by_path: Mapping[str, TensorStats]
    histogram: Histogram | None
    values: Chart | None
    sharing: Sharing | None
    budget_mib: int


def _ask(source: Source, asked: Asked) -> Shown:
    ref, path = asked.text("ref"), asked.text("tensor")
    budget_mib = asked.number("budget", BUDGET_MIB, least=4, most=MOST_MIB)
    budget_bytes = budget_mib * 2**20
    state = state_view(source, ref)
    troubles = list(state.troubles)
    is_whole = state.contents is not None
    found = read = shared = None
    if is_whole and asked.text("stats"):
        found = tried(lambda: statistics(source, ref, budget_bytes=budget_bytes), troubles)
    if is_whole and path:
        read = tried(lambda: distribution(source, ref, path, budget_bytes=budget_bytes), troubles)
    if is_whole and asked.text("shared"):
        shared = tried(lambda: sharing(source, ref), troubles)
    page = CheckpointPage(
        state,
        None if state.contents is None else treemap(state.contents),
        found,
        {} if found is None else {one.path: one for one in found.tensors},
        read,
        histogram_chart(read) if read is not None and read.counts else None,
        shared,
        budget_mib,
    )
    return Shown(state.ref, page, tuple(troubles), run=state.run)


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:
    for run in source.runs(runs).runs.values():
        latest = run.manifest.latest()
        best = run.manifest.best(run.manifest.monitors[0]) if run.manifest.monitors else None
        for record in {one.n: one for one in (best, latest) if one is not None}.values():
            yield Asked(path={"ref": run.find(record.n).ref})


VIEW = View(
    "checkpoint", "Checkpoint", "/checkpoints/{ref:path}", "checkpoint.html", _ask, parts=_parts
)
