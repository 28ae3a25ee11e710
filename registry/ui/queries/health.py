"""The health of a registry: its epoch, its writers, mirrors, the journal of this machine, findings.

The first view reads the epochs and the newest runs. A verification reads every log and placement,
and is asked for apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from holdfast.registry.errors import NotFound, RegistryError, StorageError, StoreUnavailable
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.journal import pushing
from holdfast.registry.journal.folder import RunFolder, run_folders
from holdfast.registry.journal.settings import Journal
from holdfast.registry.loop.last_heard import last_heard
from holdfast.registry.maintenance.findings import Finding, VerifyReport
from holdfast.registry.maintenance.last_verify import LastVerify, last_verify
from holdfast.registry.storage.keys import epoch_key
from holdfast.registry.storage.store import WRITER_VERSION, Store
from holdfast.registry.ui.queries.runs import PAGE, newest_first
from holdfast.registry.ui.queries.trouble import Trouble, trouble_of
from holdfast.registry.ui.source import FRESH_S, Source, now_ms

#: Rows of tables; the rest is counted.
SHOWN = 500
#: Slots that are read back to find out whether two logs of different length are one history.
SLOTS_BACK = 64
#: The statuses of runs that a writer may still continue.
_ALIVE = ("running", "interrupted")

MirrorState = Literal["same", "behind", "ahead", "absent", "diverged", "unknown", "unreadable"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """The newest epoch of a registry.

    Attributes:
        number: Its number; 0 before any.
        kind: `sweep` or `upgrade`; empty before any.
        time_ms: When it was put, by the store's clock; `None` before any.
        min_writer: The least version that may write.
        trouble: Why the epochs cannot be read.
    """

    number: int = 0
    kind: str = ""
    time_ms: int | None = None
    min_writer: int = 1
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class Writer:
    """The trainer of a run.

    Attributes:
        run: The run.
        status: The run's status.
        host: The trainer's machine; empty before the first save.
        took_over_ms: When it took the run over, by its clock; `None` before the first save.
        heard_ms: When it was last heard of.
        interval_ms: Expected time between two checkpoints, if something tells it.
        is_overdue: Whether it was silent for too long.
    """

    run: str
    status: str
    host: str
    took_over_ms: int | None
    heard_ms: int
    interval_ms: int | None
    is_overdue: bool


@dataclass(frozen=True, slots=True)
class MirroredRun:
    """A run here and in a mirror.

    Attributes:
        run: The run.
        state: What the mirror is, seen from here: it is `behind` if commits are missing there, and
            `ahead` if they are missing here. `unknown` says that the logs have different lengths
            and are too long to compare.
        here: Number of commits here.
        there: Number of commits in the mirror.
        trouble: Why it cannot be read there.
    """

    run: str
    state: MirrorState
    here: int
    there: int
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class Mirror:
    """A mirror, compared by some runs.

    Attributes:
        url: Where it is.
        runs: The runs that were compared.
        trouble: Why the mirror cannot be read.
    """

    url: str
    runs: tuple[MirroredRun, ...] = ()
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A save that is only in the journal of this machine.

    Attributes:
        run: Its run.
        number: Its number in the journal.
        title: Its phase and step.
        outcome: `waiting`, `stranded`, `refused` or `damaged`.
        reason: Why it is not in the registry.
        time_ms: When it was acknowledged, by this machine's clock; `None` if it is damaged.
        size_bytes: Its bytes on the disk.
    """

    run: str
    number: int
    title: str
    outcome: str
    reason: str | None
    time_ms: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class JournalView:
    """The journal of this machine, as far as this registry is concerned.

    Attributes:
        path: Its folder.
        waiting: The saves that are not in the registry; at most `SHOWN`.
        trouble: Why it cannot be read.
    """

    path: str
    waiting: tuple[Waiting, ...] = ()
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class HealthView:
    """The health of a registry.

    Attributes:
        url: Where it is.
        id: Its own id.
        created_ms: When it was made.
        race_probe: `passed` or `skipped`: whether its store was raced for exclusive creation.
        compression: How chunks are stored; `none` for raw.
        writer_version: The version that this program writes.
        remembers_heads: Whether this machine would see that a log went back.
        epoch: The newest epoch.
        verified: The last verification on this machine; `None` if there is none.
        writers: The trainers of the newest runs that are running or were interrupted, the one that
            was heard of last first.
        damaged: Runs among the newest that cannot be read, with the reasons.
        runs_read: How many runs were looked at.
        pending: How many more are still being read.
        runs: How many there are.
    """

    url: str
    id: str
    created_ms: int
    race_probe: str
    compression: str
    writer_version: int
    remembers_heads: bool
    epoch: Epoch
    verified: LastVerify | None
    writers: tuple[Writer, ...]
    damaged: tuple[tuple[str, Trouble], ...]
    runs_read: int
    pending: int
    runs: int


def health_view(source: Source, *, count: int = PAGE, within_s: float | None = None) -> HealthView:
    """Return the health of a registry, by its epochs and its newest runs.

    Args:
        source: The registry.
        count: How many of the newest runs to look at.
        within_s: Seconds after which runs that were not read yet are left out as pending.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    store = source.registry.store
    epoch = source.begin(lambda: _epoch(store))
    names = source.names(max_age_s=0 if within_s is None else FRESH_S)
    opened = source.runs(newest_first(source, names)[:count], within_s)
    manifests = [run.manifest for run in opened.runs.values()]
    live = [one for one in manifests if one.status in _ALIVE and one.dropped is None]
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


def check(source: Source) -> VerifyReport:
    """Verify the structure of the registry; reads every log and placement, and no data.

    Raises:
        StorageError: The store does not answer.
    """
    return source.registry.verify()


def shown_findings(report: VerifyReport) -> tuple[Finding, ...]:
    """Return the findings of a report, errors first; at most `SHOWN`."""
    return tuple(sorted(report.findings, key=lambda one: one.severity != "error")[:SHOWN])


def mirror_view(source: Source, mirror: Source, *, count: int = PAGE) -> Mirror:
    """Compare the newest runs of a registry with those of a mirror, by their logs alone.

    Args:
        source: The registry.
        mirror: The other one.
        count: How many of the newest runs to compare.

    Raises:
        StoreUnavailable: The registry does not answer; a silent mirror is said in the result.
    """
    names = newest_first(source, source.names())[:count]
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
        waiting = tuple(islice((one for folder in folders for one in _waiting(folder)), SHOWN))
        return JournalView(journal.path, waiting)
    except RegistryError as error:
        return JournalView(journal.path, (), trouble_of(error))


def _epoch(store: Store) -> Epoch:
    epochs = Epochs.of(store)
    try:
        number = epochs.observe()
        if not number:
            return Epoch()
        header = epochs.entry(number)[0]
        put = store.backend.stat(epoch_key(number)).modified_s
        return Epoch(number, header.entry, int(put * 1000), header.min_writer)
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
    store = (source if longer is ours else mirror).registry.store
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


def _waiting(folder: RunFolder) -> Iterator[Waiting]:
    for one in pushing.listed(folder):
        entry = one.entry
        yield Waiting(
            folder.run_id,
            one.number,
            "" if entry is None else entry.title,
            one.outcome,
            one.reason,
            None if entry is None else entry.time_ms,
            one.size_bytes,
        )
