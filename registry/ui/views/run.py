"""One run: its time line, its curves, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.registry.ui.queries.run import show_run
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View


def _ask(source: Source, asked: Asked) -> Shown:
    name = asked.text("run")
    found = show_run(
        source,
        name,
        streams=asked.texts("stream"),
        metric=asked.text("metric"),
        within_s=asked.within_s,
    )
    row = found.row
    return Shown(
        title=name,
        body=found,
        troubles=found.troubles,
        live={name: row.commits} if row is not None and row.is_live else {},
        is_partial=found.pending > 0,
        run=name,
    )


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return (Asked(path={"run": name}) for name in runs)


VIEW = View("run", "Overview", "/runs/{run}", "run.html", _ask, place="run", parts=_parts)
