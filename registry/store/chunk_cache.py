"""A cache of raw, verified chunks on a local disk, so that no chunk is fetched twice.

Owns a folder and its bound. Nothing depends on it: every failure here is a miss, and anybody may
delete the folder at any moment. All threads and processes of one user can share it.

A chunk is a file named by its digest. The file holds the raw bytes, whatever the codec on the
store, so one folder serves all checkpoints, runs and registries. A hit is read into the memory of
the caller and hashed there; a file that does not hash to its name is removed. A hit sets the time
of the file, at most once a minute, and the oldest file is evicted first. Small chunks are kept too:
without them, each would cost a request of its own between hits. A file counts as whole blocks, and
as 32 KiB at least; this bounds the number of files that a scan has to read.

`holdfast.registry.store.cache_folder` keeps the bound and explains how.
"""

# pathlib cannot use names in an open folder.
# ruff: noqa: PTH100, PTH111, PTH118, PTH120
from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.store.cache_folder import (
    CLAIM_S,
    OPEN,
    CacheFolder,
    busy,
    claim,
    close,
    open_folder,
)
from holdfast.registry.values import Digest, ProcessLock

BYTES_VARIABLE = "HOLDFAST_CACHE_BYTES"
#: The bound where the size of the disk is not known.
_UNKNOWN_DISK_BYTES = 10 * 2**30

_FOLDER = "chunks-v1"
_TOUCH_S = 60.0
#: After a failure nothing is kept for this time.
_PAUSE_S = 10.0
#: A handle that waited so often for chunks that never came fetches them itself for a minute.
_VAIN_WAITS = 4
_ALONE_S = 60.0
#: The most files that are made while the lock is held: others wait for it.
_TURN_FILES = 128

_LOGGER = logging.getLogger("holdfast")


class ChunkCache:
    """Chunks on a local disk."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_bytes: int | None = None
    ) -> None:
        #: The folder.
        self.path = os.path.abspath(
            os.path.expanduser(_default_path() if path is None else os.fspath(path))
        )
        self._folder = os.path.join(self.path, _FOLDER)
        self.max_bytes = _bound(max_bytes, self._folder)  # the bound
        self._lock = ProcessLock()
        self._scanned = False
        self._said = False
        self._paused_until = 0.0
        self._vain = 0
        self._alone_until = 0.0

    def __repr__(self) -> str:
        return f"<ChunkCache {self.path} {self.max_bytes} bytes>"

    def fill(self, wanted: Mapping[Digest, memoryview], *, verified: bool = True) -> list[Digest]:
        """Fill memory with the chunks that are here."""
        try:
            fd = open_folder(self._folder)
        except FileNotFoundError:
            return list(wanted)
        except OSError as error:
            self._say(error)
            return list(wanted)
        try:
            return [
                digest
                for digest, view in wanted.items()
                if not self._fill(fd, digest, view, verified=verified)
            ]
        finally:
            close(fd)

    def peek(self, _digest: Digest, _size: int, /) -> None:
        """Return nothing: a file has to be read."""

    def offer(self, chunks: Mapping[Digest, memoryview]) -> None:
        """Keep chunks that were just verified, if the bound allows it."""
        if time.monotonic() < self._paused_until:
            return
        try:
            self._keep(chunks)
        except FileNotFoundError:
            pass  # somebody deleted the folder; the next call makes it again
        except OSError as error:
            self._say(error)
            self._pause()

    def fetch_once(
        self,
        wanted: Mapping[Digest, memoryview],
        fetch: Callable[[Collection[Digest]], Mapping[Digest, memoryview]],
    ) -> None:
        """Fill memory with chunks that were missed, by one fetch of all processes.

        If another one is fetching the first of them, wait for it; then fetch what is still missed.
        """
        with self._claimed(next(iter(wanted))) as has_waited:
            lacking = self.fill(wanted)
            if has_waited:
                self._note_wait(is_vain=len(lacking) == len(wanted))
            if lacking:
                self.offer(fetch(lacking))

    @contextmanager
    def _claimed(self, digest: Digest) -> Iterator[bool]:
        patience_s = CLAIM_S if time.monotonic() >= self._alone_until else 0.0
        with ExitStack() as stack:
            has_waited = False
            try:
                fd = open_folder(self._folder, make=True)
                stack.callback(close, fd)
                has_waited = stack.enter_context(claim(fd, digest, patience_s))
            except OSError as error:
                self._say(error)
            yield has_waited

    def _note_wait(self, *, is_vain: bool) -> None:
        self._vain = self._vain + 1 if is_vain else 0
        if self._vain >= _VAIN_WAITS:
            self._vain, self._alone_until = 0, time.monotonic() + _ALONE_S

    def _fill(self, folder: int, digest: Digest, view: memoryview, *, verified: bool) -> bool:
        name = digest.hex()
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | OPEN, dir_fd=folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._discard(folder, name)
            else:
                self._say(error)
            return False
        try:
            good = _read(fd, view) and (not verified or Digest.of(view) == digest)
            if good:
                _touch(fd)
        except OSError as error:
            self._say(error)
            return False
        finally:
            os.close(fd)
        if not good:
            self._discard(folder, name)
        return good

    def _discard(self, folder: int, name: str) -> None:
        self._say(f"{name} did not hash to its name and was removed")
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)

    def _keep(self, chunks: Mapping[Digest, memoryview]) -> None:
        fd = open_folder(self._folder, make=True)
        try:
            folder = CacheFolder(fd, self.max_bytes)
            rest = iter(chunks.items())
            while part := dict(islice(rest, _TURN_FILES)):
                self._keep_part(folder, part)
        finally:
            os.close(fd)

    def _keep_part(self, folder: CacheFolder, chunks: Mapping[Digest, memoryview]) -> None:
        with self._turn(folder):
            batch = folder.reserve(chunks, scan=not self._scanned)
            self._scanned = True
        if batch is None:
            return
        try:
            batch.write()
            with self._turn(folder):
                batch.publish()
        finally:
            batch.close()

    @contextmanager
    def _turn(self, folder: CacheFolder) -> Iterator[None]:
        """Hold the lock: first among the threads of this process, then among processes."""
        with self._lock.here():
            if time.monotonic() < self._paused_until:
                raise busy()  # another thread has waited too long already
            try:
                with folder.locked():
                    yield
            except TimeoutError:
                self._pause()
                raise

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S

    def _say(self, what: object) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        _LOGGER.log(level, "chunk cache %s: %s; loading continues without it", self.path, what)


def _read(fd: int, view: memoryview) -> bool:
    """Fill memory with a file; return whether it is a regular file of exactly that length."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != len(view):
        return False
    done = 0
    while done < len(view):
        moved = os.readv(fd, [view[done:]])
        if not moved:
            return False
        done += moved
    return True


def _touch(fd: int) -> None:
    if abs(time.time() - os.fstat(fd).st_mtime) > _TOUCH_S:
        with suppress(OSError):  # a read-only folder still has hits
            os.utime(fd)


def _bound(asked: int | None, folder: str) -> int:
    named = os.environ.get(BYTES_VARIABLE) if asked is None else None
    if asked is None and not named:
        return _half_of_disk(folder)
    said: object = named or asked
    try:
        bound = int(said) if isinstance(said, str | int) and not isinstance(said, bool) else 0
    except ValueError:
        bound = 0
    if bound < 1:
        raise InvalidInput(
            "not a bound of the chunk cache",
            where=BYTES_VARIABLE if asked is None else "max_bytes",
            expected="a positive whole number of bytes",
            found=quoted(said),
        )
    return bound


def _half_of_disk(folder: str) -> int:
    """Return half of the bytes that the cache has on its disk or could still take."""
    above, held = folder, 0
    try:
        with suppress(FileNotFoundError):
            fd = open_folder(folder)
            try:
                held = CacheFolder(fd, 1).taken() or 0
            finally:
                os.close(fd)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        disk = os.statvfs(above)
    except OSError:
        return _UNKNOWN_DISK_BYTES
    return max(1, (held + disk.f_bavail * disk.f_frsize) // 2)


def _default_path() -> str:
    caches = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or caches, "holdfast")
