"""Wait for saves in the background, and finish them when the program ends.

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
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Literal, NoReturn

from holdfast.registry.errors import Conflict, InvalidInput, UnsupportedValue
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving import ending as ending

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

    Args:
        future: The save.
        name: Run and step.
        exit_wait_s: Seconds that the end of the program waits for it.
        waited_s: Seconds for which the call waited for an earlier save.
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
        """Wait; raise the error of the save, unless `wait` has raised it already."""
        if self._future.exception() is not None and not self._is_reported:
            self.wait()

    def give_up(self, outcome: Literal["skipped", "superseded"]) -> None:
        """End a save that never started: it is skipped, or a newer one replaces it."""
        self._given_up = outcome
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
            _fail_at_the_end()


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


def _fail_at_the_end() -> None:
    if sys.stderr is not None and not isinstance(sys.stderr, _FailsAtTheEnd):
        sys.stderr = _FailsAtTheEnd(sys.stderr)


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
    """Checkpoints of a run that only this machine's journal holds.

    Attributes:
        entries: Number of waiting saves and changes of the status.
        size_bytes: Bytes of their states.
        oldest_ms: Time when the oldest was acknowledged, in milliseconds since the epoch.
        refused: Saves that the run does not allow.
        stranded: Saves behind another machine's takeover.
        damaged: Saves whose bytes here are damaged.
    """

    entries: int
    size_bytes: int
    oldest_ms: int | None
    refused: int
    stranded: int
    damaged: int
