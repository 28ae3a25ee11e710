"""`log`: the history of a run, and of the runs that it was forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import flag, option
from holdfast.registry.errors import IntegrityError, NotFound, UnsupportedFormat
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import (
    RunLog,
    decode_or_keep,
    in_words,
    parent_ref,
    phase_value,
    refs_of,
)
from holdfast.registry.history.actions import Commit, Parent, line_digest

# The descent of runs: parents, forks and phases.


def forks_among(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Return the names of the forks of each of these runs that has some."""
    found: dict[str, list[str]] = {}
    for run in runs:
        parent = parent_of(run)
        if parent is not None:
            found.setdefault(parent.run, []).append(run.id)
    return found


def parent_of(run: Run) -> Parent | None:
    """Return the parent of a run that was forked."""
    created = run.manifest.created
    return None if created is None else created.parent


def lineage_json(run: Run, forks: list[str]) -> dict[str, Any]:
    """Return the parent, forks and phases of a run, and why it was dropped."""
    manifest, parent = run.manifest, parent_of(run)
    return {
        "preset": run.spec.name or None,
        "phase": run.phase,
        "phases": [
            {
                "phase": phase_value(record.to_phase),
                "from": phase_value(record.from_phase),
                "pivot": record.name,
                "source": record.source,
                "commit": record.n,
                "superseded": record.superseded,
            }
            for record in manifest.phases
        ],
        "parent": None if parent is None else _parent_json(parent),
        "forks": forks,
        "dropped": manifest.dropped,
    }


def _parent_json(parent: Parent) -> dict[str, Any]:
    return {
        "run": parent.run,
        "commit": parent.commit,
        "ref": parent_ref(parent),
        "id": parent.checkpoint,
    }


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
    """The part of a run's history that belongs to a line of descent."""

    run: str  # its name
    commits: Sequence[Commit]  # its commits, newest first
    refs: Mapping[int, str]  # names of its checkpoints within the run, by commit number
    heading: str = ""  # the line above it in a graph


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
