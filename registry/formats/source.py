"""A file of the user's that is read: opened once, checked to be a file, and unchanged afterwards.

A trainer may be writing the very file that is being pushed. Its bytes are therefore brought into
memory before anything is committed, never mapped: a mapping would be read while the commit is made,
and a file cut short under a mapping ends the process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from holdfast.registry.errors import AccessDenied, InvalidInput, StorageError


@contextmanager
def stable(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; fail at the end of the block if it changed meanwhile.

    Raises:
        InvalidInput: There is no such file, it is none, or it changed while it was read.
        AccessDenied: It may not be read.
    """
    with _open(path) as file:
        before = _identity(os.fstat(file.fileno()))
        yield file
        try:
            after = _identity(path.stat())
        except OSError:
            after = ()
        if not before == after == _identity(os.fstat(file.fileno())):
            raise InvalidInput(
                "the file changed while it was read",
                where=path,
                hint="Nothing was stored. Push it again once its writer is done.",
            )


def _open(path: Path) -> BinaryIO:
    try:
        # Without O_NONBLOCK a pipe would hold us for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise InvalidInput("no such file", where=path) from error
    except PermissionError as error:
        raise AccessDenied(
            "the file may not be read", where=path, found=f"user id {os.geteuid()}"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidInput("the file cannot be opened", where=path, found=error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            kind = "a folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "something else"
            raise InvalidInput("not a file", where=path, found=kind)
        return os.fdopen(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_exactly(file: BinaryIO, into: memoryview, path: Path) -> None:
    """Fill memory from where the file stands.

    Raises:
        InvalidInput: The file ends before that.
    """
    done = 0
    while done < len(into):
        try:
            count = file.readinto(into[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise StorageError("the file cannot be read", where=path, found=error) from error
        if not count:
            raise InvalidInput(
                "the file ended while it was read",
                where=path,
                expected=f"{len(into)} bytes",
                found=f"{done} bytes",
            )
        done += count
