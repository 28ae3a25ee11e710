"""The runs of a registry, the newest first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice

from holdfast.registry.curation import Progress, progress_of, run_remarks
from holdfast.registry.errors import InvalidInput, NotFound, RegistryError
from holdfast.registry.face import Run
from holdfast.registry.history import step_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.saving.loop import last_heard
from holdfast.registry.spec import Monitor
from holdfast.registry.store import Store
from holdfast.registry.tables import RunChoice, damaged_fields, run_fields
from holdfast.registry.ui.pages.fields import (
    MOST_COLUMNS,
    Choices,
    Fields,
    Group,
    choices_of,
    differing,
    groups_of,
)
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, tried, trouble_of
from holdfast.registry.ui.source import FRESH_S, Opened, Source, now_ms
from holdfast.registry.upkeep import Damage

#: Rows of the first view, and of each "load more".
PAGE = 50
#: Maximum number of first commits that are read to find the newest runs, unless the user asks.
BIRTHS_UNASKED = 200
#: Points of a sparkline.
SPARK = 60
#: Labels and tags by which people mean the latest release.
_PRODUCTION = ("prod", "production")
#: Names that Holdfast gives by default begin with the time.
_DATED = re.compile(r"(\d{8}_\d{6})_[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the table."""

    name: str
    status: str = ""  # its status, `merged`, `dropped`, or `damaged`
    is_overdue: bool = False  # whether it is running but silent for too long
    phase: str | None = None
    checkpoints: int = 0  # number of kept checkpoints on its line
    step: int | None = None  # step of the latest
    progress: Progress | None = None  # how far it is; `None` without a planned end
    created_ms: int | None = None  # when it was created
    heard_ms: int | None = None  # its last sign of life
    size_bytes: int = 0  # sum of the tensors of its kept checkpoints; shared ones count in each
    metric: str | None = None  # the metric of the next three fields; `None` without one
    #: The best value among its own checkpoints: those that it inherited as a fork are apart.
    best: float | None = None
    rank: float | None = None  # a number that is lower for a better `best`
    best_ref: str = ""  # the checkpoint that has it, within the run
    best_step: int | None = None
    inherited: float | None = None  # the value of the checkpoint that it continues from, if better
    latest: float | None = None  # the value of the latest checkpoint
    spark: tuple[float, ...] = ()  # its values by checkpoint, oldest first
    commits: int = 0  # commits of its log as they are shown
    parent: str | None = None  # the run that it was forked from
    words: tuple[str, ...] = ()  # its project, labels, tags and latest release
    release: str | None = None  # the version of its latest release
    astray: tuple[str, ...] = ()  # labels and tags for production that are not the latest release
    #: In words: damage, a monitored metric that is not finite or never came.
    problems: tuple[str, ...] = ()
    reason: str | None = None  # the exception that made it `failed`, if it is known
    trouble: Trouble | None = None  # why it cannot be read
    is_pending: bool = False  # whether it is still being read
    fields: Fields = field(default_factory=dict)  # what filters and columns know of it

    @property
    def is_live(self) -> bool:
        """Whether it may still grow."""
        return self.status == "running"

    @property
    def alarms(self) -> Iterator[str]:
        """Why somebody should look at it."""
        if self.status == "failed":
            yield "failed"
        if any(one.rpartition(" is ")[2] in ("nan", "inf", "-inf") for one in self.problems):
            yield "NaN or infinite"
        if "damaged" in (self.status, *self.problems):
            yield "damaged"
        left = self.progress and self.progress.total_steps - self.progress.step
        if self.status == "interrupted" and left and left > 0:
            yield "interrupted before the last step"
        if self.is_overdue:
            yield "overdue"


@dataclass(frozen=True, slots=True)
class RunsPage:
    """Some runs of a registry, the newest first."""

    rows: tuple[RunRow, ...]  # the runs that are shown
    total: int  # runs in the registry
    matching: int  # the runs that have the words in their names and fit the filter
    undated: int  # runs of unknown age, which come last
    columns: tuple[str, ...] = ()  # fields that have a column
    choices: Choices = field(default_factory=partial(Choices, (), ()))  # fields that could have one
    groups: tuple[Group, ...] = ()  # the runs by a field, if one was asked for

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics whose best values are shown, the most frequent first."""
        found = Counter(row.metric for row in self.rows if row.metric and row.best is not None)
        return tuple(name for name, _ in found.most_common())

    @property
    def attention(self) -> Mapping[str, Sequence[str]]:
        """The runs that are shown and that somebody should look at, by the reason."""
        found: dict[str, list[str]] = {}
        for reason, name in ((one, row.name) for row in self.rows for one in row.alarms):
            found.setdefault(reason, []).append(name)
        return found


def list_runs(
    source: Source,
    *,
    count: int = PAGE,
    matching: str = "",
    where: str = "",
    only: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    group: str = "",
    reads_births: bool = False,
    within_s: float | None = None,
) -> RunsPage:
    """Return the newest runs.

    The age of a run is in its name if Holdfast chose the name; of other runs the first commit is
    read, one request each and once only, unless there are more than `BIRTHS_UNASKED` of them. If
    no columns are asked for, configurations that differ have some.
    """
    check_columns(columns or ())
    choice = RunChoice(where)  # refused before runs are read
    names = list(only) or source.names(max_age_s=0 if within_s is None else FRESH_S)
    wanted = [name for name in names if matching.lower() in name.lower()]
    ages = _ages(source, wanted, reads_births=reads_births)
    wanted = _sorted(wanted, ages)
    opened = source.runs(wanted if where else wanted[:count], within_s)
    pending, damage = set(opened.pending), Damage.of(source.registry.handle.store)
    known = read_fields(
        source.registry.handle.store, opened, [*choice.fields, *(columns or ()), group]
    )
    if where:
        known = _fitting(known, choice, is_whole=not pending)
        wanted = [name for name in wanted if name in known or name in pending]
    rows = tuple(
        replace(
            _row(name, opened.runs, opened.failed, damage, is_pending=name in pending),
            fields=known.get(name, {}),
        )
        for name in wanted[:count]
        if not isinstance(opened.failed.get(name), NotFound)  # a stray folder is no run
    )
    return RunsPage(
        rows=rows,
        total=len(names),
        matching=len(wanted),
        undated=len(set(wanted) - ages.keys()),
        columns=differing([row.fields for row in rows]) if columns is None else tuple(columns),
        choices=choices_of(row.fields for row in rows),
        groups=groups_of(_members(rows, group), group) if group else (),
    )


def columns_of(asked: Asked) -> list[str] | None:
    """Return the fields that a URL asks for as columns; `None` if it says nothing of them."""
    found = asked.texts("col")
    return [name for name in found if name] if found else None


def check_columns(columns: Sequence[str]) -> None:
    """Refuse more columns than a table can have."""
    if len(columns) > MOST_COLUMNS:
        raise InvalidInput(
            "too many columns", expected=f"at most {MOST_COLUMNS}", found=len(columns)
        )


def read_fields(store: Store, opened: Opened, wanted: Iterable[str]) -> dict[str, Fields]:
    """Return the fields of the runs that were read; extremes and owners only if they are wanted."""
    asked = set(wanted)
    read = partial(
        run_fields,
        with_owner="owner" in asked,
        with_extremes=any(name.startswith(("min.", "max.")) for name in asked),
    )
    rows = store.pools.small.map(read, [run.handle.log for run in opened.runs.values()])
    return {
        **dict(zip(opened.runs, rows, strict=True)),
        **{name: damaged_fields(name, error) for name, error in opened.failed.items()},
    }


def _fitting(
    known: Mapping[str, Fields], choice: RunChoice, *, is_whole: bool
) -> dict[str, Fields]:
    """Return the fields of the runs of a choice; more may follow while runs are being read."""
    rows = [dict(one) for one in known.values()]
    # A run that is still being read may have a field that no other one has.
    found = choice.of(rows) if is_whole else [one for one in rows if choice.fits(one)]
    return {str(one["run"]): one for one in found}


def _members(rows: Iterable[RunRow], group: str) -> Iterator[tuple[str, object, str, float, float]]:
    for row in rows:
        if row.metric is not None and row.best is not None and row.rank is not None:
            yield row.name, row.fields.get(group), row.metric, row.best, row.rank


def newest_first(source: Source, names: Sequence[str]) -> list[str]:
    """Return names of runs, the newest first; those of unknown age come last."""
    return _sorted(names, _ages(source, names, reads_births=False))


def _sorted(names: Sequence[str], ages: Mapping[str, int]) -> list[str]:
    return sorted(names, key=lambda name: (name in ages, ages.get(name, 0), name), reverse=True)


def _ages(source: Source, names: Sequence[str], *, reads_births: bool) -> dict[str, int]:
    """Return the times when runs started, in milliseconds, if known or cheap to find."""
    found = {name: time for name in names if (time := dated_by_name(name)) is not None}
    undated = [name for name in names if name not in found]
    unread = source.unread_births(undated)
    if len(unread) > BIRTHS_UNASKED and not reads_births:
        undated = [name for name in undated if name not in set(unread)]
    births = source.births(undated)
    # A run whose first commit is unreadable is damaged: it comes first, to be seen.
    return found | {
        name: now_ms() if one is None else one.created_ms for name, one in births.items()
    }


def dated_by_name(name: str) -> int | None:
    """Return the time in a name that Holdfast has given, in milliseconds; `None` for others."""
    match = _DATED.match(name)
    if match is None:
        return None
    try:
        found = datetime.strptime(match[1], "%Y%m%d_%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(found.timestamp() * 1000)


def _row(
    name: str,
    runs: Mapping[str, Run],
    failed: Mapping[str, RegistryError],
    damage: Damage,
    *,
    is_pending: bool,
) -> RunRow:
    if is_pending:
        return RunRow(name, is_pending=True)
    error = failed.get(name)
    if error is not None:
        return RunRow(name, status="damaged", trouble=trouble_of(error))
    return marked_row(row_of(runs[name].manifest), damage)


def marked_row(row: RunRow, damage: Damage) -> RunRow:
    """Return a row that shows whether anything of the run is damaged."""
    if not damage.in_run(row.name):
        return row
    return replace(row, problems=("damaged", *row.problems))


def row_of(run: RunManifest) -> RunRow:
    """Return a run as a row."""
    heard, latest = last_heard(run, now_ms()), run.latest()
    monitor, best = monitor_of(run), run.own_best()
    shared = run.best(run.monitors[0]) if run.monitors else None
    live = run.live()
    return RunRow(
        name=run.run_id,
        status="dropped" if run.dropped is not None else run.shown_status,
        is_overdue=heard.is_overdue,
        phase=run.phase,
        checkpoints=len(live),
        step=None if latest is None else latest.step,
        progress=progress_of(run),
        created_ms=run.created_ms,
        heard_ms=heard.time_ms,
        size_bytes=sum(one.size_bytes for one in live),
        metric=None if monitor is None else monitor.label,
        best=_value(monitor, best),
        rank=None if monitor is None or best is None else best.rank(monitor),
        best_ref="" if best is None else step_ref(best),
        best_step=None if best is None else best.step,
        inherited=None if shared is best else _value(monitor, shared),
        latest=_value(monitor, latest),
        problems=tuple(run_remarks(run)),
        reason=run.reason,
        # Values of different declared phases are not compared.
        spark=_spark(run.live(run.phase if run.spec.phases else None), monitor),
        commits=run.commits,
        parent=run.created.parent.run if run.created and run.created.parent else None,
        words=_words(run),
        release=run.release if run.dropped is None else None,
        astray=_astray(run) if run.dropped is None else (),
    )


def _words(run: RunManifest) -> tuple[str, ...]:
    project = (run.created.project,) if run.created and run.created.project else ()
    release = () if run.release is None else (f"releases/{run.release}",)
    return (*project, *run.labels_now, *(f"tags/{name}" for name in run.tags), *release)


def _astray(run: RunManifest) -> tuple[str, ...]:
    released = None if run.release is None else run.pin("release", run.release)
    at = None if released is None else released.checkpoint
    labels = [] if released else [f"label {one}" for one in run.labels_now if one in _PRODUCTION]
    tags = [one for one, n in run.tags.items() if one in _PRODUCTION and (n != at or not released)]
    return (*labels, *(f"tag {one}" for one in tags))


def monitor_of(run: RunManifest) -> Monitor | None:
    """Return the monitor whose values are shown: the first, or without one the first metric."""
    if run.monitors:
        return run.monitors[0]
    newest = next((one for one in islice(run.newest_first(), SPARK) if one.metrics), None)
    return None if newest is None else Monitor(metric=next(iter(newest.metrics)), mode="min")


def _value(monitor: Monitor | None, record: CheckpointRecord | None) -> float | None:
    return None if monitor is None or record is None else monitor.measured(record.metrics)


def _spark(live: Sequence[CheckpointRecord], monitor: Monitor | None) -> tuple[float, ...]:
    if monitor is None:
        return ()
    some = live[:: -(-len(live) // SPARK) or 1]  # over the whole run
    values = (
        monitor.measured(one.metrics)
        for one in (some if some[-1:] == live[-1:] else [*some, live[-1]])
    )
    return tuple(value for value in values if value is not None)


#: Rows of one table at most.
_MOST = 2000


def _ask(source: Source, asked: Asked) -> Shown:
    troubles: list[Trouble] = []
    count = asked.number("count", PAGE, least=1, most=_MOST)
    found = tried(
        lambda: list_runs(
            source,
            count=count,
            matching=asked.text("q"),
            where=asked.text("where"),
            only=asked.texts("run"),
            columns=columns_of(asked),
            group=asked.text("group"),
            reads_births=asked.text("dates") == "all",
            within_s=asked.within_s,
        ),
        troubles,
    ) or RunsPage((), total=len(source.names(max_age_s=FRESH_S)), matching=0, undated=0)
    return Shown(
        title="Runs",
        body=found,
        troubles=tuple(troubles),
        live={row.name: row.commits for row in found.rows if row.is_live},
        is_partial=any(row.is_pending for row in found.rows),
    )


VIEW = View("runs", "Runs", "/", "runs.html", _ask, place="registry")
