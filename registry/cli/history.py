"""`log`: the history of a run, and that of the runs that it was forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.registry.cli import describe, lineage, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import flag, option
from holdfast.registry.errors import IntegrityError, NotFound, UnsupportedFormat
from holdfast.registry.history.action_texts import in_words, refs_of
from holdfast.registry.history.actions import Commit, line_digest
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import decode_or_keep
from holdfast.registry.registries.registry import Registry
from holdfast.registry.runs.run import Run

_LOG = (
    *numbers("n"),
    Column("time", text=lambda time: output.time(describe.time_ms_of(time)), drop=2),
    Column("author", drop=1),
    Column("what", folds=True),
)
_GRAPH = (Column("", "line"), *_LOG)
#: Fields of actions that hold encoded plain values.
_ENCODED = ("config", "meta")


@dataclass(frozen=True, slots=True)
class _Chapter:
    """The part of a run's history that belongs to a line of descent.

    Attributes:
        run: Its name.
        commits: Its commits, newest first.
        refs: Names of its checkpoints within the run, by commit number.
        heading: The line above it in a graph.
    """

    run: str
    commits: Sequence[Commit]
    refs: Mapping[int, str]
    heading: str = ""


@command(reads, table=True)
def log(
    opened: Registry,
    *,
    run: options.Run,
    limit: int | None = option("-n", "COUNT", "At most this many commits.", min=1),
    graph: bool = flag("--graph", "Below a fork, continue with the run that it came from."),
) -> Answer:
    """Show the history of a run, newest first."""
    descent = _descent(opened, opened.run(run))
    chapters = list(descent if graph else islice(descent, 1))
    shapes = (shape for chapter in chapters for shape in _shapes(chapter, named=graph))
    return Answer(
        lambda: list(islice(shapes, limit)),
        lambda: [Table(_GRAPH if graph else _LOG, _rows(chapters, limit))],
    )


def _descent(opened: Registry, run: Run) -> Iterator[_Chapter]:
    """Yield the history of a run, then that of each ancestor up to where it was forked."""
    commits = list(run.history())
    yield _Chapter(run.id, commits[::-1], refs_of(commits))
    seen = {run.id}
    while (parent := lineage.parent_of(run)) is not None:
        at = f"forked from {parent.run} at commit {parent.commit}"
        try:
            run = opened.run(parent.run)
        except NotFound:
            yield _Chapter(parent.run, (), {}, f"{at}, which is not in this registry")
            return
        except (IntegrityError, UnsupportedFormat) as error:
            yield _Chapter(parent.run, (), {}, f"{at}, which cannot be read: {error.summary}")
            return
        slots = RunLog(opened.store, run.id).slots()
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
            "actions": [_action(action.model_dump()) for action in commit.actions],
        }


def _action(values: dict[str, Any]) -> dict[str, Any]:
    encoded = {name: decode_or_keep(values[name]) for name in _ENCODED if name in values}
    return {**values, **encoded}


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
