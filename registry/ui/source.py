"""The registry behind the pages: it keeps runs open, reads several at once, counts requests.

All views share two bounded pools of threads: `OPENERS` threads read runs and logs, and wait for
small requests in the pool of the handle.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from holdfast.backends.wrappers import Metered, ReadOnly
from holdfast.registry.curation import Namings, read_namings
from holdfast.registry.errors import (
    IntegrityError,
    RegistryError,
    StoreUnavailable,
    UnsupportedFormat,
)
from holdfast.registry.face import Registry, Run, open_on
from holdfast.registry.history import Birth, LogEnd, RunLog, Seals, birth_of, read_birth
from holdfast.registry.history.actions import Commit
from holdfast.registry.store import Address, choose_cache
from holdfast.registry.store.heads import open_heads
from holdfast.registry.ui.samples import Pictures

#: Number of runs and logs that are read at once; each waits for a few small requests.
OPENERS = 32
#: Seconds for which a run that was read for one part of a table is not read again for the rest.
FRESH_S = 5.0

_T = TypeVar("_T")
#: Maximum number of slots to read unless a caller asks for more; the newest of a longer log.
LONGEST = 2000
#: Slots of the first part, and of each other: a page shows a part while older ones are read.
_FIRST, _MORE = 64, 512


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of opening the runs that a view asked for."""

    runs: dict[str, Run]  # the readable runs, by name
    failed: dict[str, RegistryError]  # the errors of unreadable runs, by name
    pending: tuple[str, ...]  # runs that were not read in time; reading continues

    def joined(self, other: Opened) -> Opened:
        """Return one result for these runs and those of another batch."""
        return Opened(
            self.runs | other.runs, self.failed | other.failed, self.pending + other.pending
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A run that a thread is reading, or has just read."""

    began_s: float
    outcome: Future[Run]

    @property
    def is_fresh(self) -> bool:
        """Whether another view may use its outcome."""
        return not self.outcome.done() or time.monotonic() - self.began_s < FRESH_S


class Source:
    """A registry that views read. A run is opened once; later calls read only new commits."""

    def __init__(self, registry: Registry, meter: Metered) -> None:
        self.registry = registry
        self.meter = meter  # the counts of requests
        self.place = registry.url  # the name of the registry in snippets
        self.mirrors: tuple[Source, ...] = ()  # copies of the registry to compare with
        self.pictures = Pictures()
        self._lock = threading.Lock()
        self._listed: tuple[float, list[str]] = (-math.inf, [])
        self._runs: dict[str, Run] = {}
        self._noted: dict[str, Run] = {}  # sealed runs as their notes tell them
        self._noting: dict[str, Future[None]] = {}  # the reading of notes, by the runs looked for
        self._ends: dict[str, LogEnd] = {}  # how their logs ended when they were read last
        self._chronicles: dict[str, Chronicle] = {}
        self._namings: dict[str, Future[Namings]] = {}
        self._births: dict[str, Birth | None] = {}
        self._opening: dict[str, _Reading] = {}
        self._reading: dict[tuple[str, int], Future[Chronicle]] = {}
        self._threads = ThreadPoolExecutor(OPENERS, "holdfast-ui")

    @classmethod
    def open(cls, address: Address, *, cache: str | None = None) -> Self:
        """Open the registry at an address, read-only; `cache` as for `holdfast.open`."""
        backend = address.open()
        meter = Metered(ReadOnly(backend))
        try:
            chunks = choose_cache(cache, is_remote=address.is_remote())
            heads = open_heads(address.location(backend))
            return cls(open_on(meter, heads=heads, cache=chunks), meter)
        except BaseException:
            backend.close()
            raise

    def close(self) -> None:
        """Stop reading, and close the registry."""
        self._threads.shutdown(cancel_futures=True)
        self.registry.close()

    def names(self, *, max_age_s: float = 0) -> list[str]:
        """Return the names of all runs, sorted: one request for a thousand runs."""
        at_s, names = self._listed
        if time.monotonic() - at_s > max_age_s:
            names = self.registry.run_names()
            self._listed = time.monotonic(), names
        return list(names)

    def run(self, name: str) -> Run:
        """Return a run at its head: one request if it is open already and did not change."""
        with self._lock:
            known = self._runs.get(name)
        if known is not None:
            return self._refreshed(known)
        found = self.registry.run(name)
        with self._lock:
            return self._runs.setdefault(name, found)

    def runs(self, names: Sequence[str], within_s: float | None = None) -> Opened:
        """Return several runs at their heads, read at once.

        A later call for the other runs does not read the finished ones again. Sealed runs in which
        nothing happened are not asked, and many of them are taken from their notes at first.
        """
        until = None if within_s is None else time.monotonic() + within_s
        with self._lock:
            noting = {one: self._noting[one] for one in names if one in self._noting}
        # What other calls note may be older than this one: it counts as known.
        _, late = wait(noting.values(), timeout=within_s)
        with self._lock:
            known = {**self._noted, **self._runs}
            ends = [self._ends[one] for one in names if one in self._ends and one in known]
            unknown = [one for one in names if one not in known and one not in self._noting]
        seals = Seals(self.registry.handle.store, ends, len(names), len(unknown))
        reading = self.begin(lambda: self._read_notes(seals, unknown))
        with self._lock:
            self._noting |= (own := dict.fromkeys(unknown, reading))
        for name in filter(seals.is_announced, unknown):  # no note tells these
            self._begin(name, seals.newest)
        noting |= own
        late |= wait([reading], until and max(0, until - time.monotonic())).not_done
        with self._lock:
            self._ends |= (quiet := seals.quiet(ends))
            kept = {one: known[one] for one in quiet}
            # After an error the runs are opened.
            kept |= {one: self._noted[one] for one in unknown if one in self._noted}
        futures = {
            name: self._begin(name, seals.newest)
            for name in names
            if name not in kept and noting.get(name) not in late
        }
        _, unread = wait(futures.values(), timeout=until and max(0, until - time.monotonic()))
        runs: dict[str, Run] = {}
        failed: dict[str, RegistryError] = {}
        for name, future in futures.items():
            if future in unread:
                continue
            if not unread:
                with self._lock:
                    self._opening.pop(name, None)
            try:
                runs[name] = future.result()
            except StoreUnavailable:
                raise
            except RegistryError as error:
                failed[name] = error
        found = runs | kept
        runs = {name: found[name] for name in names if name in found}
        return Opened(runs, failed, tuple(name for name in names if name not in {*runs, *failed}))

    def chronicle(
        self, name: str, *, most: int = LONGEST, within_s: float | None = None
    ) -> Chronicle:
        """Return the commits of a run as far as `run` has read it: one request for each new slot.

        Of a run that cannot be opened, as many as possible are read.
        """
        while True:
            reading = self.begin_chronicle(name, most=most)
            wait([reading], timeout=within_s)
            with self._lock:
                if not reading.done():
                    return self._chronicles.get(name, Chronicle(pending=most))
                self._reading.pop((name, most), None)
            found = reading.result()
            if not self._is_behind(name, found):
                return found

    def begin_chronicle(self, name: str, *, most: int = LONGEST) -> Future[Chronicle]:
        """Start to read the commits of a run; `chronicle` then waits for them."""
        with self._lock:
            reading = self._reading.get((name, most))
            if reading is None:
                reading = self.begin(lambda: self._read_chronicle(name, most))
                self._reading[name, most] = reading
            return reading

    def begin(self, read: Callable[[], _T]) -> Future[_T]:
        """Start to read something while the caller reads something else."""
        return self._threads.submit(read)

    def begin_namings(self, run: Run) -> Future[Namings]:
        """Start to read who named what in a run; commits that were read are not read again."""
        with self._lock:
            before = self._namings.get(run.id)
            if before is not None and not before.done():
                return before
            known = Namings() if before is None or before.exception() else before.result()
            found = self._namings[run.id] = self.begin(lambda: read_namings(run.handle.log, known))
            return found

    def births(self, names: Sequence[str]) -> dict[str, Birth | None]:
        """Return the beginnings of runs: one request for each that was not read before.

        An open run has its own. A run whose beginning cannot be read has `None`.
        """
        unknown = self.unread_births(names)
        store = self.registry.handle.store
        read = store.pools.small.map(lambda name: read_birth(store, name), unknown)
        found = dict(zip(unknown, read, strict=True))
        with self._lock:
            self._births.update(found)
            return {name: self._births[name] for name in names}

    def unread_births(self, names: Sequence[str]) -> list[str]:
        """Return the names whose beginnings were not read yet."""
        with self._lock:
            for name, run in (self._noted | self._runs).items():
                if name not in self._births:
                    self._births[name] = birth_of(run.manifest)
            return [name for name in names if name not in self._births]

    def _is_behind(self, name: str, found: Chronicle) -> bool:
        """Return whether a run was read further since its commits were."""
        with self._lock:
            run = self._runs.get(name)
        return run is not None and found.next_slot < run.manifest.next_slot

    def _read_chronicle(self, name: str, most: int) -> Chronicle:
        with self._lock:
            run, known = self._runs.get(name), self._chronicles.get(name)
        if known is not None and known.errors:
            known = None  # what is damaged may be restored meanwhile
        log = RunLog(self.registry.handle.store, name) if run is None else run.handle.log
        end = log.length() if run is None else log.run.next_slot
        found = Chronicle()
        for found in read_on(log, known, end, most):
            with self._lock:
                self._chronicles[name] = found
        return found

    def _refreshed(self, run: Run) -> Run:
        try:
            return run.refresh()
        except RegistryError:
            with self._lock:  # the next call opens it again: the log may have been restored
                self._runs.pop(run.id, None)
                self._noted.pop(run.id, None)
                self._chronicles.pop(run.id, None)
                self._namings.pop(run.id, None)
            raise

    def _read(self, name: str, notes: int | None) -> Run:
        run = self.run(name)
        end = run.handle.log.end(notes)
        if end is not None:
            with self._lock:
                self._ends[name] = end
        return run

    def _read_notes(self, seals: Seals, names: Sequence[str]) -> None:
        """Read those of some runs that nobody has changed since a collector noted them."""
        found = seals.noted(names, lambda log: Run(self.registry.handle.run_handle(log)))
        with self._lock:
            self._noted |= found
            ends = (run.handle.log.end(seals.newest) for run in found.values())
            self._ends |= {end.run: end for end in ends if end}

    def _begin(self, name: str, notes: int | None) -> Future[Run]:
        """Start to read a run; `notes` is the newest table that was listed before."""
        with self._lock:
            known = self._opening.get(name)
            if known is None or not known.is_fresh:
                reading = self._threads.submit(self._read, name, notes)
                known = self._opening[name] = _Reading(time.monotonic(), reading)
            return known.outcome


def now_ms() -> int:
    """Return the time of this machine, in milliseconds since the epoch."""
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class Chronicle:
    """The commits of a run, oldest first."""

    commits: tuple[Commit, ...] = ()
    first_slot: int = 0  # their first slot; above 0 if older slots were not read
    next_slot: int = 0  # the slot after the last one that was read
    #: The errors of slots that could not be read; their commits are absent.
    errors: tuple[IntegrityError | UnsupportedFormat, ...] = ()
    pending: int = 0  # number of older slots still being read


def read_on(log: RunLog, known: Chronicle | None, end: int, most: int) -> Iterator[Chronicle]:
    """Yield chronicles that grow: new slots first, then older ones; one request for each slot."""
    first = max(0, end - most)
    found = known or Chronicle(first_slot=max(first, end - _FIRST), next_slot=end - _FIRST)
    if found.next_slot < end:
        commits, errors = _read(log, max(found.next_slot, found.first_slot), end)
        found = replace(
            found,
            commits=(*found.commits, *commits),
            errors=(*found.errors, *errors),
            next_slot=end,
        )
    yield replace(found, pending=max(0, found.first_slot - first))
    while found.first_slot > first:
        start = max(first, found.first_slot - _MORE)
        commits, errors = _read(log, start, found.first_slot)
        found = replace(
            found,
            commits=(*commits, *found.commits),
            errors=(*errors, *found.errors),
            first_slot=start,
        )
        yield replace(found, pending=start - first)


def _read(
    log: RunLog, start: int, end: int
) -> tuple[list[Commit], list[IntegrityError | UnsupportedFormat]]:
    """Return the commits of slots, and the errors of those that are damaged."""
    commits: list[Commit] = []
    errors: list[IntegrityError | UnsupportedFormat] = []
    while start < end:
        try:
            for slot in log.fetch(range(start, end)):
                commits.extend(commit for _, commit in slot.commits)
                start += 1
        except (IntegrityError, UnsupportedFormat) as error:
            errors.append(error)
            start += 1  # slots after a damaged one can still be read
    return commits, errors
