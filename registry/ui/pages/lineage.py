"""The descent of runs: of the newest ones, or of one run with its ancestors and descendants."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.errors import NotFound
from holdfast.registry.history import MERGE, decode_or_keep, step_ref
from holdfast.registry.history.replay import CheckpointRecord, PhaseRecord, RunManifest
from holdfast.registry.ui.pages.runs import BIRTHS_UNASKED, newest_first
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, trouble_of
from holdfast.registry.ui.source import FRESH_S, Source

#: Maximum number of runs in one graph.
MOST_RUNS = 50
#: The order of events that have the same time.
_AT_ONCE = {"begin": 0, "fork": 0, "latest": 2}
#: Maximum rows of one run for its gates, and for its releases.
_MOST_PINS = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that another object was made from."""

    run: str
    ref: str  # its name within the run


@dataclass(frozen=True, slots=True)
class LineageRow:
    """An event of the graph."""

    run: str  # the run that it belongs to
    time_ms: int  # when it happened
    #: `begin`, `fork`, `merge`, `transition`, `pivot`, `warm start`, `gate`, `release`, `latest` or
    #: `drop`.
    kind: str
    subject: str = ""  # its name
    ref: str = ""  # name of its checkpoint within the run
    origins: tuple[Origin, ...] = ()  # the checkpoints that it was made from
    companions: tuple[str, ...] = ()  # names of the states that were frozen or saved with it


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row with its place in the graph."""

    row: LineageRow
    lane: int  # the lane of its run, from 0
    above: tuple[int, ...]  # lanes that continue above it
    below: tuple[int, ...]  # lanes that continue below it
    edges: tuple[int, ...]  # lanes below it, to which its edges lead


@dataclass(frozen=True, slots=True)
class Lineage:
    """The graph."""

    rows: tuple[Drawn, ...]  # its rows, the newest first
    lanes: int  # how many lanes it has
    runs: tuple[str, ...]
    alone: int  # runs that were read and are not in it: none was made from them, nor they from one
    others: int  # further runs of the registry that are not in it
    pending: int  # runs of it that are still being read
    #: Runs whose first commits were not read: a fork of a run in the graph may be among them.
    unread: int
    troubles: tuple[Trouble, ...]  # what could not be read


def read_lineage(
    source: Source,
    wanted: Sequence[str] = (),
    *,
    reads_all: bool = False,
    within_s: float | None = None,
) -> Lineage:
    """Return the graph of some runs, their ancestors and descendants, and the sources of merges.

    Of more than one run, those without a relation are left out.

    One listing; opening each run of the graph; and the first commit of each other run, one request
    each and once only, unless there are more than `BIRTHS_UNASKED` unread ones. For one run all
    runs are opened, if they are at most `MOST_RUNS`: a merge does not begin with its sources.
    """
    until = None if within_s is None else time.monotonic() + within_s
    names = source.names(max_age_s=0 if within_s is None else FRESH_S)
    chosen = (list(wanted) or newest_first(source, names))[:MOST_RUNS]
    is_searched = len(wanted) == 1 and (len(names) <= MOST_RUNS or reads_all)
    first = source.runs(names if is_searched else chosen, within_s)
    unread = source.unread_births(names)
    if len(unread) <= BIRTHS_UNASKED or reads_all:
        source.births(names)
        unread = []
    # The parent of a run that is still being read is known later.
    known = {*names} - {*unread} - {*first.pending} | {*first.failed}
    family = _family(source, chosen, known, {*names})[:MOST_RUNS]
    left = None if until is None else max(0.0, until - time.monotonic())
    asked = {*names} if is_searched else {*chosen}
    opened = first.joined(source.runs([name for name in family if name not in asked], left))
    every = [row for run in opened.runs.values() for row in _rows(run.manifest)]
    # The runs that were merged, or gave a warm start, are known only now.
    sources = dict.fromkeys(one.run for row in every for one in row.origins)
    asked |= {*family}
    more = [name for name in sources if name in {*names} - asked][: MOST_RUNS - len(family)]
    if more:
        others = source.runs(more, left)
        opened = opened.joined(others)
        every += [row for run in others.runs.values() for row in _rows(run.manifest)]
    related = {name for row in every for one in row.origins for name in (row.run, one.run)}
    related |= {*chosen} if len(wanted) == 1 else set()
    related &= _with_made(every, family) if is_searched else related
    rows = sorted(
        (row for row in every if row.run in related),
        key=lambda row: (row.time_ms, _AT_ONCE.get(row.kind, 1)),
        reverse=True,
    )
    drawn, lanes = _draw(rows)
    return Lineage(
        rows=tuple(drawn),
        lanes=lanes,
        runs=tuple(name for name in opened.runs if name in related),
        alone=sum(name not in related for name in opened.runs),
        others=len({*names} - asked) - len(more),
        pending=len(opened.pending),
        unread=len(unread),
        troubles=tuple(trouble_of(error) for error in opened.failed.values()),
    )


def _with_made(rows: Sequence[LineageRow], family: Iterable[str]) -> set[str]:
    """Return a family with the runs that merges and warm starts made from it, and their sources."""
    found = {*family}
    while more := {row.run for row in rows if found & {one.run for one in row.origins}} - found:
        found |= more
    return found | {one.run for row in rows if row.run in found for one in row.origins}


def _family(source: Source, chosen: Sequence[str], known: set[str], names: set[str]) -> list[str]:
    """Return runs with their ancestors and descendants."""
    parents = {
        name: birth.parent.run
        for name, birth in source.births(sorted(known & names)).items()
        if birth is not None and birth.parent is not None
    }
    found = dict.fromkeys(chosen)
    for name in chosen:  # ancestors; a parent may be in another registry
        while name in parents and parents[name] in names and parents[name] not in found:
            name = parents[name]
            found[name] = None
            birth = source.births([name])[name]
            if birth is not None and birth.parent is not None:
                parents[name] = birth.parent.run
    grew = True
    while grew:
        more = [name for name, parent in parents.items() if parent in found and name not in found]
        found |= dict.fromkeys(more)
        grew = bool(more)
    return list(found)


def _rows(run: RunManifest) -> Iterator[LineageRow]:
    name, created = run.run_id, run.created
    parent = None if created is None else created.parent
    if parent is None:
        yield LineageRow(name, run.created_ms, "begin", run.spec.name)
    else:
        origin = Origin(parent.run, step_ref(parent))
        yield LineageRow(name, run.created_ms, "fork", origins=(origin,))
    for phase in run.phases:
        if not phase.superseded:
            yield _entered(run, phase)
    for one in run.live():
        if _may_be_merged(one):
            yield from _merged(name, one)
    for kind in ("gate", "release"):
        for pin in run.pins_of(kind)[-_MOST_PINS:]:
            record = run.by_n.get(-1 if pin.checkpoint is None else pin.checkpoint)
            yield LineageRow(name, pin.time_ms, kind, pin.name, _ref_of(record))
    latest = run.latest()
    if run.dropped is not None:
        yield LineageRow(name, _newest_ms(run), "drop", run.dropped)
    elif latest is not None:
        yield LineageRow(
            name,
            latest.time_ms,
            "latest",
            run.shown_status,
            _ref_of(latest),
            (),
            tuple(latest.companions),
        )


def _entered(run: RunManifest, phase: PhaseRecord) -> LineageRow:
    kind = "pivot" if phase.name else "warm start" if phase.stays else "transition"
    entered = phase.to_phase if phase.stays else f"{phase.from_phase} to {phase.to_phase}"
    # The action has no time here: the next checkpoint gives it.
    after = (one.time_ms for one in run.checkpoints if one.n > phase.n)
    time_ms = next(after, _newest_ms(run))
    source_run, slash, ref = phase.source.partition("/")
    is_ours = not phase.stays or phase.name is not None
    origins = () if is_ours or not slash else (Origin(source_run, ref),)
    shown = phase.source if is_ours else ""
    return LineageRow(
        run.run_id,
        time_ms - 1,
        kind,
        phase.name or entered,
        shown,
        origins,
        tuple(phase.companions),
    )


def _newest_ms(run: RunManifest) -> int:
    return max([run.created_ms, *(one.time_ms for one in run.checkpoints[-1:])])


def _may_be_merged(record: CheckpointRecord) -> bool:
    return record.meta is not None and f'"{MERGE}"' in str(record.meta).replace("'", '"')


def _merged(run: str, record: CheckpointRecord) -> Iterator[LineageRow]:
    meta = decode_or_keep(record.meta)
    merge = meta.get(MERGE) if isinstance(meta, Mapping) else None
    sources = merge.get("sources") if isinstance(merge, Mapping) else None
    if isinstance(sources, Sequence) and not isinstance(sources, str):
        origins = tuple(_origins(sources))
        yield LineageRow(run, record.time_ms, "merge", "", _ref_of(record), origins)


def _origins(sources: Iterable[Any]) -> Iterator[Origin]:
    for one in sources:
        ref = one.get("ref") if isinstance(one, Mapping) else one
        run, slash, rest = ref.partition("/") if isinstance(ref, str) else ("", "", "")
        if slash:
            yield Origin(run, rest)


def _ref_of(record: CheckpointRecord | None) -> str:
    return "" if record is None else step_ref(record)


# Drawing


def _draw(rows: Sequence[LineageRow]) -> tuple[list[Drawn], int]:
    """Return rows with lanes: a lane is used again above the last row of its run."""
    spans = _spans(rows)
    lanes = _lanes(spans)
    drawn = []
    for at, row in enumerate(rows):
        own = lanes[row.run]
        above = {lanes[run] for run, (top, low) in spans.items() if top < at <= low}
        below = {lanes[run] for run, (top, low) in spans.items() if top <= at < low}
        edges = {lanes[one.run] for one in row.origins if one.run in lanes and one.run != row.run}
        drawn.append(
            Drawn(
                row, own, tuple(sorted(above)), tuple(sorted(below | edges)), tuple(sorted(edges))
            )
        )
    return drawn, max(lanes.values(), default=-1) + 1


def _spans(rows: Sequence[LineageRow]) -> dict[str, tuple[int, int]]:
    """Return the first and last row of each run; a row that came from it counts too."""
    spans: dict[str, tuple[int, int]] = {}
    own = {row.run for row in rows}
    for at, row in enumerate(rows):
        for run in (row.run, *(one.run for one in row.origins if one.run in own)):
            top, low = spans.get(run, (at, at))
            spans[run] = (
                top,
                max(low, at) if run == row.run else max(low, min(at + 1, len(rows) - 1)),
            )
    return spans


def _lanes(spans: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return a lane for each run, such that runs whose rows overlap have different ones."""
    lanes: dict[str, int] = {}
    busy_to: list[int] = []  # for each lane, the last row that is taken
    for run, (top, low) in sorted(spans.items(), key=lambda one: one[1]):
        free = next((lane for lane, until in enumerate(busy_to) if until < top), len(busy_to))
        if free == len(busy_to):
            busy_to.append(low)
        busy_to[free] = low
        lanes[run] = free
    return lanes


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
    reads_all = asked.text("all") == "1"
    found = read_lineage(source, runs, reads_all=reads_all, within_s=asked.within_s)
    return Shown(title, found, troubles=found.troubles, is_partial=found.pending > 0, run=run)


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:  # noqa: ARG001
    return [Asked(query={"run": runs})]


VIEW = View("lineage", "Lineage", "/lineage", "lineage.html", _ask, place="registry", parts=_parts)
OF_RUN = View("run_lineage", "Lineage", "/runs/{run}/lineage", "lineage.html", _of_run, place="run")
