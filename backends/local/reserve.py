"""The reserve of a folder: bytes and inodes that make it possible to free space on a full disk.

To free space a registry first has to write: a commit that evicts, an epoch, a mark in each run. The
reserve is many small files, since some file systems run out of inodes before they run out of bytes.
Its folder is below `.tmp/`; no listing shows it, and `clear_unfinished` skips it. It holds no data,
so it is not synced, and may be deleted and made again at any time.
"""

# Paths are strings here: making a Path costs more than many of these calls.
# ruff: noqa: PTH103, PTH208
from __future__ import annotations

import os
import re
from contextlib import suppress

from holdfast.backends.local import folders
from holdfast.backends.local.walk import TEMPORARY

RESERVE = f"{TEMPORARY}/reserve"
#: Size of one file: one block for a slot, and one block by which its folder may grow.
FILE_BYTES = 8192
#: Files in addition to one for each run: for an epoch, a long eviction, and new folders.
BASE_FILES = 32

_NAME = r"[0-9]{8}"


def keep(root: str, below: str) -> None:
    """Reserve space for a small file in each folder directly below `below`, and for some more.

    At most half of the free space becomes reserve. Failures are ignored: writing works without a
    reserve.
    """
    with suppress(OSError):
        wanted = {f"{number:08d}" for number in range(BASE_FILES + _count(f"{root}/{below}"))}
        lacking = wanted.difference(_held(root))
        names = sorted(lacking)[: _room(root)]
        if not names:
            return
        folders.refuse_links(root, RESERVE)
        os.makedirs(f"{root}/{RESERVE}", exist_ok=True)
        with folders.opened(root, RESERVE) as folder:
            for name in names:
                _make(name, folder)


def give_up(root: str, most: int | None) -> int:
    """Remove `most` files of the reserve, or all; return how many."""
    removed = 0
    with suppress(FileNotFoundError, NotADirectoryError), folders.opened(root, RESERVE) as folder:
        for name in filter(re.compile(_NAME).fullmatch, os.listdir(folder)):
            if removed == most:
                break
            with suppress(FileNotFoundError):  # another process gives it up as well
                os.unlink(name, dir_fd=folder)
                removed += 1
    return removed


def free_bytes(folder: str) -> int:
    """Return the free bytes for users, as the file system reports them."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _count(folder: str) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):
        return len(os.listdir(folder))
    return 0


def _held(root: str) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError), folders.opened(root, RESERVE) as folder:
        return os.listdir(folder)
    return []


def _room(root: str) -> int:
    """Return how many files may become reserve."""
    found = os.statvfs(root)
    by_bytes = found.f_bavail * found.f_frsize // FILE_BYTES
    # Some file systems do not report a number of inodes.
    return (min(by_bytes, found.f_favail) if found.f_files else by_bytes) // 2


def _make(name: str, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o666, dir_fd=folder)
    except FileExistsError:
        return  # another process makes the reserve as well
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, FILE_BYTES)
        else:  # macOS; a hole would take no space
            os.write(fd, os.urandom(FILE_BYTES))
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(fd)
