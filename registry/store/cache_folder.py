"""The folder of the chunk cache: its bound, its lock and its files.

**The bound holds at every moment**, whoever writes and whichever process dies:

1. *Reserve*, holding the lock. `.total` has the number of bytes in use. If the new files do not fit
   within the bound, the folder is scanned, which gives the true number, and the oldest files are
   removed until there is room to spare. Then the higher number is written. Only then the files are
   made, empty but of full length, as `.new-BATCH-n`: they are the reservation, and every scan
   counts them.
2. *Write* the files, without the lock. They do not grow.
3. *Publish* them by renaming, holding the lock: a scan could miss a file during its renaming.

The number may be too high, because files were deleted or a process died after step 1; the next scan
corrects it. It is never too low, since files are made only by step 1. Each handle scans before its
first reservation, since a loss of power may have restored an older number. A process that reads a
file while it is removed keeps the file, and its blocks, until it closes it.

The lock is a `flock` on the folder itself. A batch also has a `flock` on its first file, which is
renamed last: it shows that the writer is alive. The kernel releases both when their process ends,
so no lock file can be deleted or left behind. A scan removes abandoned batches. Nobody waits longer
than two seconds for the lock; after that the chunks are not kept. All names are looked up in an
open folder, so a deleted folder gets no more files, and a new one has its own bound. Nothing is
synced: the digests find every file that a loss of power damages.

**One process fetches** what several miss. Before it asks the store it *claims* the chunk: it locks
one byte of `.total`, whose number comes from the digest, by a lock of its open file. The kernel
releases this lock, too, when the process ends. Nobody waits longer than `CLAIM_S` seconds.
"""

# pathlib cannot use names in an open folder.
# ruff: noqa: PTH102, PTH103, PTH120
from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from holdfast.registry.values import Digest

#: The longest wait for the lock, in seconds.
PATIENCE_S = 2.0
#: The longest wait for another process that fetches a chunk, in seconds.
CLAIM_S = 30.0
#: A link is never followed, and no child process inherits a descriptor.
OPEN = os.O_NOFOLLOW | os.O_CLOEXEC

_TOTAL = ".total"
_TOTAL_BYTES = 21
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)
_STAGED = ".new-"
_STAGED_NAME = rf"{re.escape(_STAGED)}[0-9a-f]{{16}}-[0-9]+"
_CHUNK = r"[0-9a-f]{64}"
_BLOCK_BYTES = 4096
_LEAST_BYTES = 32 * 2**10
#: The share of the bound that an eviction leaves free, so that the next one does not follow soon.
_SPARE = 0.05


def open_folder(path: str, *, make: bool = False) -> int:
    """Open the folder, and make sure that only this user can use it."""
    if make:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | OPEN)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "the folder belongs to another user", path)
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def lock_folder(fd: int) -> Iterator[None]:
    """Hold the lock of an open folder."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise busy() from None
        time.sleep(random.uniform(0.0005, 0.003))
    try:
        yield
    finally:
        with suppress(OSError):  # its file is closed soon, which releases it too
            fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def claim(folder: int, digest: Digest, patience_s: float) -> Iterator[bool]:
    """Claim the fetching of a chunk, after waiting for another one; yield whether there was one.

    Systems without locks of open files, such as macOS, do not wait.
    """
    number = int.from_bytes(digest[:7], "big") + _TOTAL_BYTES
    until, pause_s, has_waited = time.monotonic() + patience_s, 0.001, False
    fd = os.open(_TOTAL, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | OPEN, 0o600, dir_fd=folder)
    try:
        while not _lock_byte(fd, number) and time.monotonic() < until:
            has_waited = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        yield has_waited
    finally:
        # Explicitly: a forked child may have the open file too. Some disks know no such locks.
        with suppress(OSError):
            _lock_byte(fd, number, fcntl.F_UNLCK)
        close(fd)


def close(fd: int) -> None:
    """Close a file that was read; it is closed even if the disk fails at that."""
    with suppress(OSError):
        os.close(fd)


def _lock_byte(fd: int, number: int, how: int = fcntl.F_WRLCK) -> bool:
    """Lock or unlock one byte of an open file; return whether that was done."""
    if _SET_LOCK is None:
        return True
    try:
        # The C type `struct flock`: kind, start, length and no process.
        fcntl.fcntl(fd, _SET_LOCK, struct.pack("hhqqi0q", how, os.SEEK_SET, number, 1, 0))
    except BlockingIOError:
        return False
    return True


class _Staged(NamedTuple):
    """A reserved file."""

    name: str  # its name until it is published
    digest: Digest  # the digest of its chunk
    data: memoryview  # the chunk


class Batch:
    """Reserved files, alive as long as the first of them is locked."""

    def __init__(self, folder: CacheFolder, chunks: Sequence[tuple[Digest, memoryview]]) -> None:
        prefix = _STAGED + secrets.token_hex(8)
        self._folder = folder
        self._staged = [_Staged(f"{prefix}-{n}", *chunk) for n, chunk in enumerate(chunks)]
        self._made = 0
        self._first = -1
        try:
            for staged in self._staged:
                self._make(staged)
        except BaseException:
            self.close()
            raise

    def write(self) -> None:
        """Fill the files; the lock is not needed."""
        for staged in self._staged:
            fd = os.open(staged.name, os.O_WRONLY | OPEN, dir_fd=self._folder.fd)
            try:
                _write(fd, staged.data)
            finally:
                os.close(fd)

    def publish(self) -> None:
        """Give the files their names, unless another writer was faster; the lock is needed."""
        freed = 0
        while self._made:  # the first file last: its lock shows that the writer is alive
            staged = self._staged[self._made - 1]
            if self._folder.has(staged.digest, len(staged.data)):
                self._folder.remove(staged.name)
                freed += _disk_bytes(len(staged.data))
            else:
                self._folder.rename(staged.name, staged.digest.hex())
            self._made -= 1
        if freed:
            self._folder.lower(freed)

    def close(self) -> None:
        """Remove the files that were not published."""
        while self._made:
            self._made -= 1
            with suppress(OSError):
                self._folder.remove(self._staged[self._made].name)
        if self._first >= 0:
            os.close(self._first)
            self._first = -1

    def _make(self, staged: _Staged) -> None:
        fd = os.open(
            staged.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN, 0o600, dir_fd=self._folder.fd
        )
        self._made += 1
        try:
            os.ftruncate(fd, len(staged.data))
            if self._first < 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._first, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)


class CacheFolder:
    """The open folder. All methods but `locked` and `remove` need the lock."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self.fd = fd
        self._max_bytes = max_bytes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock."""
        with lock_folder(self.fd):
            yield

    def reserve(self, chunks: Mapping[Digest, memoryview], *, scan: bool) -> Batch | None:
        """Make files for chunks that are not here, for at most half of the bound."""
        new, need = [], 0
        for digest, data in chunks.items():
            size = _disk_bytes(len(data))
            if need + size <= self._max_bytes // 2 and not self.has(digest, len(data)):
                new.append((digest, data))
                need += size
        if not new:
            return None
        taken = None if scan else self.taken()
        if taken is None or taken + need > self._max_bytes:
            taken = self._evict(need)
        if taken + need > self._max_bytes:
            self._note(taken)
            return None
        self._note(taken + need)
        return Batch(self, new)

    def has(self, digest: Digest, size_bytes: int) -> bool:
        """Return whether a file of this name and length is here."""
        try:
            found = os.stat(digest.hex(), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes

    def rename(self, name: str, new: str) -> None:
        """Rename a file; it replaces a file of the new name."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self.fd)

    def lower(self, freed: int) -> None:
        """Lower the number of bytes in use."""
        taken = self.taken()
        if taken is not None:
            self._note(taken - freed)

    def taken(self) -> int | None:
        """Return the number of bytes in use, if it is noted."""
        try:
            fd = os.open(_TOTAL, os.O_RDONLY | os.O_NONBLOCK | OPEN, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        try:
            text = os.read(fd, 64)
        finally:
            os.close(fd)
        return int(text) if re.fullmatch(rb"[0-9]{20}\n", text) else None

    def _note(self, taken: int) -> None:
        fd = os.open(_TOTAL, os.O_WRONLY | os.O_CREAT | OPEN, 0o600, dir_fd=self.fd)
        try:
            os.pwrite(fd, b"%020d\n" % taken, 0)
        finally:
            os.close(fd)

    def _evict(self, need: int) -> int:
        """Remove the oldest files until there is room to spare; return the bytes in use then."""
        taken, files = self._scan()
        if taken + need > self._max_bytes:
            files.sort()
            for _, size, name in files:
                if taken + need <= self._max_bytes * (1 - _SPARE):
                    break
                with suppress(FileNotFoundError):
                    self.remove(name)
                taken -= size
        return taken

    def _scan(self) -> tuple[int, list[tuple[int, int, str]]]:
        """Return the bytes in use, and time, bytes on disk and name of every chunk."""
        taken = _LEAST_BYTES  # for the number itself
        files: list[tuple[int, int, str]] = []
        staged: dict[str, list[tuple[int, str]]] = {}
        with os.scandir(self.fd) as entries:
            for entry in entries:
                name = entry.name
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                size = _disk_bytes(found.st_size)
                if re.fullmatch(_STAGED_NAME, name):
                    staged.setdefault(name.rpartition("-")[0], []).append((size, name))
                    continue
                taken += size if name != _TOTAL else 0
                if re.fullmatch(_CHUNK, name) and stat.S_ISREG(found.st_mode):
                    files.append((found.st_mtime_ns, size, name))
        return taken + sum(
            self._remove_abandoned(batch, held) for batch, held in staged.items()
        ), files

    def _remove_abandoned(self, batch: str, held: Sequence[tuple[int, str]]) -> int:
        """Remove the files of a batch if its writer died; return the bytes that remain in use."""
        if not self._is_abandoned(batch):
            return sum(size for size, _ in held)
        taken = 0
        for size, name in held:
            try:
                self.remove(name)
            except FileNotFoundError:
                pass
            except OSError:
                taken += size
        return taken

    def _is_abandoned(self, batch: str) -> bool:
        try:
            fd = os.open(f"{batch}-0", os.O_RDONLY | os.O_NONBLOCK | OPEN, dir_fd=self.fd)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


def _write(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def _disk_bytes(size_bytes: int) -> int:
    return max(_LEAST_BYTES, -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)


def busy() -> OSError:
    """Return the error of a wait for the lock that took too long."""
    return TimeoutError(errno.ETIMEDOUT, f"others held its lock for {PATIENCE_S:g} s")
