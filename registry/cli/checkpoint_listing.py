"""`ls`: the checkpoints of runs, and what else a run holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, Table, metrics, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.listing import Listing, log_of, sparkline, there
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import argument, flag
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.errors import NotFound, RegistryError
from holdfast.registry.face import Registry
from holdfast.registry.history import RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.upkeep import Damage

if TYPE_CHECKING:
    from holdfast.registry.face import Run

_LS = (
    Column("phase", none="-"),
    *numbers("step", none="-"),
    Column("id", text=describe.short, none="-", drop=6),
    *numbers("size=size_bytes", text=output.size, none="-", drop=7),
    metrics(drop=8),
    *numbers("age=created", text=describe.age, none="-", drop=5),
    Column("marks", text=", ".join, folds=True),
)
_TRENDS = (
    Column("run"),
    Column("metric"),
    Column("trend", text=sparkline, is_picture=True),
    *numbers("first", "last", text=output.number, drop=1),
)
#: The most trends below a list of checkpoints.
_MOST_TRENDS = 12


@command(reads, table=True)
def ls(
    opened: Registry,
    *,
    run: str | None = argument(
        "RUN[/KIND]",
        "Only this run: its checkpoints, or its KIND: pins (tags, gates, releases and artifacts), "
        "one of these four, pool or streams; '*/best': the best of each run, the best first.",
        envvar="HOLDFAST_RUN",
        autocompletion=completing.RUNS,
        default=None,
    ),
    evicted: bool = flag("--evicted", "Also evicted checkpoints, or entries of the pool."),
    names: bool = flag("--names", "The latest release, tags and labels: who set them, and when."),
) -> Answer:
    """List checkpoints, newest last, or what else a run holds.

    With --names also of all runs: the latest release is what is in production.
    """
    if names:
        from holdfast.registry.cli import pins

        listing = Listing(opened)
        return pins.named(listing, [opened.run(run)] if run else listing.runs())
    if run is not None:
        run, slash, kind = run.partition("/")
        if kind == "best" and options.is_pattern(run):
            from holdfast.registry.cli.run_listing import bests

            return bests(opened, run)
        if slash:
            return _of_kind(opened.run(run), kind, evicted=evicted)
        one = log_of(opened, run)
        return Answer(
            lambda: _records(opened, one, evicted=evicted),
            lambda: _text([one.run], {run: _records(opened, one, evicted=evicted)}, {}, _LS),
        )
    listing = Listing(opened)
    runs = listing.runs()

    def described() -> dict[str, list[dict[str, Any]]]:
        return listing.described(
            runs, lambda run: _records(opened, run.handle.log, evicted=evicted)
        )

    return Answer(
        lambda: [record for records in described().values() for record in records],
        lambda: _text(
            [one.manifest for one in runs], described(), listing.damaged, (Column("run"), *_LS)
        ),
        damaged=listing.damaged,
    )


def _of_kind(run: Run, kind: str, *, evicted: bool) -> Answer:
    from holdfast.registry.cli import pins, pool, streams

    match kind:
        case "pool":
            return pool.listing(run, evicted=evicted)
        case "streams":
            return streams.listing(run)
        case "pins" | "tags" | "gates" | "releases" | "artifacts":
            return pins.listing(run, kind)
    raise NotFound(
        "a run has no such list",
        where=f"{run.id}/{kind}",
        expected=f"pins, {', '.join(pins.KINDS)}, pool or streams",
        hint=f"`holdfast show {run.id}/{kind}` shows a checkpoint or what a pin keeps.",
    )


def _records(opened: Registry, log: RunLog, *, evicted: bool) -> list[dict[str, Any]]:
    run, name = log.history() if evicted else log.run, log.run_id
    marks, is_dropped = checkpoint_marks(run), run.dropped is not None
    damage = Damage.of(opened.handle.store)
    return [
        describe.record_json(name, record, [*marks.get(record.n, []), *damage.marks(name, record)])
        for record in run.checkpoints
        if evicted or not (is_dropped or record.evicted is not None)
    ]


def _text(
    runs: Sequence[RunManifest],
    described: Mapping[str, list[dict[str, Any]]],
    damaged: Mapping[str, RegistryError],
    columns: Sequence[Column],
) -> Iterator[Part]:
    """Return the checkpoints of runs, their trends, and how many are not shown."""
    unreadable = {name: [{"run": name, "marks": [mark(error)]}] for name, error in damaged.items()}
    rows = [row for _, some in sorted({**described, **unreadable}.items()) for row in some]
    runs = [run for run in runs if run.run_id in described]
    monitored = {run.run_id: describe.monitored(run) for run in runs}
    hidden = sum(run.count for run in runs) - sum(map(len, described.values()))
    first = list(dict.fromkeys(name for names in monitored.values() for name in names))
    none = "no checkpoints" if hidden else "no checkpoints yet"
    yield Table(columns, rows, none=none, first=first)
    if output.is_terminal():
        yield from _trends(described, monitored)
    if hidden:
        count = output.counted(hidden, "evicted checkpoint")
        yield Note(f"{count} not shown; --evicted shows them")


def _trends(
    described: Mapping[str, list[dict[str, Any]]], monitored: Mapping[str, list[str]]
) -> Iterator[Part]:
    """Return how each metric of one run changed, or of several each metric that decides best."""
    is_one = len(described) == 1
    rows = []
    for run, records in described.items():
        names = dict.fromkeys(name for one in records for name in one["metrics"])
        for name in names if is_one else monitored[run]:
            values = there(one["metrics"].get(name) for one in records)
            if len(values) > 1:
                ends = {"first": values[0], "last": values[-1]}
                rows.append({"run": run, "metric": name, "trend": values, **ends})
    if rows:
        yield ""
        yield Table(_TRENDS[is_one:], rows[:_MOST_TRENDS], is_main=False)
        if len(rows) > _MOST_TRENDS:
            yield f"... and {len(rows) - _MOST_TRENDS:,} more"
