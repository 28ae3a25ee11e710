"""Entries that a training program logs between checkpoints, in two streams, until their commit.

Numbers are for the stream `log`, texts and pictures for `log-samples`. An entry waits in memory.
The next save of its step or a later one takes it along in its commit, so that a resume goes back to
the entries of the checkpoint. Where `goes_alone` allows it, the entries also get a commit of their
own, `EVERY_S` after the first of them. Logging neither waits nor raises; what is lost is counted
and warned of. Specified in docs/spec.md, section 26.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock, Timer
from typing import Any, Protocol
from weakref import WeakSet, ref

from holdfast.backends.errors import install_extra
from holdfast.backends.escape import quoted
from holdfast.registry.curation.streams import (
    LOG,
    SAMPLES,
    AppendAttempt,
    check_entries,
    split_samples,
    stream_lifetime,
)
from holdfast.registry.errors import InvalidInput, RegistryError, StorageError
from holdfast.registry.history import RunLog, check_metrics, check_step
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.saving.save_request import SaveRequest, without_landed
from holdfast.registry.writing import Committer, NewCommit

#: Seconds after which entries are committed without a save.
EVERY_S = 60.0
#: Entries of a stream in memory, and bytes of samples; of more, as in a long outage, the oldest
#: are lost.
_MOST, _MOST_BYTES = 100_000, 64 * 2**20
_AWAY = "the store is away"
_LOGGER = logging.getLogger("holdfast")

Entries = list[dict[str, Any]]


def system_numbers() -> dict[str, float]:
    """Return how busy this machine is and what this process holds; of no other process."""
    import psutil

    memory, own = psutil.virtual_memory(), psutil.Process()
    disk, traffic = psutil.disk_usage("."), psutil.net_io_counters()
    numbers = {
        "cpu_percent": psutil.cpu_percent(),  # since the call before; 0 the first time
        "memory_percent": memory.percent,
        "process_memory_bytes": own.memory_info().rss,
        "disk_percent": disk.percent,
    }
    if traffic is not None:
        numbers |= {"sent_bytes": traffic.bytes_sent, "received_bytes": traffic.bytes_recv}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        numbers["gpu_memory_bytes"] = torch.cuda.memory_allocated()
    return {f"system/{name}": float(value) for name, value in numbers.items()}


class Owner(Protocol):
    """The handle's hold on its run."""

    @property
    def log(self) -> RunLog:
        """The log of the run."""

    @property
    def committer(self) -> Committer:
        """The committer of the handle."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held during a commit that takes the run over."""

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the owner of a run may make; it takes the run over."""


class StepLog:
    """The entries of one handle that no commit has yet."""

    def __init__(self, ownership: Owner) -> None:
        self._ownership = ownership
        #: Whether entries may be committed without a save now; `None`: never.
        self.goes_alone: Callable[[], bool] | None = None
        self.lost = 0  # number of entries that were lost
        self._told_lost = 0  # of them, those of which an entry tells
        self.begin()

    def begin(self) -> None:
        """Forget all entries: of a line of training that was left, or of a parent process."""
        self._pid = os.getpid()
        self._lock = Lock()  # of the entries; held only for moments
        self._waiting: dict[str, Entries] = {LOG: [], SAMPLES: []}
        self._bytes = 0  # of the samples that wait
        self._taken: list[SaveRequest] = []  # entries that a save has, or had when it failed
        self._is_saving = False
        self._last_step = -1  # of the last save
        #: Appends to make; the outcome of the first may be unknown.
        self._attempts: list[tuple[AppendAttempt, Entries]] = []
        self._timer: Timer | None = None
        self._told: set[str] = set()

    def add(self, values: Mapping[str, object], step: object, *, system: bool = False) -> None:
        """Take values of a step, and numbers of the machine if `system` is set."""
        if not values and not system:
            return
        try:
            made = self._entries(values, check_step(step), system=system)
        except Exception as error:  # of the library of a picture, too
            why = str(error) if isinstance(error, RegistryError) else repr(error)
            kind = getattr(error, "what", type(error).__name__)
            self._lose(1, f"step {quoted(step)}: {why}", kind)
            return
        if self._pid != os.getpid():
            self.begin()
        with self._lock:
            for name, entry in made.items():
                if self.lost > self._told_lost:
                    entry["lost"] = self._told_lost = self.lost
                self._waiting[name].append(entry)
            self._bytes += _size(made.get(SAMPLES, {}))
            excess = self._give_way()
            self._arm()
        if excess > 0:
            most = f"{_MOST:,} or {_MOST_BYTES:,} bytes of samples"
            self._lose(excess, f"more than {most} wait for a commit")

    def _entries(
        self, values: Mapping[str, object], step: int, *, system: bool
    ) -> dict[str, dict[str, Any]]:
        """Return the entries of a call, by their streams."""
        if "step" in values:
            raise InvalidInput("`step` is the name of the step, not of a number")
        numbers, samples = split_samples(values)
        found: dict[str, dict[str, Any]] = {LOG: dict(check_metrics(numbers)), SAMPLES: samples}
        if system:
            found[LOG] |= self._system_numbers()
        made = {name: {"step": step, **of} for name, of in found.items() if of}
        for name in made:
            stream_lifetime(self._ownership.log.run, name)
        if samples:
            (made[SAMPLES],) = check_entries([made[SAMPLES]])
        return made

    def _give_way(self) -> int:
        """Lose the oldest entries of too many; return how many."""
        excess = 0
        for name, entries in self._waiting.items():
            while len(entries) > _MOST or (name == SAMPLES and self._bytes > _MOST_BYTES):
                oldest = entries.pop(0)
                self._bytes -= _size(oldest)  # of numbers: nothing
                excess += 1
        return excess

    def _system_numbers(self) -> dict[str, float]:
        try:
            return system_numbers()
        except Exception as error:  # psutil raises its own, such as in a container without /proc
            if "system" not in self._told:
                self._told.add("system")
                _LOGGER.warning(
                    "%s: no numbers of the machine: %r; psutil reads them. %s",
                    self._where,
                    error,
                    install_extra("system"),
                )
            return {}

    def _arm(self) -> None:
        if self._timer is None and self.goes_alone is not None:
            self._timer = Timer(EVERY_S, _in_time, (ref(self),))
            self._timer.daemon = True
            self._timer.start()
            _open.add(self)

    def _lose(self, count: int, why: str, kind: str = "") -> None:
        self.lost += count
        if (kind or why) not in self._told:
            self._told.add(kind or why)
            _LOGGER.warning(
                "%s: entries that were logged are lost (%d so far): %s", self._where, self.lost, why
            )

    @property
    def _where(self) -> str:
        return f"{self._ownership.log.run_id}: stream {LOG} or {SAMPLES}"

    # With a save

    def for_save(self, request: SaveRequest) -> Sequence[SaveRequest]:
        """Return the entries up to a save's step, as those of saves that were not made."""
        with self._lock:
            # A save that repeats a checkpoint appends nothing; after a lost answer, order decides.
            if not request.takes_over or request.step == self._last_step or self._attempts:
                return ()
            own = self._take(request.step)
            if own:
                step, phase = request.step, request.phase
                self._taken.append(
                    SaveRequest(step=step, phase=phase, takes_over=True, streams=own)
                )
            self._is_saving = True
            return tuple(self._taken)

    def _take(self, step: float = math.inf) -> dict[str, Entries]:
        """Take the waiting entries up to a step, by stream."""
        waiting = self._waiting.items()
        taken = {name: [one for one in some if one["step"] <= step] for name, some in waiting}
        self._waiting = {
            name: [one for one in some if one["step"] > step] for name, some in waiting
        }
        self._bytes = sum(map(_size, self._waiting[SAMPLES]))
        return {name: some for name, some in taken.items() if some}

    def saved(self, request: SaveRequest | None) -> None:
        """Note that the save has ended; `None`: it failed, and its entries go with the next."""
        with self._lock:
            if request is not None and self._is_saving:
                self._last_step = request.step
                self._taken.clear()
            self._is_saving = False

    # Alone

    def flush(self, *, at_the_end: bool = False) -> None:
        """Commit all entries that wait, if that is possible now; never raises an error of ours."""
        try:
            if self._may_go():  # before the lock, which a save holds while it sends
                with self._ownership.lock:
                    self._commit()
        except StorageError as error:
            if at_the_end:
                self._lose(self._drop(), str(error))
            elif _AWAY not in self._told:
                self._told.add(_AWAY)
                _LOGGER.warning("%s: entries wait for the store: %s", self._where, error)
        except RegistryError as error:
            self._lose(self._drop(), str(error))  # such as of a run that another trainer has
        if at_the_end and (left := self._drop()):
            self._lose(left, "no save came after them")
        if at_the_end and self.lost > 1:
            _LOGGER.warning("%s: %d entries were lost in all", self._where, self.lost)

    def _may_go(self) -> bool:
        return self.goes_alone is not None and not self._is_saving and self.goes_alone()

    def _commit(self) -> None:
        if self._attempts:
            self._try()
            self._ownership.log.refresh()  # past its slot: equal entries are new ones
        # Before they are taken, since the store may be away. No save ends meanwhile.
        run = self._ownership.log.refresh() if self._taken else None
        with self._lock:
            if not self._may_go():  # a save came, whose length later entries must not be in
                return
            taken, self._taken = self._taken, []
            waiting = self._take()
        failed = taken if run is None else without_landed(taken, partial(_has_landed, run))
        for name in (LOG, SAMPLES):
            before = [entry for one in failed for entry in one.streams.get(name, ())]
            if entries := [*before, *waiting.get(name, ())]:
                attempt = AppendAttempt(self._ownership.committer, name, self._ownership.commit)
                self._attempts.append((attempt, entries))
        self._try()

    def _try(self) -> None:
        while self._attempts:
            attempt, entries = self._attempts[0]
            attempt.run(entries, None)
            del self._attempts[0]
            self._told.discard(_AWAY)

    def _drop(self) -> int:
        with self._lock:
            every: list[Sequence[object]] = [*self._take().values()]
            every += [entries for _, entries in self._attempts]
            every += [entries for one in self._taken for entries in one.streams.values()]
            self._taken, self._attempts = [], []
        return sum(map(len, every))

    def tick(self) -> None:
        """Commit what waits, and come again if something stays."""
        self.flush()
        with self._lock:
            self._timer = None
            if any(self._waiting.values()) or self._taken or self._attempts:
                self._arm()


def _has_landed(run: RunManifest, request: SaveRequest) -> bool:
    return bool(run.at_step(request.phase or run.present_phase, request.step))


def _size(entry: Mapping[str, Any]) -> int:
    """Return about how many bytes the texts and pictures of an entry take."""
    return sum(len(one) for one in entry.values() if isinstance(one, str | bytes))


def _in_time(found: ref[StepLog]) -> None:
    log = found()
    if log is not None and log._pid == os.getpid():
        log.tick()


#: The logs whose timers run.
_open: WeakSet[StepLog] = WeakSet()


def flush_all() -> None:
    """Commit what waits, at the end of the program."""
    for log in list(_open):
        if log._pid == os.getpid():
            log.flush(at_the_end=True)
