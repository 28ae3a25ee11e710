"""The descent of runs: of the newest ones, or of one run with its ancestors and descendants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.registry.errors import NotFound
from holdfast.registry.ui.queries.lineage import read_lineage
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View


def _ask(source: Source, asked: Asked) -> Shown:
    return _shown(source, asked, "Lineage", asked.texts("run"))


def _of_run(source: Source, asked: Asked) -> Shown:
    name = asked.text("run")
    if name not in source.names():
        raise NotFound("no such run", where=name)
    return _shown(source, asked, name, [name], run=name)


def _shown(
    source: Source, asked: Asked, title: str, runs: Sequence[str], run: str | None = None
) -> Shown:
    reads_births = asked.text("all") == "1"
    found = read_lineage(source, runs, reads_births=reads_births, within_s=asked.within_s)
    return Shown(title, found, troubles=found.troubles, is_partial=found.pending > 0, run=run)


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return [Asked(query={"run": runs})]


VIEW = View("lineage", "Lineage", "/lineage", "lineage.html", _ask, place="registry", parts=_parts)
OF_RUN = View("run_lineage", "Lineage", "/runs/{run}/lineage", "lineage.html", _of_run, place="run")
