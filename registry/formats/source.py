"""Read a file of the user: open it once, check that it is a file and that it does not change.

A trainer may be writing the file that is being pushed. So its bytes are read into memory before
anything is committed, and never mapped: a mapping would be read while the commit is made, and a
file that gets shorter under a mapping kills the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from holdfast.registry.errors import AccessDenied, InvalidInput, StorageError
from holdfast.registry.values.parse_limits import check_json

#: The hint for a file that is not of the format that its name promises.
KEEP = "To keep its bytes unread, push it under a name that ends otherwise, such as .bin."


def unsound(program: str, where: object, rule: str, expected: object, found: object) -> NoReturn:
    """Refuse a file of a program, and name the rule of its format that it breaks.

    Raises:
        InvalidInput: Always.
    """
    text = None if found is None else str(found)
    raise InvalidInput(
        f"not a sound {program} file: {rule}",
        where=where,
        expected=expected,
        found=text if text is None or len(text) <= 200 else f"{text[:200]}...",
        hint=KEEP,
    )


@contextmanager
def stable(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; fail at the end of the block if it changed meanwhile.

    Raises:
        InvalidInput: There is no such file, it is not a regular file, or it changed meanwhile.
        AccessDenied: The user may not read it.
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
        # Without O_NONBLOCK the open of a pipe would never return.
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
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "something else"
            raise InvalidInput("not a file", where=path, found=kind)
        if not found.st_size:
            _check_empty(fd, path)
        return os.fdopen(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _check_empty(fd: int, path: Path) -> None:
    """Refuse a file of the system, as in /proc, whose size is always 0: its bytes would be lost."""
    try:
        data = os.pread(fd, 1, 0)
    except OSError as error:
        raise StorageError("the file cannot be read", where=path, found=error) from error
    if data:
        raise InvalidInput(
            "the file has bytes, but the system says that its size is 0",
            where=path,
            hint="Copy it to another file first.",
        )


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_exactly(file: BinaryIO, into: memoryview, path: Path) -> None:
    """Fill memory from the current position of the file.

    Raises:
        InvalidInput: The file is too short.
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


def sha256_of(file: BinaryIO) -> bytes:
    """Return the SHA-256 of a file from its current position to its end."""
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


def json_value(data: bytes, where: object) -> Any:
    """Return the JSON that a part of a file holds.

    Raises:
        InvalidInput: It is no JSON, or would take too much memory.
    """
    check_json(data, where=where, kind=InvalidInput)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("not JSON", where=where, found=error) from error


def json_object(data: bytes, where: object) -> dict[str, Any]:
    """Return the JSON object that a part of a file holds; the errors are those of `json_value`."""
    found = json_value(data, where)
    if not isinstance(found, dict):
        raise InvalidInput("not a JSON object", where=where, found=type(found).__name__)
    return found
