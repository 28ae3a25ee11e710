"""The standard streams of the command: opened, able to print any text, given up if they are full.

Imports nothing slow: it runs before the commands are imported.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

_NOT_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
