"""A view: a path, a template, and the query behind it; and the troubles that its answer shows.

Also the metrics of checkpoints: of kept ones from their run, of evicted ones from its log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from holdfast.registry.errors import InvalidInput, RegistryError, StoreUnavailable
from holdfast.registry.history import actions
from holdfast.registry.history.actions import CheckpointFields, Commit
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.ui.charts import Curve, Point
from holdfast.registry.ui.source import Source

#: Charts of metrics on one page.
MOST_CHARTS = 24


def saved_of(run: RunManifest | None, commits: Iterable[Commit]) -> tuple[CheckpointRecord, ...]:
    """Return the kept checkpoints of a run, and the checkpoints that commits of its log added."""
    kept = {} if run is None else {one.n: one for one in run.checkpoints}
    found = _told(commits) | kept
    return tuple(found[n] for n in sorted(found))


def _told(commits: Iterable[Commit]) -> dict[int, CheckpointRecord]:
    """Return the checkpoints that commits added, with what the pages show of later commits."""
    found: dict[int, CheckpointRecord] = {}
    for commit in commits:
        for action in commit.actions:
            match action:
                case actions.AddCheckpoint():
                    given = action.shared(CheckpointFields)
                    found[commit.n] = CheckpointRecord.unchecked(
                        **given, n=commit.n, time_ms=commit.time_ms
                    )
                case actions.ReportMetrics() if action.checkpoint in found:
                    one = found[action.checkpoint]
                    found[one.n] = one.changed(metrics={**one.metrics, **action.metrics})
                case actions.Rewind():
                    since = -1 if action.to is None else action.to
                    for one in list(found.values()):
                        if one.n > since:
                            found[one.n] = one.changed(superseded=True)
    return found


def metric_names(
    saved: Sequence[CheckpointRecord], first: Iterable[str] = (), *, matching: str = ""
) -> tuple[str, ...]:
    """Return the names of metrics that any checkpoint has."""
    known = {name for one in saved for name in one.metrics if matching.lower() in name.lower()}
    ahead = [name for name in first if name in known]
    return tuple(dict.fromkeys([*ahead, *sorted(known)]))


def curves_of(
    saved: Sequence[CheckpointRecord], metric: str, *, prefix: str = ""
) -> tuple[Curve, ...]:
    """Return the curves of a metric: one for each phase, superseded values apart."""
    found: dict[tuple[str, bool], list[Point]] = {}
    for one in saved:
        if metric in one.metrics:
            point = Point(one.step, one.time_ms, one.metrics[metric])
            found.setdefault((one.phase, one.superseded), []).append(point)
    phases = {phase for phase, _ in found}
    return tuple(
        Curve(
            _name(prefix, phase, len(phases), is_superseded=behind), tuple(points), behind, prefix
        )
        for (phase, behind), points in found.items()
    )


def _name(prefix: str, phase: str, phases: int, *, is_superseded: bool) -> str:
    own = prefix if prefix and phases == 1 else f"{prefix} {phase}".strip()
    return f"{own}, superseded" if is_superseded else own


#: Seconds that a view waits for runs; the others come with a later poll.
PATIENCE_S = 0.4
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Asked:
    """Path, query and time limit that a URL asks for."""

    #: The parts of its path, by the names in the path of the view.
    path: Mapping[str, str] = field(default_factory=dict)
    #: The values of its query, by name.
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Seconds after which a view may answer in part. Default: it answers in full.
    within_s: float | None = None

    def text(self, name: str, default: str = "") -> str:
        """Return a value of the path or the query; the last one of several."""
        if name in self.path:
            return self.path[name]
        return self.query[name][-1] if self.query.get(name) else default

    def texts(self, name: str) -> tuple[str, ...]:
        """Return every value of the query of this name, each once."""
        return tuple(dict.fromkeys(self.query.get(name, ())))

    def number(self, name: str, default: int, *, least: int = 0, most: int = 1_000_000) -> int:
        """Return a whole number of the query."""
        text = self.text(name)
        if not text:
            return default
        if not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
            raise InvalidInput(
                "not a number for this page",
                where=name,
                expected=f"{least} to {most}",
                found=repr(text[:40]),
            )
        return int(text)


@dataclass(frozen=True, slots=True)
class Shown:
    """The answer of a view."""

    title: str  # the heading and title of the page
    body: Any  # the answer of its query, for the template
    troubles: tuple[Trouble, ...] = ()  # parts that could not be read
    #: The runs that may grow, each with the number of commits that are shown.
    live: Mapping[str, int] = field(default_factory=dict)
    is_partial: bool = False  # whether runs are still being read: the page asks again at once
    run: str | None = None  # its run, to whose other views it links


def _none(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class View:
    """A view of a registry."""

    name: str  # its name in links
    label: str  # its name in the navigation
    #: Its path, with `{name}` for parts and `{name:path}` for a part that may have slashes.
    path: str
    template: str  # the file in `templates/`
    #: Returns the answer. Its errors become a page that shows them.
    ask: Callable[[Source, Asked], Shown]
    #: Its place in the navigation: among the views of the registry, of a run, or nowhere.
    place: Literal["registry", "run"] | None = None
    #: Returns the arguments of this view's parts in a written page about some runs.
    parts: Callable[[Source, Sequence[str]], Iterable[Asked]] = _none


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that could not be read, for the page to show."""

    what: str  # the problem, with its place
    hint: str | None  # the next step; `None` if there is none


def trouble_of(error: RegistryError) -> Trouble:
    """Return an error for a page."""
    return Trouble(error.summary, error.cli_hint)


def tried(read: Callable[[], _T], troubles: list[Trouble]) -> _T | None:
    """Call a function that reads. If reading fails, note the trouble and return `None`."""
    try:
        return read()
    except StoreUnavailable:
        raise
    except RegistryError as error:
        troubles.append(trouble_of(error))
        return None
