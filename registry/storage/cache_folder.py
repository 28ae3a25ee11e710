"""The folder of the chunk cache: its bound, its lock, and what is written to it.

**The bound holds at every moment**, whoever writes and whoever dies:

1. *Reserve*, holding the lock. `.total` says how many bytes are taken. If what is to come does not
   fit on top, the folder is scanned, which gives the true number, and the oldest files are removed
   until there is room to spare. Then the number is raised and written, and only then the files
   are made, empty but of full length, as `.new-BATCH-n`. So the reservation is the files
   themselves, and every scan counts them.
2. *Write* them, holding no lock. They do not grow.
3. *Publish* them by renaming, holding the lock: a scan could miss a file that is renamed meanwhile.

The number may be too high (files that were deleted, a process that died after 1), which the next
scan mends. It is never too low: files come only by step 1. Each handle scans before its first
reservation, since a loss of power may have brought an older number back. Who reads a file that is
being removed keeps it, and its blocks, until it closes it.

The lock is `flock` on the folder itself, the sign of life of a batch one on its first file, renamed
last. The kernel drops both with the process that had them, and there is no lock file that could be
deleted or left behind. A scan removes the batches of the dead. Nobody waits longer than two seconds
for the lock: then the chunks are not kept. All names are looked up in an open folder, so a folder
that was deleted takes nothing more, and one that was made anew has a bound of its own. Nothing is
synced: what a loss of power damages is found by its digest.
"""

# Names in an open folder, which pathlib cannot express.
# ruff: noqa: PTH102, PTH103, PTH120
from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast.registry.values.digest import Digest

#: Nobody waits longer for the lock.
PATIENCE_S = 2.0
#: A link is never followed, nor a descriptor passed on.
OPEN = os.O_NOFOLLOW | os.O_CLOEXEC

_TOTAL = ".total"
_STAGED = ".new-"
_STAGED_NAME = re.compile(rf"{re.escape(_STAGED)}[0-9a-f]{{16}}-[0-9]+")
_CHUNK = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 4096
_LEAST_BYTES = 32 * 2**10
#: An eviction leaves so much of the bound free, so that the next one is a while off.
_SPARE = 0.05


def open_folder(path: str, *, make: bool = False) -> int:
    """Open the folder, and see to it that it is ours alone."""
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
    """Hold the lock of an open folder.

    Raises:
        TimeoutError: Others held it too long.
    """
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
        fcntl.flock(fd, fcntl.LOCK_UN)


@dataclass(frozen=True, slots=True)
class _Staged:
    """A file that was reserved.

    Attributes:
        name: Its own name until it is published.
        digest: The chunk that goes into it.
        data: The chunk.
    """

    name: str
    digest: Digest
    data: memoryview


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
        """Fill the files; wants no lock."""
        for staged in self._staged:
            fd = os.open(staged.name, os.O_WRONLY | OPEN, dir_fd=self._folder.fd)
            try:
                _write(fd, staged.data)
            finally:
                os.close(fd)

    def publish(self) -> None:
        """Give the files their names, unless another writer came first; wants the lock."""
        freed = 0
        while self._made:  # the first one last: it says that the others are alive
            staged = self._staged[self._made - 1]
            if self._folder.has(staged.digest, len(staged.data)):
                self._folder.remove(staged.name)
                freed += _charge(len(staged.data))
            else:
                self._folder.rename(staged.name, staged.digest.hex())
            self._made -= 1
        if freed:
            self._folder.lower(freed)

    def close(self) -> None:
        """Remove what was not published."""
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
    """The open folder. All but `locked` and `remove` want the lock.

    Args:
        fd: The folder; it stays the caller's.
        max_bytes: The bound.
    """

    def __init__(self, fd: int, max_bytes: int) -> None:
        self.fd = fd
        self._max_bytes = max_bytes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            TimeoutError: Others held it too long.
        """
        with lock_folder(self.fd):
            yield

    def reserve(self, chunks: Mapping[Digest, memoryview], *, scan: bool) -> Batch | None:
        """Make files for chunks that are not here, as many as half of the bound holds."""
        new, need = [], 0
        for digest, data in chunks.items():
            charge = _charge(len(data))
            if need + charge <= self._max_bytes // 2 and not self.has(digest, len(data)):
                new.append((digest, data))
                need += charge
        if not new:
            return None
        taken = None if scan else self._taken()
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
        """Rename a file, over whatever file has the new name."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self.fd)

    def lower(self, freed: int) -> None:
        """Say that so many bytes less are taken."""
        taken = self._taken()
        if taken is not None:
            self._note(taken - freed)

    def _taken(self) -> int | None:
        try:
            fd = os.open(_TOTAL, os.O_RDONLY | os.O_NONBLOCK | OPEN, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        try:
            said = os.read(fd, 64)
        finally:
            os.close(fd)
        return int(said) if re.fullmatch(rb"[0-9]{20}\n", said) else None

    def _note(self, taken: int) -> None:
        fd = os.open(_TOTAL, os.O_WRONLY | os.O_CREAT | OPEN, 0o600, dir_fd=self.fd)
        try:
            os.pwrite(fd, b"%020d\n" % taken, 0)
        finally:
            os.close(fd)

    def _evict(self, need: int) -> int:
        """Remove the oldest until there is room and some to spare; return what is taken then."""
        taken, files = self._scan()
        if taken + need > self._max_bytes:
            files.sort()
            for _, charge, name in files:
                if taken + need <= self._max_bytes * (1 - _SPARE):
                    break
                with suppress(FileNotFoundError):
                    self.remove(name)
                taken -= charge
        return taken

    def _scan(self) -> tuple[int, list[tuple[int, int, str]]]:
        """Return what is taken, and time, charge and name of every chunk."""
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
                charge = _charge(found.st_size)
                if _STAGED_NAME.fullmatch(name):
                    staged.setdefault(name.rpartition("-")[0], []).append((charge, name))
                    continue
                taken += charge if name != _TOTAL else 0
                if _CHUNK.fullmatch(name) and stat.S_ISREG(found.st_mode):
                    files.append((found.st_mtime_ns, charge, name))
        return taken + sum(self._bury(batch, held) for batch, held in staged.items()), files

    def _bury(self, batch: str, held: Sequence[tuple[int, str]]) -> int:
        """Remove the files of a batch whose writer died; return what they take."""
        if not self._is_dead(batch):
            return sum(charge for charge, _ in held)
        taken = 0
        for charge, name in held:
            try:
                self.remove(name)
            except FileNotFoundError:
                pass
            except OSError:
                taken += charge
        return taken

    def _is_dead(self, batch: str) -> bool:
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


def _charge(size_bytes: int) -> int:
    return max(_LEAST_BYTES, -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)


def busy() -> OSError:
    """Return what is raised where the lock cannot be had."""
    return TimeoutError(errno.ETIMEDOUT, f"its lock was not to be had for {PATIENCE_S:g} s")
