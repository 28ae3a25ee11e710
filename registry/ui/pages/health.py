"""The health of a registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from holdfast.registry.errors import NotFound, RegistryError, StorageError, StoreUnavailable
from holdfast.registry.history import Epochs, RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import epoch_key
from holdfast.registry.saving.journal import (
    Journal,
    choose_journal,
    pushing,
    run_folders,
)
from holdfast.registry.saving.loop import last_heard
from holdfast.registry.store import WRITER_VERSION, Store
from holdfast.registry.ui.pages.runs import PAGE, newest_first
from holdfast.registry.ui.pages.view import Asked, Shown, Trouble, View, tried, trouble_of
from holdfast.registry.ui.source import FRESH_S, Source, now_ms
from holdfast.registry.upkeep import Finding, LastVerify, VerifyReport, last_verify

#: Maximum rows of a table; the page counts the rest.
SHOWN = 500
#: Maximum number of slots to read back to check that a longer log continues a shorter one.
SLOTS_BACK = 64
#: The statuses of runs that a writer may still continue.
_ALIVE = ("running", "interrupted")

MirrorState = Literal["same", "behind", "ahead", "absent", "diverged", "unknown", "unreadable"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """The newest epoch of a registry."""

    number: int = 0  # its number; 0 before any
    kind: str = ""  # what its entry is, such as `sweep`; empty before any
    time_ms: int | None = None  # when it was put, by the store's clock; `None` before any
    min_writer: int = 1  # the least version that may write
    moved_to: str | None = None  # where the registry went; `None` if it is not frozen
    trouble: Trouble | None = None  # why the epochs cannot be read


@dataclass(frozen=True, slots=True)
class Writer:
    """The trainer of a run."""

    run: str
    status: str
    host: str  # the trainer's machine; empty before the first save
    #: When it took the run over, by its clock; `None` before the first save.
    took_over_ms: int | None
    heard_ms: int  # its last sign of life
    interval_ms: int | None  # expected time between two checkpoints, if known
    is_overdue: bool  # whether it was silent for too long


@dataclass(frozen=True, slots=True)
class MirroredRun:
    """A run here and in a mirror."""

    run: str
    #: State of the mirror: `behind` if it lacks commits, `ahead` if this registry lacks them.
    #: `unknown` means that the logs have different lengths and are too long to compare.
    state: MirrorState
    here: int  # number of commits here
    there: int  # number of commits in the mirror
    trouble: Trouble | None = None  # why it cannot be read there


@dataclass(frozen=True, slots=True)
class Mirror:
    """A mirror, compared by some runs."""

    url: str  # where it is
    runs: tuple[MirroredRun, ...] = ()  # the runs that were compared
    trouble: Trouble | None = None  # why the mirror cannot be read


@dataclass(frozen=True, slots=True)
class JournalView:
    """The journal of this machine, as far as this registry is concerned."""

    path: str  # its folder
    #: The saves that are not in the registry, each with its run; at most `SHOWN`.
    waiting: tuple[tuple[str, pushing.Listed], ...] = ()
    trouble: Trouble | None = None  # why it cannot be read


@dataclass(frozen=True, slots=True)
class HealthView:
    """The health of a registry."""

    url: str  # where it is
    id: str
    created_ms: int  # when it was made
    race_probe: str  # `passed` or `skipped`: whether its store was raced for exclusive creation
    compression: str  # how chunks are stored; `none` for raw
    writer_version: int  # the version that this program writes
    remembers_heads: bool  # whether this machine notices a log that went back
    epoch: Epoch
    verified: LastVerify | None  # the last verification on this machine; `None` if there is none
    #: The trainers of the newest running or interrupted runs, the latest sign of life first.
    writers: tuple[Writer, ...]
    #: Runs among the newest that cannot be read, with the reasons.
    damaged: tuple[tuple[str, Trouble], ...]
    runs_read: int  # number of runs that were read
    pending: int  # number of runs still being read
    runs: int  # number of all runs


def health_view(source: Source, *, within_s: float | None = None) -> HealthView:
    """Return the health of a registry, by its epochs and its newest runs."""
    store = source.registry.handle.store
    epoch = source.begin(lambda: _epoch(store))
    names = source.names(max_age_s=0 if within_s is None else FRESH_S)
    opened = source.runs(newest_first(source, names)[:PAGE], within_s)
    manifests = [run.manifest for run in opened.runs.values()]
    live = [one for one in manifests if one.shown_status in _ALIVE and one.dropped is None]
    damaged = {
        name: trouble_of(error)
        for name, error in opened.failed.items()
        if not isinstance(error, NotFound)  # a stray folder is no run
    }
    return HealthView(
        source.registry.url,
        source.registry.id,
        store.config.created_ms,
        store.config.race_probe,
        store.config.compression or "none",
        WRITER_VERSION,
        store.heads is not None,
        epoch.result(),
        last_verify(store),
        tuple(sorted(map(_writer, live), key=lambda one: -one.heard_ms)),
        tuple(damaged.items()),
        len(manifests) + len(damaged),
        len(opened.pending),
        len(names),
    )


def shown_findings(report: VerifyReport) -> tuple[Finding, ...]:
    """Return the findings of a report, errors first; at most `SHOWN`."""
    return tuple(sorted(report.findings, key=lambda one: one.severity != "error")[:SHOWN])


def mirror_view(source: Source, mirror: Source) -> Mirror:
    """Compare the newest runs of a registry with those of a mirror, by their logs alone."""
    names = newest_first(source, source.names())[:PAGE]
    here = source.runs(names).runs
    try:
        there = mirror.runs(list(here))
    except StorageError as error:
        return Mirror(mirror.registry.url, (), trouble_of(error))
    rows = []
    for name, run in here.items():
        ours, failure = run.manifest, there.failed.get(name)
        if isinstance(failure, NotFound):
            rows.append(MirroredRun(name, "absent", ours.commits, 0))
        elif failure is not None:
            rows.append(MirroredRun(name, "unreadable", ours.commits, 0, trouble_of(failure)))
        else:
            theirs = there.runs[name].manifest
            state = _mirror_state(source, ours, mirror, theirs)
            rows.append(MirroredRun(name, state, ours.commits, theirs.commits))
    return Mirror(mirror.registry.url, tuple(rows))


def journal_view(source: Source, journal: Journal) -> JournalView:
    """Return the saves in a journal that this registry does not have; reads the local disk only."""
    try:
        folders = [folder for of, folder in run_folders(journal) if of == source.registry.id]
        saves = ((folder.run_id, one) for folder in folders for one in pushing.listed(folder))
        return JournalView(journal.path, tuple(islice(saves, SHOWN)))
    except RegistryError as error:
        return JournalView(journal.path, (), trouble_of(error))


def _epoch(store: Store) -> Epoch:
    epochs = Epochs.of(store)
    try:
        number = epochs.newest()
        if not number:
            return Epoch()
        header = epochs.header(number)
        put = store.backend.stat(epoch_key(number)).modified_s
        return Epoch(
            number, header.entry, int(put * 1000), header.min_writer, moved_to=header.moved_to
        )
    except StoreUnavailable:
        raise
    except RegistryError as error:
        return Epoch(trouble=trouble_of(error))


def _writer(run: RunManifest) -> Writer:
    heard, writer = last_heard(run, now_ms()), run.writer
    return Writer(
        run.run_id,
        run.status,
        "" if writer is None else writer.host,
        None if writer is None else writer.time_ms,
        heard.time_ms,
        heard.interval_ms,
        heard.is_overdue,
    )


def _mirror_state(
    source: Source, ours: RunManifest, mirror: Source, theirs: RunManifest
) -> MirrorState:
    if ours.commits == theirs.commits:
        return "same" if ours.head == theirs.head else "diverged"
    longer, shorter = (ours, theirs) if ours.commits > theirs.commits else (theirs, ours)
    store = (source if longer is ours else mirror).registry.handle.store
    follows = _follows(store, longer, shorter)
    if follows is None:
        return "unknown"
    if not follows:
        return "diverged"
    return "behind" if longer is ours else "ahead"


def _follows(store: Store, longer: RunManifest, shorter: RunManifest) -> bool | None:
    """Return whether a log continues a shorter one; `None` if that is too far back to look."""
    numbers: Sequence[int] = range(max(0, longer.next_slot - SLOTS_BACK), longer.next_slot)
    for slot in RunLog(store, longer.run_id).fetch(numbers):
        for _, commit in slot.commits:
            if commit.n == shorter.commits:  # it names the commit before it
                return commit.prev == shorter.head
    return None


@dataclass(frozen=True, slots=True)
class HealthPage:
    """Page of the registry's health."""

    health: HealthView  # the epoch, the writers and what is damaged
    journal: JournalView | None  # the journal of this machine; `None` if none is named
    report: VerifyReport | None  # the verification, if the URL asks
    findings: tuple[Finding, ...]  # its findings, errors first
    #: The mirrors, compared by the newest runs, if the URL asks.
    mirrors: tuple[Mirror, ...]
    mirror_urls: tuple[str, ...]  # where the mirrors are


def _ask(source: Source, asked: Asked) -> Shown:
    troubles: list[Trouble] = []
    # The page asks again at once for a partial answer, which must not repeat a verification.
    is_long = asked.text("verify") or asked.text("mirrors")
    health = health_view(source, within_s=None if is_long else asked.within_s)
    if health.epoch.trouble is not None:
        troubles.append(health.epoch.trouble)
    journal = choose_journal(None)
    report = tried(source.registry.verify, troubles) if asked.text("verify") else None
    page = HealthPage(
        health,
        None if journal is None else journal_view(source, journal),
        report,
        () if report is None else shown_findings(report),
        tuple(mirror_view(source, one) for one in source.mirrors) if asked.text("mirrors") else (),
        tuple(one.registry.url for one in source.mirrors),
    )
    return Shown("Health", page, tuple(troubles), is_partial=health.pending > 0)


VIEW = View("health", "Health", "/health", "health.html", _ask, place="registry")
