"""Read and write single files: many buffers at once, durably, and with errors of our own.

Owns the system calls of the local backend. It knows paths and buffers, but no keys and no root.
"""

# Paths are strings here: making a Path costs more than many of these calls.
# ruff: noqa: PTH108, PTH112, PTH116, PTH120
from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from holdfast.backends.base import truncated
from holdfast.backends.errors import (
    AccessDenied,
    InvalidLocation,
    ObjectNotFound,
    ReadOnlyStore,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)

try:
    from fcntl import F_FULLFSYNC, fcntl  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # only macOS has it, where fsync does not flush the cache of the drive
    F_FULLFSYNC = None

#: The most buffers of one system call.
IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))

#: The system's errors for a full disk or quota.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
#: Inodes are used up if there are fewer than this, and at least this many more bytes than needed.
_FEW_FILES, _SLACK = 16, 2**20
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY}


def now_s(path: str) -> float:
    """Return the time by the clock of the file system, seconds since the epoch.

    Args:
        path: The name of a file that is written for this and removed again.
    """
    fd = open_new(path)
    try:
        # A file server sets its own time at a write, but not always when a file is made.
        os.write(fd, b"now")
        sync(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        remove(path)


def remove(path: str) -> None:
    """Remove an unfinished file of our own."""
    # A collector may have removed it already.
    with suppress(FileNotFoundError):
        os.unlink(path)


def open_new(path: str, mode: int = 0o666) -> int:
    """Make a file for writing."""
    # Unless a mode is given, the umask decides who may read it, as for every file of the user.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Write buffers in order without joining them."""
    for batch in _batches(buffers):
        while batch:
            batch = _rest(batch, os.writev(fd, batch))


def sync(fd: int) -> None:
    """Sync a file to the disk itself.

    A failed fsync is not repeated: the kernel may have dropped the pages that it could not write,
    and a second fsync would then succeed although they are missing.
    """
    if F_FULLFSYNC is not None:
        try:
            fcntl(fd, F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(fd)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync_above(path: str) -> None:
    """Make the path to a folder durable: sync every folder above it, up to the mount.

    Each of them may be new, made by a process that died before the sync. A folder that this user
    cannot read belongs to another user and is not new.
    """
    path = os.path.realpath(path)
    device = os.stat(path).st_dev
    while (parent := os.path.dirname(path)) != path and os.stat(parent).st_dev == device:
        with suppress(PermissionError):
            sync_folder(parent)
        path = parent


def open_file(path: str, key: str) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size in bytes."""
    # Without O_NONBLOCK, opening a pipe that somebody left in the folder would never return.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ObjectNotFound("this is not an object: it is not a regular file", where=key)
    except BaseException:
        os.close(fd)
        raise
    return fd, found.st_size


def read(fd: int, start: int, size: int, key: str) -> bytes:
    """Return `size` bytes at `start`."""
    data = os.pread(fd, size, start)
    # The system moves at most 2 GiB at once, so a large object needs several reads.
    if len(data) == size:
        return data
    parts = [data]
    done = len(data)
    while parts[-1] and done < size:
        parts.append(os.pread(fd, size - done, start + done))
        done += len(parts[-1])
    if done < size:
        raise truncated(key, start + size, start + done)
    return b"".join(parts)


def read_into(fd: int, start: int, views: Sequence[memoryview], key: str) -> None:
    """Fill buffers in order with the bytes at `start`."""
    position = start
    for batch in _batches(views):
        while batch:
            moved = os.preadv(fd, batch, position)
            if moved == 0:
                raise truncated(key, position + sum(map(len, batch)), position)
            position += moved
            batch = _rest(batch, moved)


def _batches(views: Sequence[memoryview]) -> list[Sequence[memoryview]]:
    return [views[i : i + IOV_MAX] for i in range(0, len(views), IOV_MAX)]


def _rest(batch: Sequence[memoryview], moved: int) -> Sequence[memoryview]:
    """Return the part of a batch after the first `moved` bytes."""
    for i, view in enumerate(batch):
        if moved < len(view):
            return [view[moved:], *batch[i + 1 :]]
        moved -= len(view)
    return ()


def check_size(size: int, stop: int, key: str) -> None:
    """Refuse a range that ends beyond the object."""
    if stop > size:
        raise truncated(key, stop, size)


def fail(error: OSError, path: str, *, needed_bytes: int = 0) -> NoReturn:
    """Raise our error for an error of the system."""
    if isinstance(error, StorageError):
        raise error
    raise _translated(error, path, needed_bytes) from error


def _translated(error: OSError, path: str, needed_bytes: int) -> StorageError:
    code = error.errno
    text = error.strerror or str(error)
    if code == errno.ENAMETOOLONG:
        return InvalidLocation(text, where=path)
    if code == errno.ENOENT:
        return ObjectNotFound("no such object", where=path)
    if code in NO_ROOM:
        return no_room(error, path, needed_bytes)
    if code == errno.EROFS:
        return ReadOnlyStore(text, where=path, hint="Mount it for writing, or write elsewhere.")
    if code in (errno.EACCES, errno.EPERM):
        return AccessDenied(
            text, where=path, found=f"user id {os.geteuid()}", hint="Ask its owner for access."
        )
    if code in (errno.EMFILE, errno.ENFILE):
        return StoreUnavailable(
            text, where=path, hint="Raise the limit of open files (ulimit -n), or use less threads."
        )
    if code in _IN_THE_WAY:
        return InvalidLocation(
            "a file is where a folder is needed, or a folder is where a file is needed",
            where=path,
            hint="In a folder, unlike in a bucket, a key cannot be both an object and a folder.",
        )
    # Not StoreUnavailable, which is retried: after EIO the same call may succeed over lost pages.
    return StorageError(f"the file system failed: {text}", where=path)


def no_room(error: OSError, path: str, needed_bytes: int) -> StoreFull:
    """Return the error for a full disk: bytes, inodes or a quota are used up."""
    text = error.strerror or str(error)
    if error.errno == errno.EDQUOT:
        return _over_quota(text, path, needed_bytes)
    free_bytes, free_files = _free(path)
    found = _free_text(free_bytes, free_files)
    if free_files is not None and free_files < _FEW_FILES and free_bytes > needed_bytes + _SLACK:
        # Few and not zero: the files of this write are deleted already.
        return StoreFull(
            f"{text}: no more files can be made",
            where=path,
            expected="free inodes for a file and its folders",
            found=found,
            hint="Delete files that are not needed, or make a file system with more inodes; "
            "nothing was written.",
        )
    return StoreFull(
        text,
        where=path,
        expected=f"{needed_bytes} bytes to write",
        found=found,
        hint="Free some space; nothing was written.",
    )


def _over_quota(text: str, path: str, needed_bytes: int) -> StoreFull:
    # No portable call shows a quota: of bytes or of files, of a user or a project.
    return StoreFull(
        text,
        where=path,
        expected=f"{needed_bytes} bytes to write, within a quota of bytes and of files",
        found=f"the quota of user id {os.geteuid()} or of its group or project is used up; the "
        f"file system itself has {_free_text(*_free(path))}",
        hint="Delete files that are not needed, or ask for a higher quota of bytes or files "
        "(`quota -s`); nothing was written.",
    )


def _free_text(free_bytes: int, free_files: int | None) -> str:
    if free_bytes < 0:
        return "an unknown number of bytes free"
    return (
        f"{free_bytes} bytes"
        + ("" if free_files is None else f" and {free_files} inodes")
        + " free"
    )


def _free(path: str) -> tuple[int, int | None]:
    """Return the free bytes (-1 if unknown) and the free inodes (`None` if not counted)."""
    try:
        found = os.statvfs(nearest(path))
    except OSError:
        return -1, None
    # Some file systems make inodes on demand, and report none.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def nearest(path: str) -> str:
    """Return the deepest existing folder of a path."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def no_links(error: OSError) -> bool:
    """Return whether an error of `link` means that the file system makes no (more) hard links."""
    return error.errno in _NO_LINKS


def refuse_without_links(error: OSError, path: str) -> NoReturn:
    """Raise the error for a file system that cannot create a name exclusively."""
    raise StoreUnsuitable(
        f"the file system makes no hard links: {error.strerror}",
        where=path,
        expected="hard links, by which exactly one of several writers creates a name",
        hint="Use a local file system such as ext4, xfs or apfs, or a bucket.",
    ) from error
