"""The process of a command: signals that end it, and its standard streams.

Its signals are handled before slow imports begin, so this module imports nothing slow.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

_NOT_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED = 128 + signal.SIGINT


class Terminated(BaseException):
    """A signal asked the process to end. Not an `Exception`, so that no handler catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def end_on_signals() -> None:
    """Let SIGTERM unwind the stack, so that unfinished work is cleaned up."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise Terminated(number)


def prepare() -> None:
    """Open the streams that the caller has closed, and print escapes where an encoding is poor.

    A file that the command opens would otherwise get the number of a closed stream, and Python has
    no object for one.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding gets escapes, not a fault.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def is_unwritten(error: BaseException) -> bool:
    """Return whether an error says that the output could not be written.

    The library reports its own files as `StorageError`; a bare error of a write is of a stream.
    """
    return isinstance(error, OSError) and error.errno in _NOT_WRITTEN and error.filename is None


def give_up_output() -> None:
    """Discard the rest of the output, which the interpreter would write once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
