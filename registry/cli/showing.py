"""`run show` and `log`: a run, once or until it is over, and its history."""

from __future__ import annotations

import math
import sys
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, islice
from shutil import get_terminal_size
from typing import Any, get_args

import typer

from holdfast.backends.escape import shown
from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.listing import Listing, sparkline, there
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Part
from holdfast.registry.cli.presets import kept, tiers_text
from holdfast.registry.cli.run_listing import heard_of, parent_of, run_json
from holdfast.registry.curation import run_remarks
from holdfast.registry.errors import IntegrityError, NotFound, UnsupportedFormat
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import (
    RunLog,
    decode_or_keep,
    first_line,
    forks_of,
    in_words,
    refs_of,
    step_ref,
)
from holdfast.registry.history.actions import Action, Commit, line_digest
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.layouts import follow_run
from holdfast.registry.loading.following import Patience
from holdfast.registry.saving.loop import LastHeard
from holdfast.registry.store import in_batches
from holdfast.registry.values import Digest, Record

#: Parts of a run that are shown below a heading of their own.
_APART = ("config", "environment", "tags")
#: Fields on a screen, which has room for trends and commits below them, and the least commits.
_WATCHED = (
    "run",
    "status",
    "problem",
    "phase",
    "checkpoints",
    "latest",
    "best",
    "last_heard",
    "waited_share",
)
_LEAST = 3
#: Fields that only lists show like this.
_LISTED = ("status", "best_step")
#: Fields by metric; people are shown the metrics that have a best checkpoint.
_BESTS = ("best", "best_values", "best_steps")
_LOG = (
    *numbers("n"),
    Column("time", text=lambda time: output.time(describe.time_ms_of(time)), drop=2),
    Column("author", drop=1),
    Column("what", folds=True),
)
_GRAPH = (Column("", "line"), *_LOG)
_ACTS = (*_LOG[1:3], Column("run"), _LOG[0], _LOG[3])
#: The most commits that are chosen unless more are asked for.
_MOST = 1000
#: The kinds of pins that actions set, which people name like actions.
_PINS = ("gate", "release", "artifact")
#: Fields of actions that hold encoded plain values.
_ENCODED = ("config", "meta")


@command(reads)
def show(
    opened: Registry,
    *,
    run: options.Run,
    follow: bool = flag("--follow", "Show it again whenever it changes, until it is over."),
    forks: bool = flag("--forks", "List its forks too: one request for each run."),
) -> Answer:
    """Show a run: its settings, and its state now."""
    found = opened.run(run)
    names = forks_of(opened.handle.store, run) if forks else None
    if follow:
        return _followed(opened, found, names)
    return Answer(lambda: run_json(found, names), lambda: _text(_for_people(found, names)))


def _heard_text(heard: LastHeard) -> str:
    when = output.time(heard.time_ms)
    if not heard.is_overdue or heard.interval_ms is None:
        return when
    every = output.duration(heard.interval_ms / 1000)
    return f"{when}, {output.age(heard.time_ms)} ago; overdue: it saved about every {every}"


def _waited_text(share: float | None) -> str | None:
    return None if share is None else f"{output.share(share)} of the time, for saves"


def _steps_text(latest: CheckpointRecord | None, total: int | None) -> str | None:
    if total is None:
        return None
    done = 0 if latest is None else latest.step
    return f"{total}, of which {done} are done: {output.share(done / total)}"


def _for_people(run: Run, forks: list[str] | None) -> dict[str, Any]:
    shape, declared = run_json(run, forks), run.manifest.spec.phases
    phase = run.manifest.phase or (declared[0].name if declared else "")
    return {
        "run": run.id,
        "status": run.manifest.shown_status,
        "problem": "; ".join(run_remarks(run.manifest)),
        "keeps": tiers_text(kept(run.manifest.spec.phase(phase))),
        **{name: value for name, value in shape.items() if name not in _LISTED},
        **{name: {m: v for m, v in shape[name].items() if v is not None} for name in _BESTS},
        "total_steps": _steps_text(run.manifest.latest(), shape["total_steps"]),
        "created": output.time(run.manifest.created_ms),
        "last_heard": _heard_text(heard_of(run)),
        "waited_share": _waited_text(shape["waited_share"]),
        "failed_saves": shape["failed_saves"] or None,
    }


def _text(shape: dict[str, Any]) -> Iterator[Part]:
    if shape["reason"]:
        first, *frames = shape["reason"].splitlines()
        yield from (f"failed: {first}", *(f"  {line}" for line in frames), "")
    yield {name: _value_text(shape[name]) for name in shape if name not in (*_APART, "reason")}
    for name in _APART:
        if shape[name]:
            yield f"\n{name}"
            yield {f"  {key}": _value_text(value) for key, value in _items(shape[name])}


def _items(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(shown(key), item) for key, item in value.items()]
    return [("value", value)]


def _value_text(value: Any) -> object:
    match value:
        case Digest():
            return value.hex()
        case {"host": host, "since": since}:
            return f"{host} since {since}"
        case {"run": _, "commit": n, "ref": ref}:
            return f"{ref}, commit {n}"
        case [{"commit": _, "text": _}, *_]:
            noted = ((x["ref"] or f"commit {x['commit']}", first_line(x["text"])) for x in value)
            return "; ".join(f"{ref}: {shown(text)}" for ref, text in noted)
        case [{"until": _, "reason": _}, *_]:
            return "; ".join(f"{x['ref']} until {x['until']}: {shown(x['reason'])}" for x in value)
        case [{"phase": _, "from": _}, *_]:
            return ", ".join(_phase_text(phase) for phase in value)
        case [{"metric": _, "mode": _}, *_]:
            return ", ".join(f"{monitor['metric']}:{monitor['mode']}" for monitor in value)
        case [str(), *_]:
            return ", ".join(map(shown, value))
        case dict():
            return ", ".join(
                f"{shown(key)}: {shown(_value_text(item))}" for key, item in value.items()
            )
        case [] | None:
            return None
    return value


def _phase_text(phase: dict[str, Any]) -> str:
    if phase["pivot"] is not None:
        return f"pivot {phase['pivot']}{' (superseded)' * phase['superseded']}"
    if phase["from"] == phase["phase"]:
        return f"warm start from {phase['source']}"
    return f"{phase['from']} to {phase['phase']}{' (superseded)' * phase['superseded']}"


def _followed(opened: Registry, run: Run, forks: list[str] | None) -> Answer:
    """Return a run as an answer that is printed again whenever its log has grown."""
    log = _Log(opened, run)

    def text() -> Iterator[Part]:
        if output.is_terminal():
            _on_screen(run, forks, log)
            return
        log.added()  # from here on, each commit is printed
        yield from _text(_for_people(run, forks))
        for added in _looks(run, log.added):
            yield from added

    return Answer(lambda: _looks(run, lambda: run_json(run, forks)), text, is_live=True)


def _looks(run: Run, look: Callable[[], Any]) -> Iterator[Any]:
    return follow_run(run.handle.committer, look, Patience())


def _on_screen(run: Run, forks: list[str] | None, log: _Log) -> None:
    """Show the run at the same place of the terminal, with its trends and its newest commits."""
    from holdfast.registry.cli import terminal

    newest: list[str] = []

    def screen() -> list[str]:
        newest.extend(log.added())
        shape = _for_people(run, forks)
        head = {name: _value_text(shape[name]) for name in _WATCHED}
        above = [line for part in (head, "", _trends(run), "") for line in output.lines(part)]
        room = max(get_terminal_size().lines - len(above) - 1, _LEAST)
        return above + [line for text in newest[-room:] for line in output.lines(text)]

    with terminal.live() as show:
        for shown in _looks(run, screen):
            show(shown)


def _trends(run: Run) -> dict[str, object]:
    records = run.manifest.live()
    names = dict.fromkeys(name for one in records for name in one.metrics)
    series = {name: [one.metrics.get(name) for one in records] for name in names}
    return {
        name: f"{sparkline(values)}  {output.number(there(values)[-1])}"
        for name, values in series.items()
    }


class _Log:
    """The commits of a run in words, each once."""

    def __init__(self, opened: Registry, run: Run) -> None:
        self._log = RunLog(opened.handle.store, run.id)
        self._start = 0
        self._refs: dict[int, str] = {}

    def added(self) -> list[str]:
        """Return the commits since the last call."""
        found = []
        for slot in self._log.slots(self._start):
            self._start = slot.number + 1
            for _, commit in slot.commits:
                self._refs |= refs_of([commit])
                what = "; ".join(in_words(one, self._refs, commit.n) for one in commit.actions)
                found.append(f"{output.time(commit.time_ms)}  {what}")
        return found


@dataclass(frozen=True, slots=True)
class _Chapter:
    """The part of a run's history that belongs to a line of descent."""

    run: str  # its name
    commits: Sequence[Commit]  # its commits, newest first
    refs: Mapping[int, str]  # names of its checkpoints within the run, by commit number
    heading: str = ""  # the line above it in a graph


@command(reads, table=True)
def log(
    opened: Registry,
    *,
    run: str | None = argument(
        "RUN",
        "Name of a run.",
        envvar="HOLDFAST_RUN",
        autocompletion=completing.RUNS,
        default=None,
    ),
    limit: int | None = option("-n", "COUNT", "At most this many commits.", min=1),
    graph: bool = flag("--graph", "Below a fork, continue with the run that it came from."),
    every: bool = flag("--all", "The history of all runs, the newest commits first."),
    since: str | None = option(
        "--since", "TIME", "Only what was put in that time, by the store's clock: 12h, 7d."
    ),
    action: str | None = option(
        "--action", "NAME,...", "Only these actions: drop,evict,tag,gate or checkpoint.evict."
    ),
) -> Answer:
    """Show the history of a run or of all runs, newest first.

    With --all, --since or --action at most 1,000 commits, or COUNT.
    """
    if every or since or action:
        if graph:
            raise typer.BadParameter("--graph is for the whole history of one run")
        since_s = clock.time() - options.seconds(since) if since else -math.inf
        return _acts(opened, None if every else run, since_s, _choice(action), limit or _MOST)
    if run is None:
        raise typer.BadParameter("give RUN, or --all")
    descent = _descent(opened, opened.run(run))
    chapters = list(descent if graph else islice(descent, 1))
    shapes = (shape for chapter in chapters for shape in _shapes(chapter, named=graph))
    return Answer(
        lambda: list(islice(shapes, limit)),
        lambda: [Table(_GRAPH if graph else _LOG, _rows(chapters, limit))],
    )


def _words(kind: str, pin: str = "") -> set[str]:
    """Return what people call an action; `pin` is the kind of a pin that it sets."""
    return {kind, *kind.split("."), pin, "drop" if "hide" in kind else ""} - {""}


def _choice(names: str | None) -> Callable[[Action], bool]:
    """Return which actions names mean: `evict` is that of checkpoints and of the pool."""
    known = {one.action for one in get_args(get_args(Action)[0])}
    words = {*_PINS, *chain.from_iterable(map(_words, known))}
    wanted = {name.strip() for name in names.split(",")} if names else words
    for name in sorted(wanted - words):
        raise typer.BadParameter(
            f"no action is named {name!r}; known: {', '.join(sorted({*known, *_PINS}))}"
        )
    return lambda act: bool(_words(act.action, getattr(act, "kind", "")) & wanted)


def _acts(
    opened: Registry, run: str | None, since_s: float, fits: Callable[[Action], bool], limit: int
) -> Answer:
    """Return the newest commits of a run or of all runs, with those of their actions."""
    listing, store = Listing(opened), opened.handle.store

    def newest(one: Run) -> dict[str, float]:
        last = one.handle.log.newest_commit
        return {"newest_s": one.handle.log.put_times()[last.number] if last else -math.inf}

    def read(name: str) -> list[tuple[int, str, int, Commit]]:
        log = RunLog(store, name)
        try:
            numbers = sorted(n for n, put_s in log.put_times().items() if put_s >= since_s)
            commits = [one for slot in log.fetch(numbers) for _, one in slot.commits]
        except (IntegrityError, UnsupportedFormat) as error:
            listing.damaged[name] = error
            return []
        chosen = (one.changed(actions=tuple(filter(fits, one.actions))) for one in commits)
        return nlargest(limit + 1, ((x.time_ms, name, x.n, x) for x in chosen if x.actions))

    if run is None:
        times = listing.summaries(newest, 1, kind="times")
        names = [name for name, one in times.items() if one["newest_s"] >= since_s]
    else:
        names = [opened.run(run).id]
    read_runs = chain.from_iterable(in_batches(store.pools.bulk, read, names))
    found = [(name, commit) for _, name, _, commit in nlargest(limit + 1, read_runs)]

    def rows() -> Iterator[dict[str, Any]]:
        refs: dict[str, Mapping[int, str]] = {}
        for name, commit in found[:limit]:
            if name not in refs:  # the log has the names of evicted checkpoints
                known = opened.run(name).history.manifest().checkpoints
                refs[name] = {record.n: step_ref(record) for record in known}
            yield {"run": name, **_row(commit, refs[name])}

    chapters = [_Chapter(name, [commit], {}) for name, commit in found[:limit]]
    return Answer(
        lambda: [shape for one in chapters for shape in _shapes(one, named=True)],
        lambda: [Table(_ACTS, rows(), none="no such commit")],
        notes=[f"only the newest {limit:,}; -n COUNT shows more"] * (len(found) > limit),
        damaged=listing.damaged,
    )


def _descent(opened: Registry, run: Run) -> Iterator[_Chapter]:
    """Yield the history of a run, then that of each ancestor up to where it was forked."""
    commits = list(run.history.commits())
    yield _Chapter(run.id, commits[::-1], refs_of(commits))
    seen = {run.id}
    while (parent := parent_of(run)) is not None:
        at = f"forked from {parent.run} at commit {parent.commit}"
        try:
            run = opened.run(parent.run)
        except NotFound:
            yield _Chapter(parent.run, (), {}, f"{at}, which is not in this registry")
            return
        except (IntegrityError, UnsupportedFormat) as error:
            yield _Chapter(parent.run, (), {}, f"{at}, which cannot be read: {error.summary}")
            return
        slots = RunLog(opened.handle.store, run.id).slots()
        shared = [pair for slot in slots for pair in slot.commits if pair[1].n <= parent.commit]
        if run.id in seen or not shared or line_digest(shared[-1][0]) != parent.head:
            yield _Chapter(parent.run, (), {}, f"{at}, and the run of this name is another one")
            return
        seen.add(run.id)
        commits = [commit for _, commit in shared]
        yield _Chapter(run.id, commits[::-1], refs_of(commits), at)


def _shapes(chapter: _Chapter, *, named: bool) -> Iterator[dict[str, Any]]:
    run = {"run": chapter.run} if named else {}
    for commit in chapter.commits:
        yield {
            **run,
            "n": commit.n,
            "time": describe.iso(commit.time_ms),
            "author": commit.author,
            "prev": commit.prev,
            "actions": [_action(action) for action in commit.actions],
        }


def _action(action: Record) -> dict[str, Any]:
    values: dict[str, Any] = _without_records(action)
    encoded = {name: decode_or_keep(values[name]) for name in _ENCODED if name in values}
    return {**values, **encoded}


def _without_records(value: Any) -> Any:
    """Return a value with dicts in place of records."""
    if isinstance(value, Record):
        return {name: _without_records(one) for name, one in value.as_dict().items()}
    return [*map(_without_records, value)] if isinstance(value, tuple) else value


def _rows(chapters: Sequence[_Chapter], limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield the commits as rows, below the heading of their chapter."""
    left = sys.maxsize if limit is None else limit
    for chapter in chapters:
        if chapter.heading and left > 0:
            yield {"line": "|", "what": chapter.heading}
        for commit in chapter.commits[:left]:
            yield {"line": "*", **_row(commit, chapter.refs)}
        left -= len(chapter.commits[:left])


def _row(commit: Commit, refs: Mapping[int, str]) -> dict[str, Any]:
    what = "; ".join(in_words(action, refs, commit.n) for action in commit.actions)
    time = describe.iso(commit.time_ms)
    return {"n": commit.n, "time": time, "author": commit.author, "what": what}
