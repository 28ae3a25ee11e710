"""`log`: the history of a run in words, and that of the runs that it was forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.registry.cli import describe, lineage, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import flag, option
from holdfast.registry.errors import IntegrityError, NotFound, UnsupportedFormat
from holdfast.registry.history import actions
from holdfast.registry.history.actions import Action, Commit, line_digest
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import decode_or_keep
from holdfast.registry.loading.checkpoint import parent_ref
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


def refs_of(commits: Iterable[Commit]) -> dict[int, str]:
    """Return the names of checkpoints within their run, by the numbers of their commits."""
    added = ((commit.n, action) for commit in commits for action in commit.actions)
    return {
        n: describe.ref("", action)[1:]
        for n, action in added
        if isinstance(action, actions.AddCheckpoint)
    }


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


def in_words(action: Action, refs: Mapping[int, str], n: int) -> str:
    """Return an action in words.

    Args:
        action: The action.
        refs: Names of the run's checkpoints, by commit number.
        n: Number of its commit.
    """
    match action:
        case actions.CreateRun():
            return _begun(action)
        case actions.SetStatus():
            return f"status {action.status}"
        case actions.TakeOver():
            return f"{action.host} trains from here"
        case actions.Rewind():
            return f"go back to {'the beginning' if action.to is None else _of(refs, action.to)}"
        case actions.EnterPhase():
            return _entered(action)
        case actions.DropRun():
            return f"drop the run: {action.reason}"
        case actions.AppendStream():
            return _appended(action)
        case actions.ArchiveStream():
            return f"stream {action.stream}: archived as {action.label}, and emptied"
        case actions.Claim():
            until = output.time(action.until_ms)
            taken = _of(refs, action.checkpoint)
            return f"{action.group}: {action.follower} takes {taken} until {until}"
        case actions.Acknowledge():
            return f"{action.group}: done with {_of(refs, action.checkpoint)}"
        case actions.Promote() | actions.RateMatch() | actions.EvictEntries():
            return _pool_in_words(action, refs)
    return _checkpoint_in_words(action, refs, n)


def _of(refs: Mapping[int, str], n: int) -> str:
    """Return the name of a checkpoint; the log may name one that the run does not have."""
    return refs.get(n, f"the checkpoint of commit {n}")


def _begun(action: actions.CreateRun) -> str:
    preset = f", preset {action.spec.name}" if action.spec and action.spec.name else ""
    origin = f", a fork of {parent_ref(action.parent)}" if action.parent else ""
    return f"begin the run{preset}{origin}"


def _entered(action: actions.EnterPhase) -> str:
    changes: dict[str, list[str]] = {}
    for row in action.rows:
        changes.setdefault(row.change, []).append(f"{row.part} as {row.to}" if row.to else row.part)
    changed = "".join(f"; {change} {', '.join(parts)}" for change, parts in changes.items())
    if action.name is not None:
        return f"pivot {action.name} in phase {action.to_phase}{changed}"
    if action.from_phase == action.to_phase:
        return f"start phase {action.to_phase} warm, from {action.source}{changed}"
    return f"enter phase {action.to_phase} from {action.from_phase}, with {action.source}{changed}"


def _appended(action: actions.AppendStream) -> str:
    # A segment may include the entries of earlier ones, so its start does not show which are new.
    count = action.start + action.count
    entries = output.counted(count, "entry", "entries")
    steps = f"steps {action.first_step} to {action.last_step}"
    return f"append to stream {action.stream}: {entries} in all, {steps} in the newest segment"


def _pool_in_words(
    action: actions.Promote | actions.RateMatch | actions.EvictEntries, refs: Mapping[int, str]
) -> str:
    match action:
        case actions.Promote():
            of = (
                f"gates/{action.gate}"
                if action.checkpoint is None
                else _of(refs, action.checkpoint)
            )
            if action.checkpoint is None and action.gate is None:
                of = f"phase {action.phase}, step {action.step}"
            rating = output.metrics({"mu": action.mu, "sigma": action.sigma})
            return f"pool {_entry(action.version)}: {of} {rating}{' frozen' * action.frozen}"
        case actions.RateMatch():
            rated = ", ".join(
                f"{_entry(one.version)} {output.metrics({'mu': one.mu, 'sigma': one.sigma})}"
                for one in action.ratings
            )
            return f"pool: match {action.match}: {rated}"
    evicted = ", ".join(map(_entry, action.versions))
    return f"pool: {evicted} out, {action.reason}"


def _entry(version: int) -> str:
    return f"v{version:04d}"


def _checkpoint_in_words(action: Action, refs: Mapping[int, str], n: int) -> str:
    match action:
        case actions.AddCheckpoint():
            return _added(action, _of(refs, n))
        case actions.ReportMetrics():
            tier = f" tier {action.tier}" if action.tier else ""
            return f"report {_of(refs, action.checkpoint)} {output.metrics(action.metrics)}{tier}"
        case actions.Evict():
            evicted = (f"{_of(refs, one.checkpoint)} ({one.reason})" for one in action.evictions)
            return f"evict {', '.join(evicted)}"
        case actions.Recover():
            return f"bring back {', '.join(_of(refs, back) for back in action.checkpoints)}"
        case actions.SetTag():
            return f"tag {action.name} at {_of(refs, action.checkpoint)}"
        case actions.SetPin():
            return _pinned(action, refs)
        case actions.PointRelease():
            because = f": {action.reason}" if action.reason else ""
            return f"releases/latest is {action.version}{because}"
    raise AssertionError(f"no words for {action.action}")


def _added(action: actions.AddCheckpoint, ref: str) -> str:
    parts = [
        f"save {ref} {action.manifest.short}",
        output.metrics(action.metrics),
        f"tier {action.tier}" if action.tier else "",
        f"with {', '.join(action.companions)}" if action.companions else "",
        f"NaN or infinity in {', '.join(action.nonfinite)}" if action.nonfinite else "",
        "(held back)" if action.held_back else "",
    ]
    return " ".join(filter(None, parts))


def _pinned(action: actions.SetPin, refs: Mapping[int, str]) -> str:
    of = "" if action.checkpoint is None else f" from {_of(refs, action.checkpoint)}"
    replaced = f" in place of {action.replaces.short}, damaged" if action.replaces else ""
    return f"{action.kind} {action.name}: {action.manifest.short}{of}{replaced}"
