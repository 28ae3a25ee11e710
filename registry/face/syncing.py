"""Copy runs from one registry to another, fast-forward only, and repair one from a mirror.

History is copied byte for byte; places are the destination's own. All missing commits of a run
become visible in one slot, so a checkpoint is never visible there before its objects. Packs that
the destination has are not sent again; so an interrupted sync can be repeated. Specified in
docs/spec.md, section 15.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from holdfast.registry.errors import (
    Diverged,
    Hint,
    IntegrityError,
    InvalidInput,
    MissingObject,
    NotFound,
    UnsupportedFormat,
)
from holdfast.registry.face.factory import open  # noqa: A004
from holdfast.registry.face.registry import Registry
from holdfast.registry.history import Epochs, RunLog
from holdfast.registry.history.actions import Commit, Forget, Line, Place, line_digest
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import PackRef
from holdfast.registry.store import Address, Progress, Store, Workers, open_store
from holdfast.registry.upkeep import RepairReport
from holdfast.registry.upkeep import repair as mend
from holdfast.registry.values import Digest, near
from holdfast.registry.writing import Change, ChosenKeys, Committer, Stale, StateWriter, adopt


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
        runs: Names of the runs. Default: all of the source.
        src_storage_options: Options of the file system at the URL of the source, as for `open`.
        dst_storage_options: Options of the file system at the URL of the destination.
        executor: Its workers copy the objects, in other processes or on other machines that reach
            both registries by the same URLs (docs/scale.md). Default: threads.
        progress: Called after every pack with the number of bytes sent so far.

    Raises:
        Diverged: The destination holds commits that the source does not; nothing of that run is
            written. The message names the first commit that differs. The other runs are copied
            first, here as for `IntegrityError`.
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
        chosen = [*known, *gone] if runs is None else list(runs)
        for name in chosen:
            if name not in known and name not in gone:
                raise NotFound("no such run", where=f"{source.url}: {name}", hint=near(name, known))
        sent = _Counter(progress)
        done: list[RunSync] = []
        failed: dict[str, IntegrityError | UnsupportedFormat | Diverged] = {}
        for name in chosen:
            try:
                done.append(_copied(_RunCopy(*stores, workers, name, sent)))
            except (IntegrityError, UnsupportedFormat, Diverged) as error:
                failed[name] = error  # copy the other runs first
        if failed:
            raise _first_of(failed, [run.run_id for run in done])
        return SyncReport(tuple(done))


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


def _first_of(
    failed: dict[str, IntegrityError | UnsupportedFormat | Diverged], copied: Sequence[str]
) -> IntegrityError | UnsupportedFormat | Diverged:
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


class _Counter:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.total = 0

    def add(self, size_bytes: int) -> None:
        self.total += size_bytes
        if self._progress is not None:
            self._progress(self.total)


def _copied(run: _RunCopy) -> RunSync:
    return run.copy(Committer(run.writer).commit)


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
    ) -> None:
        self._source = source
        self._destination = destination
        self._workers = workers
        self._run_id = run_id
        self._sent = sent
        self._log = RunLog(destination, run_id)
        self.writer = StateWriter(destination, self._log)
        self._history: list[bytes] = []
        self._run = RunManifest(run_id=run_id)
        self._places: list[Place] = []
        self._present: frozenset[Digest] = frozenset()
        self._done = RunSync(run_id)

    def copy(self, commit: Callable[[Change], RunManifest]) -> RunSync:
        self._read_source()
        if not self._history:
            return self._done  # a folder among the runs that holds no log
        self._log.open()
        # Also refuses a diverged run before anything is written.
        lacking = len(self._missing(self._log.run))
        # W1: the run exists before its writer observes the epoch. Commit 0 references nothing.
        if not self._log.run.commits:
            Epochs.of(self._destination).observe()  # nobody begins a run in a frozen registry
            self._log.append(lambda run: None if run.commits else self._history[:1])
        commit(self)
        return replace(self._done, commits=lacking)

    def check(self, run: RunManifest) -> None:
        """Allow every run: `lines` refuses one that diverged."""

    def write(self) -> ChosenKeys:
        """Copy the states that the missing commits name, except packs that are there."""
        writer, here, there = self.writer.objects, self._log.run, self._run
        _ = writer.epoch  # observed before any key is chosen
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
        added = [ck for ck in there.checkpoints if ck.n >= len(self._history) - len(commits)]
        self._done = replace(self._done, checkpoints=len(added))
        self._places, choice = [], ChosenKeys()
        if commits:
            wanted = [
                place
                for place in there.places
                if place.manifest in there.held and place.manifest not in stays
            ]
            self._places, choice = adopt(
                self._source, self._destination, writer, wanted, self._count, self._workers
            )
            for digest in sorted(less):
                thinned = self.writer.thin(digest, there.thinned[digest])
                self._places.append(thinned.base.place)
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
        return [*self._places, *missing] if missing else None

    def read_again(self) -> bool:
        """Read the source again: it may have evicted or moved the missing object."""
        read = self._run.next_slot
        self._read_source()
        return self._run.next_slot != read

    def _read_source(self) -> None:
        log = RunLog(self._source, self._run_id)
        slots = list(log.slots())
        log.recall()  # evicted checkpoints are counted, too
        if any(isinstance(line, Forget) for slot in slots for _, line in slot.lines):
            raise MissingObject(
                "the source has given up this run, and may have deleted its objects",
                where=self._run_id,
                hint="Push its remaining checkpoints into a new run.",
            )
        self._history = [raw for slot in slots for raw, _ in slot.commits]
        self._run = log.fold(slots)
        log.check_head(slots)
        # If the source lost a copied commit, its next commit would differ from the copy.
        log.make_durable()

    def _missing(self, run: RunManifest) -> Sequence[bytes]:
        """Return the commit lines that are missing at the destination, given the run there."""
        shared = min(run.commits, len(self._history))
        head = run.head
        if run.commits > shared:
            head = line_digest(self._destination_history()[shared - 1])
        if shared and head != line_digest(self._history[shared - 1]):
            raise self._diverged()
        return self._history[shared:]

    def _destination_history(self) -> list[bytes]:
        return [raw for slot in self._log.slots() for raw, _ in slot.commits]

    def _diverged(self) -> Diverged:
        pairs = zip(self._history, self._destination_history(), strict=False)
        n = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), 0)
        ours = Commit.decode(self._history[n], where=self._run_id)
        return Diverged(
            "the two registries hold different histories of this run",
            where=f"{self._run_id}: commit {n}",
            expected=f"the source's, by {ours.author}",
            found="another one at the destination",
            hint="Nothing was copied. Keep one side as the run and write results there only.",
        )

    def _count(self, ref: PackRef, sent: bool) -> None:
        done = self._done
        if not sent:
            self._done = replace(done, packs_present=done.packs_present + 1)
            return
        self._done = replace(
            done,
            packs_copied=done.packs_copied + 1,
            bytes_copied=done.bytes_copied + ref.size_bytes,
        )
        self._sent.add(ref.size_bytes)
