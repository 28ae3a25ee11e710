"""`log`: the history of a run, of its ancestors, or of all runs."""

from __future__ import annotations

import math
import sys
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, get_args

import typer

from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.listing import Listing, log_of
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.errors import IntegrityError, NotFound, UnsupportedFormat
from holdfast.registry.face import Registry
from holdfast.registry.history import RunLog, decode_or_keep, in_words, refs_of, step_ref
from holdfast.registry.history.actions import Action, Commit, line_digest
from holdfast.registry.store import in_batches
from holdfast.registry.values import Record

if TYPE_CHECKING:
    from holdfast.registry.face import Run

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
        "RUN", "Name of a run.", envvar="HOLDFAST_RUN", autocompletion=completing.RUNS, default=None
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
        return newest_commits(
            opened, None if every else run, since_s, _choice(action), limit or _MOST
        )
    if run is None:
        raise typer.BadParameter("give RUN, or --all")
    descent = _descent(opened, log_of(opened, run))
    chapters = list(descent if graph else islice(descent, 1))
    shapes = (shape for chapter in chapters for shape in _shapes(chapter, named=graph))
    return Answer(
        lambda: list(islice(shapes, limit)),
        lambda: [Table(_GRAPH if graph else _LOG, _rows(chapters, limit))],
    )


def _words(kind: str, pin: str = "") -> set[str]:
    """Return the names of an action; `pin` is the kind of a pin that it sets."""
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


def newest_commits(
    opened: Registry, run: str | None, since_s: float, fits: Callable[[Action], bool], limit: int
) -> Answer:
    """Return the newest commits of a run or of all runs, with those of their actions."""
    listing, store = Listing(opened), opened.handle.store

    def newest(one: Run) -> dict[str, float]:
        times, last = one.handle.log.put_times(), one.handle.log.newest_commit
        # Behind a snapshot or a note that slot was not read: it is no newer than the newest one.
        return {"newest_s": times[last.number] if last else max(times.values(), default=-math.inf)}

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
        times = listing.summaries(newest, 2, kind="times")
        names = [name for name, one in times.items() if one["newest_s"] >= since_s]
    else:
        names = [log_of(opened, run).run_id]
    read_runs = chain.from_iterable(in_batches(store.pools.bulk, read, names))
    found = [(name, commit) for _, name, _, commit in nlargest(limit + 1, read_runs)]

    def rows() -> Iterator[dict[str, Any]]:
        refs: dict[str, Mapping[int, str]] = {}
        for name, commit in found[:limit]:
            if name not in refs:  # the log has the names of evicted checkpoints
                known = log_of(opened, name).history().checkpoints
                refs[name] = {record.n: step_ref(record) for record in known}
            yield {"run": name, **_row(commit, refs[name])}

    chapters = [_Chapter(name, [commit], {}) for name, commit in found[:limit]]
    return Answer(
        lambda: [shape for one in chapters for shape in _shapes(one, named=True)],
        lambda: [Table(_ACTS, rows(), none="no such commit")],
        notes=[f"only the newest {limit:,}; -n COUNT shows more"] * (len(found) > limit),
        damaged=listing.damaged,
    )


def _descent(opened: Registry, log: RunLog) -> Iterator[_Chapter]:
    """Yield the history of a run, then that of each ancestor up to where it was forked."""
    commits = list(log.commits())
    yield _Chapter(log.run_id, commits[::-1], refs_of(commits))
    seen = {log.run_id}
    while (parent := describe.parent_of(log.run)) is not None:
        at = f"forked from {parent.run} at commit {parent.commit}"
        try:
            log = log_of(opened, parent.run)
        except NotFound:
            yield _Chapter(parent.run, (), {}, f"{at}, which is not in this registry")
            return
        except (IntegrityError, UnsupportedFormat) as error:
            yield _Chapter(parent.run, (), {}, f"{at}, which cannot be read: {error.summary}")
            return
        slots = RunLog(opened.handle.store, log.run_id).slots()
        shared = [pair for slot in slots for pair in slot.commits if pair[1].n <= parent.commit]
        if log.run_id in seen or not shared or line_digest(shared[-1][0]) != parent.head:
            yield _Chapter(parent.run, (), {}, f"{at}, and the run of this name is another one")
            return
        seen.add(log.run_id)
        commits = [commit for _, commit in shared]
        yield _Chapter(log.run_id, commits[::-1], refs_of(commits), at)


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
