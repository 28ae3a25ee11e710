"""Handlers for SIGTERM, SIGINT and SIGUSR1 that only set flags and are removed at the end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_LOGGER = logging.getLogger("holdfast")
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: Handlers that Python or the system installed; a handler of ours replaces them and calls none.
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


class SignalHandlers:
    """Handlers that note the requests of signals."""

    def __init__(self, wake: Callable[[int], None]) -> None:
        self._wake = wake
        self._previous: dict[signal.Signals, Any] = {}
        self._wakeup_fd = -1
        self._interrupts = 0
        self._is_removed = False
        self.stop: int | None = None  # the first SIGTERM or SIGINT
        self.save = False  # whether a SIGUSR1 still waits for its save

    def install(self, wakeup_fd: int) -> None:
        """Install the handlers, if this is the main thread: Python allows it nowhere else."""
        if threading.current_thread() is not threading.main_thread():
            _LOGGER.info("signals are not handled: this is not the main thread")
            return
        for signum in _HANDLED:
            before = signal.getsignal(signum)
            if before is None:
                _LOGGER.warning("%s has a handler that is not Python's; it is kept", signum.name)
            elif signum != signal.SIGINT or before != signal.SIG_IGN:  # ignored in the background
                self._previous[signum] = signal.signal(signum, self._handle)
        taken = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        if taken != -1:
            signal.set_wakeup_fd(taken)
        else:
            self._wakeup_fd = wakeup_fd
        _installed.append(self)

    def remove(self) -> None:
        """Restore the earlier handlers, unless somebody has replaced ours meanwhile."""
        if self not in _installed:
            return
        _installed.remove(self)
        for signum, before in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, before)
        if self._wakeup_fd != -1:
            taken = signal.set_wakeup_fd(-1)
            if taken != self._wakeup_fd:  # an event loop has started meanwhile
                signal.set_wakeup_fd(taken)
        self._is_removed = True

    def pass_on(self) -> None:
        """Raise a SIGTERM or SIGINT again that came too late for the loop."""
        if self.stop is not None and self._previous.get(signal.Signals(self.stop)) in _DEFAULTS:
            signal.raise_signal(self.stop)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_removed:  # otherwise a handler that replaced this one is calling it
            self._note(signum)
        before = self._previous.get(signal.Signals(signum))
        if callable(before) and before not in _DEFAULTS:
            before(signum, frame)

    def _note(self, signum: int) -> None:
        # No logging here: the handler may run in the middle of a write to the same stream.
        if signum == signal.SIGUSR1:
            self.save = True
            return
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1 and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop is None:
            self.stop = signum
        self._wake(signum)


#: The handlers of this process; normally those of one block.
_installed: list[SignalHandlers] = []


def _in_child() -> None:
    """Restore the earlier handlers in a forked child, such as a worker that loads data."""
    for handlers in reversed(list(_installed)):
        handlers.remove()


os.register_at_fork(after_in_child=_in_child)

_END = 0


class Deadline:
    """Calls a function some time after the first request to stop, unless it is cancelled."""

    def __init__(
        self, seconds: float, on_request: Callable[[int], None], on_late: Callable[[int], None]
    ) -> None:
        self._seconds, self._on_request, self._on_late = seconds, on_request, on_late
        self._cancelled = threading.Event()
        #: `fd` takes signal numbers, one byte each, and never blocks.
        self._reading, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._thread = threading.Thread(target=self._watch, name="holdfast-deadline", daemon=True)
        self._thread.start()

    def begin(self, signum: int) -> None:
        """Start, as if this signal had come; only the first call counts."""
        with suppress(BlockingIOError):  # a full pipe has a request in it already
            os.write(self.fd, bytes([signum]))

    def cancel(self) -> None:
        """End the thread; requests are then ignored."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            self.begin(_END)
            self._thread.join()

    def close(self) -> None:
        """End the thread and close the pipe, once nobody writes to it any more."""
        self.cancel()
        os.close(self._reading)
        os.close(self.fd)

    def _watch(self) -> None:
        while not self._cancelled.is_set():
            # Other signals that have Python handlers come through the pipe too.
            for signum in os.read(self._reading, 64):
                if signum in (signal.SIGTERM, signal.SIGINT):
                    self._on_request(signum)
                    if not self._cancelled.wait(self._seconds):
                        self._on_late(signum)
                    return
