"""The latest release, the tags and the labels of a run: who set each of them, and when.

A run manifest does not say who. The commits do: they are read from the newest one back, and no
further than these names need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from holdfast.registry.history import RunLog
from holdfast.registry.history.actions import (
    Commit,
    CreateRun,
    PointRelease,
    SetLabels,
    SetPin,
    SetTag,
)
from holdfast.registry.history.replay import Pin, RunManifest

#: Slots that are read at first, and then at a time.
_FIRST, _MORE = 16, 256


@dataclass(frozen=True, slots=True)
class Naming:
    """The latest release, a tag or a label of a run."""

    run: str
    kind: str  # `release`, `tag` or `label`
    name: str  # the version, the tag or the label
    pin: Pin | None  # what the name keeps; `None` for a label, which is the run's
    author: str | None = None  # who set it: a claim; `None` if its commit was not read
    time_ms: int | None = None  # since when, by that author's clock

    @property
    def ref(self) -> str:
        """The ref of what it names; of a label the run."""
        return self.run if self.pin is None else f"{self.run}/{self.pin.ref}"


@dataclass(frozen=True, slots=True)
class Namings:
    """The names of a run as of one of its commits."""

    commits: int = 0  # how many commits the run had
    found: tuple[Naming, ...] = ()  # the release first, then the tags, then the labels


def read_namings(log: RunLog, known: Namings = Namings()) -> Namings:
    """Return the names of a run; the commits of `known` are not read again."""
    run = log.run
    if run.commits == known.commits:
        return known
    # Labels that nobody replaced are from the first commit.
    is_first = run.labels is None and bool(run.labels_now) and not known.commits
    return names_of(run, chain(_back(log, int(is_first)), _back(log, run.next_slot)), known)


def names_of(run: RunManifest, commits: Iterable[Commit], known: Namings = Namings()) -> Namings:
    """Return the names of a run by its commits, the newest first."""
    found = {(one.kind, one.name): one for one in _names(run)}
    unsettled: set[tuple[str, str]] = {*found}
    for commit in commits if found else ():
        if commit.n < known.commits:
            before = {(one.kind, one.name): one for one in known.found}
            found |= {key: before[key] for key in unsettled & before.keys()}
            break
        for action in commit.actions[::-1]:
            match action:
                case SetPin(kind="release", name=name) | PointRelease(version=name):
                    set_now = settled = unsettled & {("release", name)}
                case SetTag(name=name):
                    set_now = settled = unsettled & {("tag", name)}
                case SetLabels() | CreateRun():
                    labels = {key for key in unsettled if key[0] == "label"}
                    set_now = {key for key in labels if key[1] in (action.labels or ())}
                    settled = labels if isinstance(action, CreateRun) else labels - set_now
                case _:
                    continue
            for key in set_now:
                found[key] = replace(found[key], author=commit.author, time_ms=commit.time_ms)
            unsettled -= settled
        if not unsettled:
            break
    else:  # an older commit, which was not read, may have set these labels already
        found |= {key: replace(found[key], author=None, time_ms=None) for key in unsettled}
    return Namings(run.commits, tuple(found.values()))


def _names(run: RunManifest) -> Iterator[Naming]:
    if run.dropped is not None:
        return
    release = None if run.release is None else run.pin("release", run.release)
    for pin in ([release] if release else []) + run.pins_of("tag"):
        yield Naming(run.run_id, pin.kind, pin.name, pin)
    for label in run.labels_now:
        yield Naming(run.run_id, "label", label, None)


def _back(log: RunLog, stop: int) -> Iterator[Commit]:
    """Yield the commits before a slot, the newest first."""
    size = _FIRST
    while stop > 0:
        start = max(0, stop - size)
        for slot in [*log.fetch(range(start, stop))][::-1]:
            yield from (commit for _, commit in slot.commits[::-1])
        stop, size = start, _MORE
