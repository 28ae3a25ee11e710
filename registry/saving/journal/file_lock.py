"""Locks on files between processes; a forked child does not share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet

from holdfast.backends.local import disk


class FileLock:
    """A lock on a file; each object is a separate holder."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def acquire(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take the lock; return whether it was taken."""
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            disk.fail(error, self._path)
        # Noted before locking: a child may be forked while this process waits for the lock.
        self._fd = fd
        _open.add(self)
        try:
            fcntl.flock(fd, kind)
        except BlockingIOError:
            self._close()
            return False
        except OSError as error:  # some network disks have no locks
            self._close()
            disk.fail(error, self._path)
        except BaseException:
            self._close()
            raise
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            # Closing alone would keep the lock, if a child has a copy of the descriptor.
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        _open.discard(self)
        if fd >= 0:
            # Closed even if the disk reports an error: what the lock was for is done.
            with suppress(OSError):
                os.close(fd)

    @contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the lock for a block."""
        self.acquire(shared=shared)
        try:
            yield
        finally:
            self.release()


_open: WeakSet[FileLock] = WeakSet()


def _close_in_child() -> None:
    # Closing the copy of a descriptor does not release the parent's lock.
    for lock in list(_open):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)
