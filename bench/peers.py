"""What Holdfast is measured against: other ways to put a state on a disk and to get it back.

Owns the yardsticks (a plain write, a SHA-256 on all cores, a warm copy: the limits of the machine)
and the peers (torch.save, safetensors). Each is a function of tensors and a path, with nothing
timed and nothing printed. All writers make their bytes durable: fsync of the file and its folder.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor
from workloads import as_bytes, flatten

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Tensors = Mapping[str, Tensor]

#: What one thread hashes or reads at a time.
JOB_BYTES = 16 * 2**20
#: Unit of hashing inside a job.
CHUNK_BYTES = 4 * 2**20
#: A file of the yardstick that hashes beside its writing.
PACK_BYTES = 64 * 2**20
IOV_MAX = os.sysconf("SC_IOV_MAX")
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Job:
    """A range of a state's bytes in one file of all of them.

    Attributes:
        offset: Where they start in that file.
        parts: The memory, in order; no part is longer than a chunk.
    """

    offset: int
    parts: list[Bytes]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


def jobs(tensors: Tensors, limit_bytes: int = JOB_BYTES) -> list[Job]:
    """Cut the memory of tensors into jobs of bounded size."""
    cut: list[Job] = []
    offset = room = 0
    for part in _chunks(tensors.values()):
        if len(part) > room:
            cut.append(Job(offset, []))
            room = limit_bytes
        cut[-1].parts.append(part)
        offset += len(part)
        room -= len(part)
    return cut


# Saving


def plain_write(tensors: Tensors, path: Path) -> None:
    """Write all tensors to one file, without hashing: the yardstick of a durable save."""
    with _created(path) as file:
        _write(file.fileno(), [as_bytes(tensor) for tensor in tensors.values()])


def hashed_write(tensors: Tensors, folder: Path) -> list[list[bytes]]:
    """Write packs and hash their chunks in threads beside the writing: what a design can reach."""
    packs = jobs(tensors, PACK_BYTES)
    with ThreadPoolExecutor(CORES) as pool:
        digests = [pool.submit(_chunk_digests, pack) for pack in packs]
        for number, pack in enumerate(packs):
            with (folder / f"{number}.pack").open("xb", buffering=0) as file:
                _write(file.fileno(), pack.parts)
                os.fsync(file.fileno())
        sync_folder(folder)
        return [digest.result() for digest in digests]


def torch_save(state: Any, path: Path) -> bytes:
    """Write by torch.save, hash the file, make it durable."""
    with _created(path) as file:
        torch.save(state, file)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").digest()


def safetensors_save(tensors: Tensors, path: Path) -> None:
    """Write by safetensors, without hashing, and make the file durable."""
    save_file(dict(tensors), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sha256(tensors: Tensors) -> list[bytes]:
    """Hash all bytes on all cores: the limit of whatever verifies or names them."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(_digest, jobs(tensors)))


class Copy:
    """A copy of a state into memory that has been touched: the limit of an isolating save.

    One thread copies, tensor by tensor, as memcpy would: where other jobs use the machine, torch's
    own threads wait for each other at every tensor.

    Args:
        tensors: What to copy; the copy goes to the same places each time.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._pairs = [
            (as_bytes(torch.ones_like(tensor)), as_bytes(tensor)) for tensor in tensors.values()
        ]

    def __call__(self) -> None:
        for destination, source in self._pairs:
            destination[:] = source


# Loading


def plain_read(path: Path, into: Tensors) -> None:
    """Read what `plain_write` wrote into existing tensors on all cores, without hashing."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(CORES) as pool:
        fd = file.fileno()
        list(pool.map(lambda job: _read(fd, job), jobs(into)))


def hashed_read(path: Path, into: Tensors) -> list[bytes]:
    """Read and hash in one pass on all cores: what a verified load can reach."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(CORES) as pool:
        fd = file.fileno()
        return list(pool.map(lambda job: _digest(_read(fd, job)), jobs(into)))


def torch_load(path: Path, into: Tensors) -> None:
    """Load by torch.load, without executing anything, and copy into existing tensors."""
    _copy(flatten(torch.load(path, weights_only=True, mmap=False)), into)


def safetensors_load(path: Path, into: Tensors) -> None:
    """Load by safetensors, unverified, into existing tensors, one after another."""
    with safetensors.safe_open(path, framework="pt") as file:
        for name, tensor in into.items():
            tensor.copy_(file.get_tensor(name))


# The disk


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Drop a file, or all files under a folder, from the page cache: the next read is cold."""
    for each in _files(path):
        with each.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def recall(path: Path) -> None:
    """Read a file, or all files under a folder, into the page cache: the next read is warm."""
    buffer = bytearray(JOB_BYTES)
    for each in _files(path):
        with each.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(path: Path) -> list[Path]:
    return [each for each in (path, *path.rglob("*")) if each.is_file()]


@contextmanager
def _created(path: Path) -> Iterator[io.FileIO]:
    """Open a new file; it is durable with its folder when the block ends."""
    with path.open("x+b", buffering=0) as file:
        yield file
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Bytes]:
    for tensor in tensors:
        data = as_bytes(tensor)
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def _digest(job: Job) -> bytes:
    hashed = hashlib.sha256()
    for part in job.parts:
        hashed.update(part)
    return hashed.digest()


def _chunk_digests(job: Job) -> list[bytes]:
    return [hashlib.sha256(part).digest() for part in job.parts]


def _write(fd: int, parts: Sequence[Bytes]) -> None:
    queue = deque(parts)
    while queue:
        _advance(queue, os.writev(fd, list(islice(queue, IOV_MAX))))


def _read(fd: int, job: Job) -> Job:
    queue, offset = deque(job.parts), job.offset
    while queue:
        count = os.preadv(fd, list(islice(queue, IOV_MAX)), offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}")
        _advance(queue, count)
        offset += count
    return job


def _advance(queue: deque[Bytes], count: int) -> None:
    """Take the bytes that a vectored call has moved off the front of its queue."""
    while count:
        part = queue.popleft()
        if len(part) > count:
            queue.appendleft(part[count:])
        count -= min(len(part), count)


def _copy(source: Tensors, into: Tensors) -> None:
    for name, tensor in into.items():
        tensor.copy_(source[name])
