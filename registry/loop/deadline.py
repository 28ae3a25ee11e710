"""The thread that ends a process that was asked to stop and takes too long.

It is woken through a pipe: by Python's C handler, which writes the number of each signal to it at
once, even while the program is in foreign code where no handler written in Python can run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

_END = 0


class Deadline:
    """Calls a function some time after the first request to stop, unless it is cancelled.

    Args:
        seconds: The time.
        on_request: Called with the signal of the first request, in a thread of its own.
        on_late: Called with that signal when the time has passed.

    Attributes:
        fd: The end of the pipe that takes signal numbers, one byte each. It never blocks.
    """

    def __init__(
        self,
        seconds: float,
        on_request: Callable[[int], None],
        on_late: Callable[[int], None],
    ) -> None:
        self._seconds, self._on_request, self._on_late = seconds, on_request, on_late
        self._cancelled = threading.Event()
        self._reading, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._thread = threading.Thread(target=self._watch, name="holdfast-deadline", daemon=True)
        self._thread.start()

    def begin(self, signum: int) -> None:
        """Begin, as if this signal had come; only the first call counts."""
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
