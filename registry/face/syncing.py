"""Copy runs from one registry to another, fast-forward only, and repair one from a mirror.

History is copied byte for byte; places are the destination's own. All missing commits of a run
become visible in one slot, so a checkpoint is never visible there before its objects. Packs that
the destination has are not sent again; so an interrupted sync can be repeated. This machine
remembers which runs were equal, so that the next sync asks little, and reads only new slots.
Specified in docs/spec.md, section 15.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from holdfast.registry.errors import (
    Archived,
    Diverged,
    Hint,
    IntegrityError,
    InvalidInput,
    Malformed,
    MissingObject,
    NotFound,
    UnsupportedFormat,
)
from holdfast.registry.face.compared import Compared, Equal
from holdfast.registry.face.factory import open  # noqa: A004
from holdfast.registry.face.registry import Registry
from holdfast.registry.history import Epochs, RunLog, Signature, signatures_of
from holdfast.registry.history.actions import (
    AddCheckpoint,
    Commit,
    Forget,
    Free,
    Line,
    Place,
    line_digest,
)
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import PackRef
from holdfast.registry.store import Address, Claims, Progress, Store, Workers, open_store, results
from holdfast.registry.upkeep import RepairReport, given_up
from holdfast.registry.upkeep import repair as mend
from holdfast.registry.values import Digest, near
from holdfast.registry.writing import Change, ChosenKeys, Committer, Stale, StateWriter, adopt

_LOGGER = logging.getLogger("holdfast")
#: Errors of one run: the other runs are copied first.
_OfARun = Archived | IntegrityError | UnsupportedFormat | Diverged
_OF_A_RUN = (Archived, IntegrityError, UnsupportedFormat, Diverged)


@dataclass(frozen=True, slots=True)
class RunSync:
    """The part of a sync that copied one run."""

    run_id: str
    commits: int = 0  # commits that were missing at the destination
    checkpoints: int = 0  # checkpoints among them
    packs_copied: int = 0  # packs that were sent
    packs_present: int = 0  # packs that the destination had
    bytes_copied: int = 0  # bytes of packs that were sent


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a sync.

    Attributes:
        runs: Counts of the copied history, run by run.
    """

    runs: tuple[RunSync, ...]

    @property
    def bytes_copied(self) -> int:
        """Bytes of packs that were sent."""
        return sum(run.bytes_copied for run in self.runs)


def sync(
    src: str | os.PathLike[str] | Registry,
    dst: str | os.PathLike[str] | Registry,
    runs: Iterable[str] | None = None,
    *,
    src_storage_options: Mapping[str, Any] | None = None,
    dst_storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> SyncReport:
    """Bring the destination's runs up to the source's.

    Args:
        src: Registry to read, or its URL. Open it by `holdfast.open` to choose a transport, or
            for a file system object.
        dst: Registry to write, or its URL; it must exist.
        runs: Names of the runs. Default: all of the source, but for those that it has given up.
        src_storage_options: Options of the file system at the URL of the source, as for `open`.
        dst_storage_options: Options of the file system at the URL of the destination.
        executor: Its workers copy the objects, in other processes or on other machines that reach
            both registries by the same URLs (docs/scale.md). Default: threads.
        progress: Called after every pack with the number of bytes sent so far.

    Raises:
        Diverged: The destination holds commits that the source does not; nothing of that run is
            written. The other runs are copied first, as for `Archived` and `IntegrityError`.
        Archived: A pack that the destination lacks has to be restored first.
        NotFound: The source has no such run, or one of the two is no registry.
        InvalidInput: Both are the same place, options are given beside an open registry, or the
            executor's workers cannot reach a registry; nothing is copied then.
        IntegrityError: Something of the source is damaged or gone; it is not copied.
        RolledBack: The log of a run, in either registry, is older than when this machine saw it.
        WorkersFailed: The executor's workers died. Runs that were copied stay; call it again.
    """
    with ExitStack() as stack:
        source = _opened(src, src_storage_options, "src", stack)
        destination = _opened(dst, dst_storage_options, "dst", stack)
        if source.url == destination.url:
            raise InvalidInput("a registry cannot be synced to itself", where=source.url)
        stores = source.handle.store, destination.handle.store
        workers = Workers(executor, *stores, writes=True)
        seen = stores[0].heads.all() if stores[0].heads is not None else {}
        known = source.run_names()
        # A run that was seen before and is gone is refused, like a log that went back.
        gone = sorted(seen.keys() - set(known))
        chosen = [*known, *gone] if runs is None else list(dict.fromkeys(runs))
        for name in chosen:
            if name not in known and name not in gone:
                raise NotFound("no such run", where=f"{source.url}: {name}", hint=near(name, known))
        compared = Compared(*stores)
        equal = compared.still_equal(chosen)
        sent, claims = _Counter(progress), Claims()

        def copied(name: str) -> RunSync | _OfARun:
            since = compared.before.get(name)
            run = _RunCopy(*stores, workers, name, sent, claims, since)
            try:
                done = run.copy(Committer(run.writer).commit)
            except _OF_A_RUN as error:
                if since is None:
                    return error
                del compared.before[name]
                return copied(name)  # compared whole: that says what is wrong
            compared.note(run.theirs, run.log)
            return done

        rest = [name for name in chosen if name not in equal]
        try:
            if executor is None and len(rest) > 1:
                pool = stores[1].pools.runs
                found = dict(
                    zip(rest, results([pool.submit(copied, one) for one in rest]), strict=True)
                )
            else:
                found = {name: copied(name) for name in rest}
        finally:
            compared.keep(known)
        failed = {name: one for name, one in found.items() if not isinstance(one, RunSync)}
        passed = given_up(stores[0]) if failed and runs is None else {}
        for name in [one for one in failed if passed.get(one)]:
            _LOGGER.warning("%s is not copied: the source has given it up", name)
            del failed[name]
            chosen.remove(name)
        _copy_signatures(*stores, {one: compared.commits_of(one) for one in chosen}, runs)
        done = [found.get(name) or RunSync(name) for name in chosen]
        reports = [one for one in done if isinstance(one, RunSync)]
        if failed:
            raise _first_of(failed, [run.run_id for run in reports])
        return SyncReport(tuple(reports))


def repair(
    damaged: str | os.PathLike[str] | Registry,
    mirror: str | os.PathLike[str] | Registry,
    *,
    deep: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Restore missing and damaged objects of a registry, while others write and collect.

    Every byte is verified before it is written. Logs, epochs and `registry.json` are not
    rebuilt: only a backup of this registry has them.

    Args:
        damaged: The registry to repair, or its URL.
        mirror: A registry that holds the same states, or its URL.
        deep: Read and hash everything to find damage, instead of names and sizes only.
        dry_run: Only report; write nothing.
        progress: Called with the number of bytes checked so far.

    Returns:
        A report with `.ok`, `.mended` and `.left`.

    Raises:
        InvalidInput: The mirror is this very registry.
        NotFound: There is no registry at a URL.
        UnsupportedFormat: The damaged registry demands a newer writer.
    """
    with ExitStack() as stack:
        target = _opened(damaged, None, "damaged", stack)
        if isinstance(mirror, Registry):
            source = mirror.handle.store
        else:
            source = open_store(Address(mirror), read_only=True)
            stack.callback(source.close)
        return mend(target.handle.store, source, deep=deep, dry_run=dry_run, progress=progress)


def _first_of(failed: dict[str, _OfARun], copied: Sequence[str]) -> _OfARun:
    error = next(iter(failed.values()))
    done = f"Copied or up to date: {', '.join(copied) or 'none'}."
    error.hints = Hint.of(f"Not copied: {', '.join(failed)}. {done}", error.hints)
    return error


def _opened(
    place: str | os.PathLike[str] | Registry,
    options: Mapping[str, Any] | None,
    side: str,
    stack: ExitStack,
) -> Registry:
    if not isinstance(place, Registry):
        return stack.enter_context(open(place, storage_options=options))
    if options:
        raise InvalidInput(
            f"{side}_storage_options beside a registry that is open",
            where=place.url,
            found=", ".join(sorted(options)),
            hint="Give them to `holdfast.open`.",
        )
    return place


def _copy_signatures(
    source: Store, destination: Store, commits: Mapping[str, int], runs: Iterable[str] | None
) -> None:
    """Copy the signatures of commits that both have, byte for byte."""
    for name in [None] if runs is None else commits:
        theirs = {key for key in signatures_of(source, name) if key.n < commits.get(key.run_id, 0)}
        if missing := theirs.difference(signatures_of(destination, name) if theirs else ()):
            Epochs.of(destination).observe()  # nobody writes to a frozen registry
            destination.prepare_writing()
        for key in sorted(missing):
            try:
                data = source.backend.get(str(key))
                Signature.read(data, key)
                destination.backend.put_if_absent(str(key), data)
            except IntegrityError as error:  # `verify --signed` reports it
                _LOGGER.warning("a signature is not copied: %s", error)


class _Counter:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = Lock()
        self.total = 0

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self.total += size_bytes
            if self._progress is not None:
                self._progress(self.total)


class _RunCopy(Change):
    """The sync of one run."""

    noun = "sync"

    def __init__(
        self,
        source: Store,
        destination: Store,
        workers: Workers,
        run_id: str,
        sent: _Counter,
        claims: Claims,
        since: Equal | None,
    ) -> None:
        self._source, self._destination, self._run_id = source, destination, run_id
        self._workers, self._sent, self._claims, self._since = workers, sent, claims, since
        self.theirs = RunLog(source, run_id)
        self.log = RunLog(destination, run_id)
        self.writer = StateWriter(destination, self.log)
        self._history: list[tuple[bytes, Commit]] = []  # the commits of the source since
        self._run = RunManifest(run_id=run_id)
        self._places: list[Place] = []
        self._present: frozenset[Digest] = frozenset()
        self._done = RunSync(run_id)

    def copy(self, commit: Callable[[Change], RunManifest]) -> RunSync:
        self._read_source()
        if not self._run.commits:
            return self._done  # a folder among the runs that holds no log
        self.log.open()
        # Also refuses a diverged run before anything is written.
        lacking = len(self._missing(self.log.run))
        # W1: the run exists before its writer observes the epoch. Commit 0 references nothing.
        if not self.log.run.commits:
            Epochs.of(self._destination).observe()  # nobody begins a run in a frozen registry
            self.log.append(lambda run: None if run.commits else self._missing(run)[:1])
        commit(self)
        return replace(self._done, commits=lacking)

    def check(self, run: RunManifest) -> None:
        """Allow every run: `lines` refuses one that diverged."""

    def write(self) -> ChosenKeys:
        """Copy the states that the missing commits name, except packs that are there."""
        writer, here, there = self.writer.objects, self.log.run, self._run
        writer.observe()  # before any key is chosen
        commits = self._missing(here)
        self._present = frozenset(here.by_manifest.keys() & here.held & there.held)
        self._thinned = here.thinned
        differs = {d for d in self._present if here.thinned.get(d) != there.thinned.get(d)}
        # A state that the source has thinned gets a new place with the destination's own objects.
        less = {d for d in differs if self._has_more(here, d)}
        stays = self._present - (differs - less)
        unplaced = there.held - there.by_manifest.keys()
        if unplaced:
            raise MissingObject(
                "the source gives no place for a state that it holds",
                where=f"{self._run_id}/{min(unplaced).short}",
                hint="Run `holdfast verify` there. Nothing of this run was copied.",
            )
        lacking = self._history[len(self._history) - len(commits) :]
        actions = [action for _, commit in lacking for action in commit.actions]
        added = sum(isinstance(action, AddCheckpoint) for action in actions)
        self._done = replace(self._done, checkpoints=added)
        self._places, choice = [], ChosenKeys()
        if commits:
            copied = there.held - stays
            wanted = [place for place in there.places if place.manifest in copied]
            stores, count = (self._source, self._destination), self._count
            self._places, choice = adopt(
                *stores, writer, wanted, count, self._workers, claims=self._claims
            )
            for digest in sorted(less):
                thinned = self.writer.thin(digest, there.thinned[digest])
                self._places.append(thinned.state.place)
                choice |= thinned.chosen
        return choice

    def _has_more(self, here: RunManifest, digest: Digest) -> bool:
        """Return whether the destination holds all of a state that the source holds in part."""
        names = self._run.thinned.get(digest)
        return names is not None and set(names) <= set(here.thinned.get(digest, names))

    def lines(self, run: RunManifest) -> Sequence[Line | bytes] | None:
        """Return the missing commits, byte for byte, after their places."""
        missing = self._missing(run)
        if missing and not (self._present <= run.held and self._thinned == run.thinned):
            raise Stale  # the destination no longer holds a state that was not copied because of it
        # What the source has freed it does not give any more.
        is_freed = self._run.freed_at is not None
        lacks = is_freed and not self._run.uses.keys() <= run.by_manifest.keys()
        return [*self._places, *missing, *([Free()] if lacks else [])] if missing else None

    def read_again(self) -> bool:
        """Read the source again: it may have evicted or moved the missing object."""
        read = self._run.next_slot
        self._read_source()
        return self._run.next_slot != read

    def _read_source(self) -> None:
        since = self._since
        log = self.theirs = RunLog(self._source, self._run_id)
        if since is None:
            slots = list(log.slots())
        else:
            log.open()
            slots = list(log.fetch(range(since.source.slots, log.run.next_slot)))
        if any(isinstance(line, Forget) for slot in slots for _, line in slot.lines):
            raise MissingObject(
                "the source has given up this run, and may have deleted its objects",
                where=self._run_id,
                hint="Push its remaining checkpoints into a new run.",
            )
        self._history = [commit for slot in slots for commit in slot.commits]
        if since is None:
            log.recall()  # an undo names what was evicted before
            log.fold(slots)
            log.check_head(slots)
        elif not self._continues(log.run, since):
            raise Malformed("the log does not continue from the comparison", where=self._run_id)
        self._run = log.run
        # If the source lost a copied commit, its next commit would differ from the copy.
        log.make_durable()

    def _continues(self, run: RunManifest, since: Equal) -> bool:
        """Return whether the commits since a comparison lead from it to the run that was opened."""
        heads = [since.head, *(line_digest(raw) for raw, _ in self._history)]
        chained = [commit.prev for _, commit in self._history] == heads[:-1]
        return chained and (run.commits, run.head) == (since.commits + len(heads) - 1, heads[-1])

    def _missing(self, run: RunManifest) -> Sequence[bytes]:
        """Return the commit lines that are missing at the destination, given the run there."""
        lines, since = [raw for raw, _ in self._history], self._since
        before = 0 if since is None else since.commits  # commits that both have
        shared = min(run.commits, before + len(lines))
        head = run.head
        if run.commits > shared:
            head = line_digest(self._destination_history()[shared - 1])
        heads = [None if since is None else since.head, *map(line_digest, lines)]
        if shared < before or head != heads[shared - before]:
            raise self._diverged()
        return lines[shared - before :]

    def _destination_history(self) -> list[bytes]:
        return [raw for slot in self.log.slots() for raw, _ in slot.commits]

    def _diverged(self) -> Diverged | Malformed:
        if self._since is not None:
            return Malformed("the destination is not as it was compared", where=self._run_id)
        pairs = zip([raw for raw, _ in self._history], self._destination_history(), strict=False)
        n = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), 0)
        return Diverged(
            "the two registries hold different histories of this run",
            where=f"{self._run_id}: commit {n}",
            expected=f"the source's, by {self._history[n][1].author}",
            found="another one at the destination",
            hint="Nothing was copied. Keep one side as the run and write results there only.",
        )

    def _count(self, ref: PackRef, sent: bool) -> None:
        done, size = self._done, ref.size_bytes
        if not sent:
            self._done = replace(done, packs_present=done.packs_present + 1)
            return
        copied, nbytes = done.packs_copied + 1, done.bytes_copied + size
        self._done = replace(done, packs_copied=copied, bytes_copied=nbytes)
        self._sent.add(size)
