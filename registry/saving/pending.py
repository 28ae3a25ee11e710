"""Saves in the background: one runs; with `supersede` a second one waits, with its own copy.

`Background` decides what a save does if an earlier one is running. The caller,
`holdfast.registry.saving.pipeline`, copies and saves the states.

`holdfast.registry.saving.ending` sets the status of the runs afterwards.

At its end Python closes every thread pool, joins its threads, and then runs `atexit` callbacks. A
save that still needs a pool would fail silently. So this module runs before the pools are closed:
it waits for the running saves, and reports each save that was lost.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import IO, Any, Generic, Literal, NoReturn

from holdfast.registry.errors import Conflict, InvalidInput, StorageError, UnsupportedValue
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving import ending as ending
from holdfast.registry.saving.logged import flush_all
from holdfast.registry.saving.save_request import Save, copied
from holdfast.registry.store import Threads
from holdfast.registry.values import HERE, one_of
from holdfast.registry.writing import Staging

#: Environment variable: seconds that the end of a program waits for its running saves.
EXIT_WAIT = "HOLDFAST_EXIT_WAIT_S"
DEFAULT_EXIT_WAIT_S = 600.0
#: Exit status of a program that lost a save: Python's own for an error in its cleanup.
LOST_STATUS = 120
_INTERRUPTED_STATUS = 130
#: The wait is logged after this time, and then in each interval of the second one.
_SILENT_S = 1.0
_REMINDER_S = 60.0

_LOGGER = logging.getLogger("holdfast")

#: A save during an earlier save waits for it, is skipped, or waits in a second copy until a newer
#: save replaces it.
Busy = Literal["wait", "skip", "supersede"]
Outcome = Literal["running", "saved", "failed", "skipped", "superseded"]


class PendingSave:
    """A running save. The program may change its state meanwhile.

    Attributes:
        name: Run and step, for messages.
        waited_s: Seconds for which the call waited for an earlier save.
        exit_wait_s: Seconds that the end of the program waits for this save.
    """

    def __init__(
        self,
        future: Future[Checkpoint],
        name: str,
        exit_wait_s: float = DEFAULT_EXIT_WAIT_S,
        waited_s: float = 0.0,
    ) -> None:
        self._future = future
        self._is_reported = False
        self._given_up: Literal["skipped", "superseded"] | None = None
        self._pid = os.getpid()
        self.name = name
        self.waited_s = waited_s
        self.exit_wait_s = exit_wait_s
        _unreported.add(self)
        future.add_done_callback(self._forget_if_saved)

    def __repr__(self) -> str:
        return f"<PendingSave {self.name} {self.outcome}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedValue(
            "a running save cannot be pickled or copied",
            where=self.name,
            hint="Wait for it, and pass the ref of the checkpoint that `wait` returns.",
        )

    @property
    def outcome(self) -> Outcome:
        """`running`, `saved` or `failed`; `skipped` or `superseded` if it was not made."""
        if self._given_up is not None or not self._future.done():
            return self._given_up or "running"
        return "saved" if self._future.exception() is None else "failed"

    def done(self) -> bool:
        """Return whether it has finished or failed."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Return the checkpoint once its commit is durable.

        Raises:
            RegistryError: The save failed. Nothing of it is visible; after StoreUnavailable the
                outcome is unknown.
            Conflict: It was skipped or superseded, because an earlier save was running.
            TimeoutError: It is not finished in time.
        """
        try:
            return self._future.result(timeout_s)
        except BaseException as error:
            # Not if the wait was interrupted or timed out.
            if self._future.done() and self._future.exception() is error:
                self.mark_reported()
            raise

    def settle(self) -> None:
        """Wait; raise the error of the save, unless `wait` has raised it already.

        Another rank's error of an earlier save is logged: the ranks would end each other's saves
        for ever.
        """
        error: Any = self._future.exception()
        if error is not None and not self._is_reported:
            if getattr(error, "is_earlier", False):
                self.mark_reported()
                _LOGGER.error("%s: %s", self.name, error)
                return
            error.is_earlier = True  # ranks that save together pass this on
            self.wait()

    def give_up(self, outcome: Literal["skipped", "superseded"]) -> None:
        """End a save that never started: it is skipped, or a newer one replaces it."""
        self._given_up = outcome
        HERE.add("saves_total", outcome=outcome, run=self.name.partition(": ")[0])
        self.mark_reported()
        _LOGGER.info("%s: %s, because an earlier save was running", self.name, outcome)
        self._future.set_exception(
            Conflict(
                f"this save was {outcome}, because an earlier one was running",
                where=self.name,
                hint="With busy='wait' the call waits for the earlier save instead.",
            )
        )

    def mark_reported(self) -> None:
        """Leave the error of this save to `wait` from now on."""
        self._is_reported = True
        _unreported.discard(self)

    def _forget_if_saved(self, done: Future[Checkpoint]) -> None:
        if done.exception() is None:
            _unreported.discard(self)


#: Running saves, and failed saves whose errors were not reported yet.
_unreported: set[PendingSave] = set()


def exit_wait_s() -> float:
    """Return the seconds that the end of the program waits for a save, from the environment."""
    given = os.environ.get(EXIT_WAIT, "")
    try:
        limit_s = float(given) if given else DEFAULT_EXIT_WAIT_S
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < math.inf:
        raise InvalidInput(
            "not a time to wait for saves at the end of the program",
            where=EXIT_WAIT,
            expected="a number of seconds from 0",
            found=repr(given),
        )
    return limit_s


def _here() -> list[PendingSave]:
    """Return the saves of this process; a forked process also has copies of its parent's saves."""
    return [pending for pending in list(_unreported) if pending._pid == os.getpid()]


def _finish() -> None:
    """Wait for the running saves; end the program if they take too long."""
    under_way = [pending for pending in _here() if not pending.done()]
    status = LOST_STATUS
    try:
        late = _wait_for(under_way)
        why = "the wait took too long"
    except KeyboardInterrupt:
        late = [pending for pending in under_way if not pending.done()]
        why, status = "the wait was interrupted", _INTERRUPTED_STATUS
    _report_failures()
    for pending in late:
        _LOGGER.error(
            "%s: the save was not finished: it was running when the program ended, and %s "
            "(%s is %g)",
            pending.name,
            why,
            EXIT_WAIT,
            pending.exit_wait_s,
        )
    if late:
        end_at_once(status)
    flush_all()


def _wait_for(under_way: Sequence[PendingSave]) -> list[PendingSave]:
    """Wait for saves; return those that are not done in time."""
    limit_s = max((pending.exit_wait_s for pending in under_way), default=0.0)
    began, pause_s = time.monotonic(), _SILENT_S
    while True:
        left_s = began + limit_s - time.monotonic()
        wait([pending._future for pending in under_way], timeout=max(0.0, min(pause_s, left_s)))
        late = [pending for pending in under_way if not pending.done()]
        left_s = began + limit_s - time.monotonic()
        if not late or left_s <= 0:
            return late
        _LOGGER.warning(
            "%s: still being saved; the program ends afterwards, or in %.0f s (%s). "
            "Ctrl-C ends it at once",
            ", ".join(pending.name for pending in late),
            left_s,
            EXIT_WAIT,
        )
        pause_s = _REMINDER_S


def _report_failures() -> None:
    """Report failed saves that nobody has waited for."""
    for pending in _here():
        error = pending._future.exception() if pending.done() else None
        if error is not None:
            pending.mark_reported()
            _LOGGER.error("%s: the save failed: %s: %s", pending.name, type(error).__name__, error)
            if sys.stderr is not None and not isinstance(sys.stderr, _FailsAtTheEnd):
                sys.stderr = _FailsAtTheEnd(sys.stderr)


class _FailsAtTheEnd:
    """A stream whose last flush fails: Python then ends with status 120, after all its cleanup.

    `os._exit` would also set a status, but it skips `atexit` callbacks and loses unwritten files.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save was lost")


def end_at_once(status: int) -> NoReturn:
    """End the process at once: Python would wait for its threads, which may never end."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


# `concurrent.futures` closes its pools by the same function; the last callback is called first. A
# Python without it calls `_finish` after its threads end: then saves have no time limit. A program
# that is already ending saves in the foreground: `holdfast.registry.store.threads.Threads`.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_finish)
# For saves that threads began after the main thread had ended; all are finished by then.
atexit.register(_report_failures)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Checkpoints of a run that only this machine's journal holds."""

    entries: int  # number of waiting saves and changes of the status
    size_bytes: int  # bytes of their states
    oldest_ms: int | None  # time when the oldest was acknowledged, in milliseconds since the epoch
    refused: int  # saves that the run does not allow
    stranded: int  # saves behind another machine's takeover
    damaged: int  # saves whose bytes here are damaged


def check_busy(busy: object) -> None:
    """Refuse a value that is not a `Busy`."""
    one_of(busy, Busy, what="not a policy for a save during another save", where="busy")


class Forgiven(Exception):
    """A save failed, and the training run continues."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(str(error))
        self.error = error  # the failure


@dataclass(slots=True, eq=False)
class _Job(Generic[Save]):
    """A save with its copy."""

    #: The save; its states are in the memory `side`. `None` once it has ended.
    save: Save | None
    side: int  # which of the two memories
    future: Future[Checkpoint]  # its result
    pending: PendingSave  # what the caller holds
    has_begun: bool = False  # whether the thread has taken it


class Background(Generic[Save]):
    """The thread of a saver's saves, and the memory of their copies."""

    def __init__(
        self, make: Callable[[Save], Checkpoint], copy: Callable[[Staging, FlatState], FlatState]
    ) -> None:
        self._make: Callable[[Save], Checkpoint] = make
        self._copy = copy
        self.reset()

    def reset(self) -> None:
        """Forget everything, in a forked process: thread and saves belong to the parent."""
        self._threads: Threads | None = None
        self._stagings: tuple[dict[str, Staging], dict[str, Staging]] = ({}, {})
        #: Running, or failed with an error that was not raised yet.
        self._jobs: list[_Job[Save]] = []
        self._running: _Job[Save] | None = None
        self._waiting: _Job[Save] | None = None
        self._lock = Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self._running is not None

    def submit(self, prepared: Save, name: str, exit_wait_s: float, waited_s: float) -> PendingSave:
        """Copy a save and start it; if another one is running, keep the copy and wait.

        One thread at a time may call this. The new save replaces a waiting one, which ends as
        `superseded`.
        """
        with self._lock:
            replaced, self._waiting = self._waiting, None
            running = self._running
            side = replaced.side if replaced else 1 - running.side if running else 0
        if replaced is not None and replaced.save is not None:
            request = prepared.request.after([replaced.save.request])
            prepared = replace(prepared, request=request)
            self._forget(replaced)
            replaced.pending.give_up("superseded")
        memory = self._stagings[side]
        copy = copied(
            prepared, lambda part, flat: self._copy(memory.setdefault(part, Staging()), flat)
        )
        future: Future[Checkpoint] = Future()
        job = _Job(copy, side, future, PendingSave(future, name, exit_wait_s, waited_s))
        try:
            if self._threads is None:
                self._threads = Threads(1, "holdfast-save")
            self._jobs.append(job)
            with self._lock:
                if self._running is None:
                    self._running = job
                else:
                    self._waiting = job
            self._threads.submit(self._run, job)
        except BaseException as error:  # an interrupt, or another thread closes the handle
            self._take_back(job, error)
            raise
        return job.pending

    def _take_back(self, job: _Job[Save], error: BaseException) -> None:
        """End a job that no thread has begun: others would wait for it for ever."""
        with self._lock:
            if job.has_begun:
                return
            self._running = None if self._running is job else self._running
            self._waiting = None if self._waiting is job else self._waiting
        self._forget(job)
        job.pending.mark_reported()
        job.future.set_exception(error)

    def settle(self) -> None:
        """Wait for every save; raise the first error that was not raised already."""
        for job in list(self._jobs):
            try:
                job.pending.settle()
            finally:
                # After an interrupted wait the save still runs: its copy may not be overwritten.
                if job.pending.done():
                    self._forget(job)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until no save is running or waiting; their errors stay."""
        _, late = wait([job.future for job in list(self._jobs)], timeout_s)
        if late:
            raise TimeoutError(f"{len(late)} saves are not finished")

    def raise_failure(self) -> None:
        """Raise the error of a save that has failed already."""
        for job in [job for job in self._jobs if job.pending.done()]:
            self._forget(job)
            job.pending.settle()

    def _forget(self, job: _Job[Save]) -> None:
        # Another thread may have forgotten it too.
        self._jobs = [one for one in self._jobs if one is not job]

    def close(self) -> None:
        """Stop the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _run(self, job: _Job[Save]) -> None:
        with self._lock:
            if job is self._waiting:
                self._running, self._waiting = job, None
            if job is not self._running:
                return  # a newer save has replaced it
            job.has_begun = True
        assert job.save is not None
        try:
            made = self._make(job.save)
        except Forgiven as forgiven:
            self._end(job)
            job.pending.mark_reported()
            job.future.set_exception(forgiven.error)
        except BaseException as error:
            self._end(job)
            job.future.set_exception(error)
        else:
            self._end(job)
            job.future.set_result(made)

    def _end(self, job: _Job[Save]) -> None:
        job.save = None  # thousands of objects, which the next call would free while it blocks
        with self._lock:
            self._running = None
