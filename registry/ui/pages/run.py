"""One run: its time line, its curves, its checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.registry.curation import names_of
from holdfast.registry.errors import IntegrityError, UnsupportedFormat
from holdfast.registry.face import Run
from holdfast.registry.history import (
    actions,
    decode_or_keep,
    format_time,
    hold_in_words,
    hold_ref,
    merged_from,
    parent_ref,
    step_ref,
)
from holdfast.registry.history.replay import (
    CheckpointRecord,
    Note,
    RunManifest,
)
from holdfast.registry.saving.loop import waited_share
from holdfast.registry.ui.charts import Chart, Mark, Point, curves
from holdfast.registry.ui.pages.events import MAX_AGE_S, Event, Fork, read_events, read_forks
from holdfast.registry.ui.pages.runs import RunRow, marked_row, row_of
from holdfast.registry.ui.pages.streams import StreamShown, read_streams
from holdfast.registry.ui.pages.timeline import CheckpointRow, read_rows, timeline
from holdfast.registry.ui.pages.view import (
    MOST_CHARTS,
    Asked,
    Shown,
    Trouble,
    View,
    curves_of,
    metric_names,
    saved_of,
    trouble_of,
)
from holdfast.registry.ui.source import Chronicle, Source
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import number

#: Headings of names.
_NAMED = {"release": "in production", "tag": "tag", "label": "label"}


@dataclass(frozen=True, slots=True)
class NoteShown:
    """A note."""

    ref: str  # its checkpoint within the run; empty for the whole run
    is_kept: bool  # whether the checkpoint is kept; true for the whole run
    note: Note


@dataclass(frozen=True, slots=True)
class RunShown:
    """A run."""

    row: RunRow | None  # its summary; `None` if the run cannot be read
    #: Names and values of its settings, in the order in which they are shown.
    facts: tuple[tuple[str, str], ...]
    forks: tuple[Fork, ...]  # the known forks of it
    events: tuple[Event, ...]  # what happened, the newest first
    checkpoints: tuple[CheckpointRow, ...]  # its checkpoints, the newest first
    timeline: Chart | None  # the events by time; `None` without any
    #: A chart for each metric with several values, the monitored ones first; at most `MOST_CHARTS`.
    charts: tuple[Chart, ...]
    metrics: int  # how many metrics have several values
    #: Metrics with one value, each with it and the checkpoint that has it.
    single: tuple[tuple[str, float, str], ...]
    streams: tuple[StreamShown, ...]
    config: object
    environment: Mapping[str, str]  # the environment in which it started
    first_commit: int  # number of the first commit whose events are shown
    pending: int  # how many older slots of its log are still being read
    waited: float | None  # share of the time in which training waited for saves, 0 to 1
    troubles: tuple[Trouble, ...]  # parts that could not be read
    notes: tuple[NoteShown, ...] = ()  # the notes, oldest first
    tags: tuple[str, ...] = ()  # the names of its tags
    labels: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()  # the metrics that end with NaN or infinity, in words
    merged: tuple[str, ...] = ()  # the sources of its latest checkpoint, if that is a merge
    damaged: tuple[str, ...] = ()  # the damaged checkpoints that this machine knows of
    dropped: str = ""  # until when the run can be brought back, if it was dropped

    @property
    def own_note(self) -> str:
        """The note on the whole run; empty without one."""
        return next((one.note.text for one in self.notes if not one.ref), "")


def show_run(
    source: Source,
    name: str,
    *,
    streams: Sequence[str] = (),
    metric: str = "",
    within_s: float | None = None,
) -> RunShown:
    """Return a run: the requests of opening it, and one for each slot of its log, once.

    And one listing, with the first commits of runs that may be its forks. Kept checkpoints and
    their metrics need no slots.
    """
    names = source.begin(lambda: source.names(max_age_s=MAX_AGE_S))
    run, troubles = _open(source, name)
    manifest = None if run is None else run.manifest
    latest, created = (manifest.latest(), manifest.created) if manifest else (None, None)
    meta = decode_or_keep(latest.meta) if latest else None
    source.begin_chronicle(name)
    shown = () if run is None else tuple(read_streams(run, streams, source.pictures))
    forks = read_forks(source, name, names.result())
    chronicle = source.chronicle(name, within_s=within_s)
    troubles.extend(trouble_of(error) for error in chronicle.errors)
    saved = saved_of(manifest, chronicle.commits)
    events = tuple(read_events(chronicle.commits, forks))
    damage = Damage.of(source.registry.handle.store)
    rows = tuple(read_rows(saved, events, manifest, damage))
    counts = Counter(name for one in saved for name in one.metrics)
    return RunShown(
        row=None if manifest is None else marked_row(row_of(manifest), damage),
        facts=() if run is None else tuple(_facts(run, chronicle)),
        forks=forks,
        events=events[::-1],
        checkpoints=rows[::-1],
        timeline=timeline(events, rows) if events or rows else None,
        charts=tuple(_charts(saved, rows, manifest, metric, counts)),
        metrics=sum(count > 1 for count in counts.values()),
        single=tuple(_single(rows, counts)),
        streams=shown,
        config=decode_or_keep(manifest.config) if manifest and created else None,
        environment=created.environment if created else {},
        first_commit=chronicle.commits[0].n if chronicle.commits else 0,
        pending=chronicle.pending,
        waited=waited_share(meta),
        troubles=_distinct(troubles, chronicle),
        notes=() if manifest is None else tuple(_notes(manifest)),
        tags=() if manifest is None else tuple(sorted(manifest.tags)),
        labels=() if manifest is None else manifest.labels_now,
        losses=tuple(_losses(saved)),
        merged=tuple(merged_from(meta)),
        damaged=tuple(damage.in_run(name)),
        dropped=_back_until(source, manifest, chronicle)
        if manifest is not None and manifest.dropped is not None
        else "",
    )


def _open(source: Source, name: str) -> tuple[Run | None, list[Trouble]]:
    try:
        return source.run(name), []
    except (IntegrityError, UnsupportedFormat) as error:
        return None, [trouble_of(error)]


def _distinct(troubles: Iterable[Trouble], chronicle: Chronicle) -> tuple[Trouble, ...]:
    found = list(dict.fromkeys(troubles))
    if chronicle.first_slot and not chronicle.pending:
        text = f"only the newest {len(chronicle.commits):,} commits were read for events"
        found.append(Trouble(text, None))
    return tuple(found)


def _charts(
    saved: Sequence[CheckpointRecord],
    rows: Sequence[CheckpointRow],
    run: RunManifest | None,
    wanted: str,
    counts: Mapping[str, int],
) -> Iterable[Chart]:
    first = [need for monitor in run.monitors for need in monitor.needs] if run else []
    counter = "step" if run is None else run.spec.phase(run.phase or "").counter
    began = {} if run is None else {"": run.created_ms}
    names = [one for one in metric_names(saved, first, matching=wanted) if counts[one] > 1]
    for metric in names[:MOST_CHARTS]:
        found = curves_of(saved, metric)
        if len(found) == 1:
            found = (replace(found[0], name=metric),)
        best = None if run is None else _best(run, metric)
        marks = tuple(_marks(rows, metric))
        if run is None or best is None:
            extremes = tuple(_extremes(saved, metric))
        else:
            value, label = best.metrics[metric], "best"
            if not any(run.best(one) is best for one in run.monitors):
                label = "own best"  # one that the run inherited is better
            marks = (Mark("best", label, Point(best.step, best.time_ms, value)), *marks)
            extremes = ((label, value, best.step, f"{run.run_id}/{step_ref(best)}"),)
        chart = curves(metric, found, marks, counter=counter, began_ms=began)
        yield replace(chart, extremes=extremes)


def _best(run: RunManifest, metric: str) -> CheckpointRecord | None:
    """Return the best checkpoint by a metric, if that is monitored."""
    monitor = next((one for one in run.monitors if one.metric == metric), None)
    return None if monitor is None else run.own_best(monitor)


def _extremes(
    saved: Sequence[CheckpointRecord], metric: str
) -> Iterator[tuple[str, float, int, str]]:
    """Yield the lowest and the highest value of a metric that nothing monitors."""
    known = [
        one
        for one in saved
        if not one.superseded and math.isfinite(one.metrics.get(metric, math.nan))
    ]
    for name, pick in (("lowest", min), ("highest", max)) if known else ():
        one = pick(known, key=lambda one: one.metrics[metric])
        yield name, one.metrics[metric], one.step, ""


def _losses(saved: Sequence[CheckpointRecord]) -> Iterator[str]:
    """Yield, for each metric that ends with NaN or infinity, since when, and what it was before."""
    line = [one for one in saved if not one.superseded]
    for metric in metric_names(line):
        points = [(one.step, one.metrics[metric]) for one in line if metric in one.metrics]
        finite = [at for at, (_, value) in enumerate(points) if math.isfinite(value)]
        if finite and finite[-1] == len(points) - 1:
            continue
        step, value = points[finite[-1] + 1 if finite else 0]
        before = "it has never been finite"
        if finite:
            last, known = points[finite[-1]]
            before = f"before that it was {number(known)} at step {last:,}"
        yield f"{metric} is {number(value)} since step {step:,}; {before}"


def _single(
    rows: Iterable[CheckpointRow], counts: Mapping[str, int]
) -> Iterable[tuple[str, float, str]]:
    for row in rows:
        for name, value in row.saved.metrics.items():
            if counts[name] == 1:
                yield name, value, row.ref


def _marks(rows: Iterable[CheckpointRow], metric: str) -> Iterable[Mark]:
    for row in rows:
        if metric not in row.saved.metrics:
            continue
        point = Point(row.saved.step, row.saved.time_ms, row.saved.metrics[metric])
        for name in row.marks:
            if name.startswith(("gates/", "releases/")):
                yield Mark("gate" if name.startswith("gates/") else "release", name, point)


def _facts(opened: Run, chronicle: Chronicle) -> Iterable[tuple[str, str]]:
    run = opened.manifest
    created, writer = run.created, run.writer
    named = created.owner if created else None
    # The user who put commit 0 is looked for once that was read: the page waits for no request.
    yield "owner", (named if chronicle.first_slot else opened.handle.log.owner()) or ""
    yield "project", (created and created.project) or ""
    for one in names_of(run, chronicle.commits[::-1]).found:
        by = f", by {one.author} since {format_time(one.time_ms)}" if one.time_ms else ""
        yield _NAMED[one.kind], f"{one.name}{by}"
    yield "preset", run.spec.name
    yield "monitors", ", ".join(f"{one.label} ({one.mode})" for one in run.monitors)
    yield "master seed", f"0x{created.seed}" if created else ""
    if created is not None and created.parent is not None:
        parent = created.parent
        yield "forked from", parent_ref(parent)
    yield "trainer", writer.host if writer else ""
    yield "releases", ", ".join(pin.name for pin in run.pins_of("release"))
    yield "gates", ", ".join(pin.name for pin in run.pins_of("gate"))
    yield "artifacts", ", ".join(pin.name for pin in run.pins_of("artifact"))
    yield "held", "; ".join(f"{hold_ref(run, one)} {hold_in_words(one)}" for one in run.holds or ())
    yield "evicted", f"{run.evicted_count:,}" if run.evicted_count else ""
    yield "superseded", f"{run.superseded_count:,}" if run.superseded_count else ""
    yield "dropped", run.dropped or ""


def _notes(run: RunManifest) -> Iterator[NoteShown]:
    for note in run.notes or ():
        record = None if note.checkpoint is None else run.by_n.get(note.checkpoint)
        gone = "" if note.checkpoint is None else f"an evicted one, commit {note.checkpoint}"
        is_kept = note.checkpoint is None or record is not None
        yield NoteShown(gone if record is None else step_ref(record), is_kept, note)


def _back_until(source: Source, run: RunManifest, chronicle: Chronicle) -> str:
    """Return until when a dropped run can be brought back, for its page."""
    hidden = [
        commit.time_ms
        for commit in chronicle.commits
        if any(isinstance(action, actions.HideRun) for action in commit.actions)
    ]
    if not run.is_hidden:
        return (
            f"It was freed: `holdfast undo {run.run_id} --from MIRROR` brings it back "
            "from a mirror that has it."
        )
    if not hidden:
        return f"Until a collection frees it, `holdfast undo {run.run_id}` brings it back."
    until = hidden[-1] + int(1000 * source.registry.drop_rules().delay_s)
    return (
        f"Until {format_time(until)} no collection frees it, and "
        f"`holdfast undo {run.run_id}` brings it back."
    )


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
