"""The commits of a run, and its forks, as events of its time line, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.registry.history import (
    actions,
    first_line,
    format_time,
    named,
    parent_ref,
    refs_of,
    step_ref,
)
from holdfast.registry.history.actions import Action, Commit
from holdfast.registry.ui.source import Source

Lane = Literal["checkpoints", "names", "phases", "trainer", "retention", "pool", "streams"]
#: Seconds for which a list of runs may be used again to find forks.
MAX_AGE_S = 60
#: Maximum number of first commits that are read to find forks, unless the user asks for more.
UNASKED = 64


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a run."""

    n: int
    time_ms: int  # time of the commit, by its author's clock
    author: str  # `user@host`
    lane: Lane  # the part of the run that it changed
    kind: str  # the kind of event, in a word or two
    subject: str = ""  # the changed object
    reason: str = ""  # the reason, or the result
    checkpoint: int | None = None  # commit number of its checkpoint


def read_events(commits: Iterable[Commit], forks: Iterable[Fork] = ()) -> list[Event]:
    """Return the events of commits, and the forks of the run, oldest first."""
    found = list(_of_commits(list(commits)))
    found += [
        Event(0, one.time_ms, "", "names", "fork to", one.run, f"from {one.ref}") for one in forks
    ]
    return sorted(found, key=lambda one: one.time_ms) if forks else found


def _of_commits(commits: Sequence[Commit]) -> Iterator[Event]:
    refs = refs_of(commits)
    trains = False
    for commit in commits:
        for action in commit.actions:
            first = isinstance(action, actions.TakeOver) and not trains
            trains = trains or first
            for lane, kind, subject, reason, n in _described(action, commit.n, refs, first=first):
                yield Event(commit.n, commit.time_ms, commit.author, lane, kind, subject, reason, n)


#: Lane, kind, subject, reason, checkpoint.
_Said = tuple[Lane, str, str, str, int | None]


def _described(action: Action, n: int, refs: Mapping[int, str], *, first: bool) -> Iterator[_Said]:
    match action:
        case actions.AddCheckpoint():
            held = "held back: NaN or infinity in " + ", ".join(action.nonfinite or ())
            yield "checkpoints", "save", refs[n], held if action.held_back else "", n
        case actions.Evict():
            for one in action.evictions:
                yield "retention", "evict", named(one.checkpoint, refs), one.reason, one.checkpoint
        case actions.Thin():
            for thinned in action.thinnings:
                why = f"only {', '.join(thinned.keep)}: {thinned.reason}"
                yield "retention", "thin", named(thinned.checkpoint, refs), why, thinned.checkpoint
        case actions.Recover():
            for back in action.checkpoints:
                yield "retention", "bring back", named(back, refs), "undo", back
        case actions.SetHold():
            held, until = named(action.checkpoint, refs), format_time(action.until_ms)
            yield "retention", "hold", held, f"until {until}: {action.reason}", action.checkpoint
        case actions.RemoveHold():
            why = action.reason or "its time is over"
            yield "retention", "end hold", named(action.checkpoint, refs), why, action.checkpoint
        case actions.ReportMetrics():
            names = ", ".join(action.metrics)
            yield "checkpoints", "report", named(action.checkpoint, refs), names, action.checkpoint
        case actions.SetNote():
            kind = "note" if action.text else "remove note"
            noted = named(action.checkpoint, refs)
            yield "names", kind, noted, first_line(action.text), action.checkpoint
        case actions.SetLabels():
            yield "names", "labels", ", ".join(action.labels) or "none", "", None
        case actions.SetTag():
            yield "names", "tag", action.name, named(action.checkpoint, refs), action.checkpoint
        case actions.RemoveTag():
            yield "names", "remove tag", action.name, "", None
        case actions.SetPin():
            source = "" if action.checkpoint is None else named(action.checkpoint, refs)
            yield "names", action.kind, action.name, source, action.checkpoint
        case actions.PointRelease():
            yield "names", "latest release", action.version, action.reason, None
        case actions.Promote() | actions.EvictEntries() | actions.RateMatch():
            yield _in_pool(action)
        case actions.AppendStream():
            count = action.start + action.count
            yield "streams", "append", action.stream, f"{count:,} entries in all", None
        case actions.ArchiveStream():
            yield "streams", "archive", action.stream, action.label, None
        case _:
            yield from _of_run(action, refs, first=first)


def _of_run(action: Action, refs: Mapping[int, str], *, first: bool) -> Iterator[_Said]:
    match action:
        case actions.CreateRun():
            parent = action.parent
            if parent is None:
                yield "trainer", "begin", action.environment.get("host", ""), "", None
            else:
                origin = parent_ref(parent)
                yield "trainer", "fork", origin, "no data was copied", None
        case actions.TakeOver():
            reason = "training begins" if first else "the earlier trainer may no longer save"
            yield "trainer", "train" if first else "take over", action.host, reason, None
        case actions.Rewind():
            to = "the beginning" if action.to is None else named(action.to, refs)
            yield "trainer", "restore", to, "later checkpoints are superseded", action.to
        case actions.SetStatus():
            yield "trainer", "status", action.status, (action.reason or "").partition("\n")[0], None
        case actions.DropRun() | actions.HideRun():
            yield "trainer", "drop", "the run", action.reason, None
        case actions.UndropRun():
            yield "trainer", "undrop", "the run", "it holds what it held", None
        case actions.RaiseVersion():
            yield "trainer", "raise version", str(action.version), "older states migrate", None
        case actions.EnterPhase():
            stays = action.from_phase == action.to_phase
            kind = "pivot" if action.name else "warm start" if stays else "transition"
            subject = action.name or f"{action.from_phase} to {action.to_phase}"
            yield "phases", kind, subject, f"from {action.source}", None


def _in_pool(action: actions.Promote | actions.EvictEntries | actions.RateMatch) -> _Said:
    match action:
        case actions.Promote():
            of = action.gate or step_ref(action)
            return "pool", "promote", f"v{action.version:04d}", of, action.checkpoint
        case actions.EvictEntries():
            versions = ", ".join(f"v{version:04d}" for version in action.versions)
            return "pool", "evict", versions, action.reason, None
        case actions.RateMatch():
            played = ", ".join(f"v{one.version:04d}" for one in action.ratings)
            return "pool", "match", action.match, played, None


@dataclass(frozen=True, slots=True)
class Fork:
    """A run that was forked from another one."""

    run: str  # its name
    time_ms: int  # when it was created
    ref: str  # the checkpoint that it continues from, within the other run


def read_forks(source: Source, name: str, names: Sequence[str]) -> tuple[Fork, ...]:
    """Return the forks of a run, oldest first.

    The first commit of each run is read once. If more than `UNASKED` runs are unread, only forks
    among the others are found.
    """
    unread = source.unread_births(names)
    known = names if len(unread) <= UNASKED else sorted({*names} - {*unread})
    found = [
        Fork(child, birth.created_ms, step_ref(parent))
        for child, birth in source.births(known).items()
        if birth is not None and (parent := birth.parent) is not None and parent.run == name
    ]
    return tuple(sorted(found, key=lambda one: one.time_ms))
