"""Actions in words: the changes of a commit, for a history that people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.registry.history import actions
from holdfast.registry.history.actions import Action, Commit
from holdfast.registry.history.log_values import (
    decode_or_keep,
    format_time,
    merged_from,
    parent_ref,
    step_ref,
)
from holdfast.registry.values import counted, metrics

#: Characters of a note in a list.
_LINE = 120


def refs_of(commits: Iterable[Commit]) -> dict[int, str]:
    """Return the names of checkpoints within their run, by the numbers of their commits."""
    added = ((commit.n, action) for commit in commits for action in commit.actions)
    return {n: step_ref(action) for n, action in added if isinstance(action, actions.AddCheckpoint)}


def in_words(action: Action, refs: Mapping[int, str], n: int) -> str:
    """Return an action in words."""
    match action:
        case actions.CreateRun():
            return _begun(action)
        case actions.SetStatus():
            return ", ".join([f"status {action.status}", *(action.reason or "").splitlines()])
        case actions.TakeOver():
            return f"{action.host} trains from here"
        case actions.Rewind():
            return f"go back to {'the beginning' if action.to is None else named(action.to, refs)}"
        case actions.EnterPhase():
            return _entered(action)
        case actions.DropRun() | actions.HideRun():
            return f"drop the run: {action.reason}"
        case actions.UndropRun():
            return "take the drop of the run back"
        case actions.SetLabels():
            return f"labels: {', '.join(action.labels) or 'none'}"
        case actions.RaiseVersion():
            return f"raise the schema version to {action.version}"
        case actions.AppendStream():
            return _appended(action)
        case actions.ArchiveStream():
            return f"stream {action.stream}: archived as {action.label}, and emptied"
        case actions.Claim():
            until = format_time(action.until_ms)
            taken = named(action.checkpoint, refs)
            return f"{action.group}: {action.follower} takes {taken} until {until}"
        case actions.Acknowledge():
            return f"{action.group}: done with {named(action.checkpoint, refs)}"
        case actions.Promote() | actions.RateMatch() | actions.EvictEntries():
            return _pool_in_words(action, refs)
    return _checkpoint_in_words(action, refs, n)


def first_line(text: str) -> str:
    """Return the beginning of a note, for lists."""
    line = text.partition("\n")[0]
    return line if line == text and len(line) <= _LINE else f"{line[:_LINE].rstrip()} ..."


def named(n: int | None, refs: Mapping[int, str]) -> str:
    """Return the name of a checkpoint, or `the run`; the log may name one that it does not have."""
    return "the run" if n is None else refs.get(n, f"the checkpoint of commit {n}")


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
    entries = counted(count, "entry", "entries")
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
                else named(action.checkpoint, refs)
            )
            if action.checkpoint is None and action.gate is None:
                of = f"phase {action.phase}, step {action.step}"
            rating = metrics({"mu": action.mu, "sigma": action.sigma})
            return f"pool {_entry(action.version)}: {of} {rating}{' frozen' * action.frozen}"
        case actions.RateMatch():
            rated = ", ".join(
                f"{_entry(one.version)} {metrics({'mu': one.mu, 'sigma': one.sigma})}"
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
            return _added(action, named(n, refs))
        case actions.ReportMetrics():
            tier = f" tier {action.tier}" if action.tier else ""
            return f"report {named(action.checkpoint, refs)} {metrics(action.metrics)}{tier}"
        case actions.Evict():
            evicted = (f"{named(one.checkpoint, refs)} ({one.reason})" for one in action.evictions)
            return f"evict {', '.join(evicted)}"
        case actions.Thin():
            thinned = (
                f"{named(one.checkpoint, refs)} to {', '.join(one.keep)} ({one.reason})"
                for one in action.thinnings
            )
            return f"thin {', '.join(thinned)}"
        case actions.Recover():
            return f"bring back {', '.join(named(back, refs) for back in action.checkpoints)}"
        case actions.SetHold():
            until = format_time(action.until_ms)
            return f"hold {named(action.checkpoint, refs)} until {until}: {action.reason}"
        case actions.RemoveHold():
            why = "its time is over" if action.reason is None else f"early: {action.reason}"
            return f"end the hold on {named(action.checkpoint, refs)}, {why}"
        case actions.SetNote() if not action.text:
            return f"remove the note on {named(action.checkpoint, refs)}"
        case actions.SetNote():
            return f"note on {named(action.checkpoint, refs)}: {first_line(action.text)}"
        case actions.SetTag():
            return f"tag {action.name} at {named(action.checkpoint, refs)}"
        case actions.RemoveTag():
            return f"remove tag {action.name}"
        case actions.SetPin():
            return _pinned(action, refs)
        case actions.PointRelease():
            because = f": {action.reason}" if action.reason else ""
            return f"releases/latest is {action.version}{because}"
    raise AssertionError(f"no words for {action.action}")


def _added(action: actions.AddCheckpoint, ref: str) -> str:
    sources = merged_from(decode_or_keep(action.meta))
    parts = [
        f"save {ref} {action.manifest.short}",
        metrics(action.metrics),
        f"tier {action.tier}" if action.tier else "",
        f"with {', '.join(action.companions)}" if action.companions else "",
        f"NaN or infinity in {', '.join(action.nonfinite)}" if action.nonfinite else "",
        "(held back)" if action.held_back else "",
        f"merged from {', '.join(sources)}" if sources else "",
    ]
    return " ".join(filter(None, parts))


def _pinned(action: actions.SetPin, refs: Mapping[int, str]) -> str:
    of = "" if action.checkpoint is None else f" from {named(action.checkpoint, refs)}"
    replaced = f" in place of {action.replaces.short}, damaged" if action.replaces else ""
    return f"{action.kind} {action.name}: {action.manifest.short}{of}{replaced}"
