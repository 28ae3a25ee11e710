"""The runs of a registry, the newest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.registry.ui.queries.runs import PAGE, list_runs
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View

#: Rows of one table at most.
_MOST = 2000


def _ask(source: Source, asked: Asked) -> Shown:
    found = list_runs(
        source,
        count=asked.number("count", PAGE, least=1, most=_MOST),
        matching=asked.text("q"),
        only=asked.texts("run"),
        reads_births=asked.text("dates") == "all",
        within_s=asked.within_s,
    )
    return Shown(
        title="Runs",
        body=found,
        live={row.name: row.commits for row in found.rows if row.is_live},
        is_partial=any(row.is_pending for row in found.rows),
    )


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return [Asked(query={"run": runs})] if len(runs) > 1 else ()


VIEW = View("runs", "Runs", "/", "runs.html", _ask, place="registry", parts=_parts)
