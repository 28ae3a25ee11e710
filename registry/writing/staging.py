"""Host memory to which a state is copied before it is saved in the background.

Fresh pages cost more than the copy itself, so later saves use the same memory again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from holdfast.registry.pytree import ArrayLeaf, FlatState
from holdfast.registry.store import abandon, results

_ALIGNMENT = 64
#: Copies of at least this size are made in other threads.
_LARGE_BYTES = 64 * 1024
#: Parts of a copy that run in parallel.
_SHARES = 4

_Job = tuple[ArrayLeaf, int]


class Staging:
    """A buffer that grows to the largest state it has held."""

    def __init__(self, allocate: Callable[[int], Any] = bytearray) -> None:
        self._allocate = allocate
        self._memory = allocate(0)

    def copy(self, state: FlatState, pool: Executor) -> FlatState:
        """Move a state to this memory and return it; the copy before is overwritten."""
        leaves = state.leaves
        offsets, total = places(leaves)
        self.reserve(total)
        jobs = list(zip(leaves, offsets, strict=True))
        large = [job for job in jobs if job[0].nbytes >= _LARGE_BYTES]
        copying = [pool.submit(self._move, share) for share in _shares(large)]
        try:
            self._move([job for job in jobs if job[0].nbytes < _LARGE_BYTES])
        except BaseException:
            abandon(copying)
            raise
        results(copying)
        return state

    def reserve(self, nbytes: int) -> None:
        """Allocate memory for a state of this size, unless there is enough."""
        if nbytes > len(self._memory):
            self._memory = self._allocate(nbytes)

    def _move(self, jobs: Sequence[_Job]) -> None:
        memory = memoryview(self._memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) if self._memory else 0
        for leaf, start in jobs:
            leaf.move(memory[start : start + leaf.nbytes], base + start)


def places(leaves: Sequence[ArrayLeaf]) -> tuple[list[int], int]:
    """Return where the bytes of each leaf begin in a buffer, and the size of the buffer."""
    offsets, total = [], 0
    for leaf in leaves:
        offsets.append(total)
        total += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _shares(jobs: Sequence[_Job]) -> list[Sequence[_Job]]:
    """Split leaves, in order, into parts of about equal bytes."""
    total = sum(leaf.nbytes for leaf, _ in jobs)
    shares: list[Sequence[_Job]] = []
    begin = size = 0
    for position, (leaf, _) in enumerate(jobs, 1):
        size += leaf.nbytes
        if size >= total * (len(shares) + 1) / _SHARES:
            shares.append(jobs[begin:position])
            begin = position
    return shares
