"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.registry.ui.queries.side_by_side import compare_runs
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View


def _ask(source: Source, asked: Asked) -> Shown:
    found = compare_runs(
        source, asked.texts("run"), metric=asked.text("metric"), within_s=asked.within_s
    )
    return Shown(
        title="Runs side by side",
        body=found,
        troubles=found.troubles,
        live={row.name: row.commits for row in found.rows if row.is_live},
        is_partial=found.pending > 0,
    )


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return [Asked(query={"run": runs})] if len(runs) > 1 else ()


VIEW = View(
    "side_by_side", "Side by side", "/compare-runs", "side_by_side.html", _ask, parts=_parts
)
