"""The size limit of a user's file, set by the caller, the environment or the free memory.

It bounds the bytes of a file or folder, and what a compressed one becomes. So a small file cannot
fill memory or disk, and a program can refuse what it does not expect.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.source import walk

#: The environment variable: a number of bytes, for every program and format.
VARIABLE: Final = "HOLDFAST_MAX_FILE_BYTES"
_given: ContextVar[int | None] = ContextVar("max_bytes", default=None)


@contextmanager
def limited(max_bytes: int | None) -> Iterator[None]:
    """Apply a caller's limit within a block; with `None` the environment's limit stays."""
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        raise InvalidInput(
            "not a size limit", expected="a number of bytes from 1", found=repr(max_bytes)
        )
    before = _given.set(_given.get() if max_bytes is None else max_bytes)
    try:
        yield
    finally:
        _given.reset(before)


def max_bytes() -> int | None:
    """Return the limit, in bytes; `None` if nobody has set one."""
    given = _given.get()
    text = os.environ.get(VARIABLE, "")
    if given is not None or not text:
        return given
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text)):
        raise InvalidInput(
            "not a size limit", where=VARIABLE, expected="a number of bytes", found=repr(text)[:40]
        )
    return int(text)


def check_size(size: int, path: Path, *, default: int | None = None) -> None:
    """Check a number of bytes against the limit, before they are read or made."""
    most = max_bytes()
    most = default if most is None else most
    if most is not None and size > most:
        raise InvalidInput(
            "the file is larger than the size limit",
            where=path,
            expected=f"at most {most} bytes",
            found=f"{size} bytes",
            hint=f"If you trust its writer, raise the limit: max_bytes=, --max-bytes, {VARIABLE}.",
        )


def check_room(size: int, path: Path | str, *, copies: int = 1) -> None:
    """Check that the decompressed file is within the limit and fits into memory."""
    check_size(size, Path(path))
    available = available_bytes()
    size *= copies
    if size > available:
        raise IncompatibleState(
            "it does not fit into memory",
            where=path,
            expected=f"at most {available} bytes",
            found=f"{size} bytes",
        )


def check_path(path: Path) -> None:
    """Check the size of a file or folder, if there is a limit."""
    if max_bytes() is None or not path.exists():
        return
    check_size(_size_of(path), path)


def _size_of(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(seen.st_size for _, seen in walk(path) if not stat.S_ISDIR(seen.st_mode))


def available_bytes() -> int:
    """Return the memory that can be taken without swapping, as the system sees it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.removesuffix("kB")) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
