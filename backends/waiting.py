"""Watch requests to a store: log slow ones, and cut those that take too long.

A socket's timeout bounds only each single wait for bytes, so a peer that sends one byte at a time
can make a request last for ever. One thread of the process watches all running requests. It logs a
request that has waited for some seconds. When the time of a request is over, it cuts the
connection, which wakes the blocked thread.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.patience import UNREACHED, Patience, doubt

#: After this many seconds without enough bytes a line is logged.
TELL_AFTER_S = 5.0

# Many requests of one store wait at the same time, so one line is enough for all of them.
_BETWEEN_LINES_S = 30.0
# If a connection was not open yet when its time was over, check again after this time.
_AGAIN_S = 0.05
_IDLE_S = 10.0
_LOGGER = logging.getLogger("holdfast")


class Cuttable(Protocol):
    """A connection that another thread can cut."""

    def cut(self, wait: Wait) -> None:
        """Cut the connection, if it still serves `wait`."""


class Wait:
    """One running call of a store, with all its attempts.

    Args:
        what: The operation, for messages.
        where: The URL of the object.
        patience: How long it may take.
        limit: The setting that allows more time, for messages.
        writes: Whether it changes the store.
        size_bytes: How many bytes it will transfer, as far as that is known.
    """

    def __init__(
        self,
        what: str,
        where: str,
        patience: Patience,
        *,
        limit: str,
        writes: bool = False,
        size_bytes: int = 0,
    ) -> None:
        #: Bytes sent and received so far, including those of failed attempts.
        self.moved_bytes = 0
        self._what = what
        self._where = where
        self._patience = patience
        self._limit = limit
        self._writes = writes
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + patience.allowing(size_bytes).deadline_s
        self._line = _Span(TELL_AFTER_S, self._began_s)
        self._attempt: _Span | None = None
        self._connection: Cuttable | None = None
        self._expired_s: float | None = None

    @property
    def tells_s(self) -> float:
        """When a line is logged if too few bytes move until then."""
        return self._line.due_s

    def moved(self, size_bytes: int) -> None:
        """Count bytes that were sent or received."""
        self.moved_bytes += size_bytes

    def expects(self, size_bytes: int) -> None:
        """Allow time for bytes that were not known at first."""
        self._ends_s += size_bytes / self._patience.least_bytes_per_s

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Bound one attempt.

        Raises:
            StoreUnavailable: Its time was over; the original error is the cause.
        """
        with _watchdog.lock:
            self._expired_s = None
            self._attempt = _Span(self._patience.try_s, time.monotonic(), self.moved_bytes)
        _watchdog.look_by(min(self._attempt.due_s, self._ends_s))
        try:
            yield
        except Exception as error:
            if self._expired_s is not None:
                raise self._too_slow() from error
            raise
        finally:
            with _watchdog.lock:
                self._attempt = self._connection = None

    def hold(self, connection: Cuttable) -> None:
        """Set the connection that this call uses now.

        Raises:
            TimeoutError: The time of this attempt is over.
        """
        with _watchdog.lock:
            self._connection = connection
            if self._expired_s is not None:
                raise TimeoutError("the time for this request is over")

    def check(self, now_s: float) -> tuple[float, str]:
        """Cut the connection if its time is over; return the next time to check and a log line."""
        line = ""
        if self._line.is_slow(now_s, self.moved_bytes, self._patience.least_bytes_per_s):
            line = self._line_text(now_s)
            self._line = _Span(math.inf, now_s)
        return min(self._line.due_s, self._check_attempt(now_s)), line

    def _check_attempt(self, now_s: float) -> float:
        if self._attempt is None:
            return math.inf
        least = self._patience.least_bytes_per_s
        if self._expired_s is None and (
            now_s >= self._ends_s or self._attempt.is_slow(now_s, self.moved_bytes, least)
        ):
            self._expired_s = now_s
        if self._expired_s is None:
            return min(self._attempt.due_s, self._ends_s)
        if self._connection is not None:
            self._connection.cut(self)
        return now_s + _AGAIN_S

    def _line_text(self, now_s: float) -> str:
        return (
            f"{self._where}: waiting for the store ({self._what}) for {now_s - self._began_s:.0f} s"
            f" now; this request is stopped after {self._ends_s - self._began_s:.0f} s"
            f" ({self._limit})"
        )

    def _too_slow(self) -> StoreUnavailable:
        least = self._patience.least_bytes_per_s
        return StoreUnavailable(
            "the store does not answer, or answers too slowly",
            where=self._where,
            expected=f"{least:.0f} bytes a second over {self._patience.try_s:.3g} s, and an end"
            f" within {self._ends_s - self._began_s:.3g} s",
            found=f"{self.moved_bytes or 'no'} bytes in {time.monotonic() - self._began_s:.1f} s",
            hint=f"{UNREACHED}Try again later, or allow more time ({self._limit})"
            f"{doubt(self._writes)}.",
        )


class _Span:
    """A span of time in which enough bytes must move, and then the next one."""

    def __init__(self, length_s: float, began_s: float, moved_bytes: int = 0) -> None:
        self._length_s = length_s
        self._moved_bytes = moved_bytes
        self.due_s = began_s + length_s

    def is_slow(self, now_s: float, moved_bytes: int, least_bytes_per_s: float) -> bool:
        if now_s < self.due_s:
            return False
        if moved_bytes - self._moved_bytes < least_bytes_per_s * self._length_s:
            return True
        self._moved_bytes, self.due_s = moved_bytes, now_s + self._length_s
        return False


class _Watchdog:
    """The thread that watches calls; it ends after some time without calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None
        self._looks_s = math.inf
        self._silent_until_s = 0.0

    def add(self, wait: Wait) -> None:
        with self.lock:
            self._waits.add(wait)
            if self._thread is None:
                started = threading.Thread(target=self._watch, name="holdfast-waiting", daemon=True)
                # A process that is ending cannot start a thread; then only the sockets' timeouts
                # apply.
                with suppress(RuntimeError):
                    started.start()
                    self._thread = started

    def remove(self, wait: Wait) -> None:
        with self.lock:
            self._waits.discard(wait)

    def look_by(self, due_s: float) -> None:
        """Wake the thread if it would sleep longer than until a time."""
        with self._changed:
            if due_s < self._looks_s:
                self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                checked = [wait.check(now_s) for wait in self._waits]
                self._looks_s = min((due_s for due_s, _ in checked), default=now_s + _IDLE_S)
                lines = [line for _, line in checked if line]
                if not lines:
                    timeout_s = max(0.0, self._looks_s - now_s)
                    woken = self._changed.wait(min(timeout_s, threading.TIMEOUT_MAX))
                    if not woken and not checked and not self._waits:
                        self._thread = None
                        return
            if lines:
                self._tell(lines[0])

    def _tell(self, line: str) -> None:
        # Without the lock, since a log handler may be slow.
        now_s = time.monotonic()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + _BETWEEN_LINES_S
            # An error in the program's log handler must not stop the thread.
            with suppress(Exception):
                _LOGGER.warning(line)


_watchdog = _Watchdog()
_here = threading.local()


@contextmanager
def waiting(wait: Wait) -> Iterator[Wait]:
    """Watch the call that this thread makes in the block."""
    _here.wait = wait
    _watchdog.add(wait)
    _watchdog.look_by(wait.tells_s)
    try:
        yield wait
    finally:
        _watchdog.remove(wait)
        _here.wait = None


def current() -> Wait | None:
    """Return the call that this thread makes."""
    return getattr(_here, "wait", None)


def _forget() -> None:
    """Start with a new watchdog in a forked child: a fork does not copy threads."""
    global _watchdog
    _watchdog = _Watchdog()
    _here.wait = None


os.register_at_fork(after_in_child=_forget)
