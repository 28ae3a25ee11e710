"""The pool of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.registry.ui.charts import Chart
from holdfast.registry.ui.grids import Grid
from holdfast.registry.ui.queries.pool import PoolView, pool_view
from holdfast.registry.ui.queries.pool_charts import ladder_chart, matches_grid, ratings_chart
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View


@dataclass(frozen=True, slots=True)
class PoolPage:
    """What the page of a pool shows.

    Attributes:
        pool: The pool.
        ladder: Skill by version; `None` if nobody plays.
        ratings: Ratings over time; `None` if none were read.
        matches: Who won against whom; `None` if no match was read.
    """

    pool: PoolView
    ladder: Chart | None
    ratings: Chart | None
    matches: Grid | None


def _ask(source: Source, asked: Asked) -> Shown:
    name = asked.text("run")
    pool = pool_view(source, name, everything=asked.text("slots") == "all")
    page = PoolPage(
        pool,
        ladder_chart(pool.ladder) if pool.ladder else None,
        ratings_chart(pool.ratings) if pool.ratings else None,
        matches_grid(pool.matches) if pool.matches.count else None,
    )
    return Shown(name, page, live={name: pool.commits} if pool.is_live else {}, run=name)


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:
    for name, run in source.runs(runs).runs.items():
        if run.manifest.next_version > 1:
            yield Asked(path={"run": name})


VIEW = View("pool", "Pool", "/runs/{run}/pool", "pool.html", _ask, place="run", parts=_parts)
