"""Host memory that a state is copied to before it is saved in the background.

Fresh pages cost more than the copy itself, so the memory is kept and used again from save to save.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from registry.pytree import ArrayLeaf, FlatState

_ALIGNMENT = 64
#: Parts of a copy that run side by side.
_SHARES = 4

_Job = tuple[ArrayLeaf, int]


class Staging:
    """A buffer that grows to the largest state it has held."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def copy(self, state: FlatState, pool: Executor) -> FlatState:
        """Return the same state with its bytes here; what was here before is overwritten."""
        leaves = [leaf for part in state.components for leaf in part.leaves]
        offsets, total = _layout(leaves)
        if total > len(self._memory):
            self._memory = bytearray(total)
        jobs = list(zip(leaves, offsets, strict=True))
        done = [pool.submit(self._copy_share, share) for share in _shares(jobs, total)]
        for future in done:
            future.result()
        memory = memoryview(self._memory)
        moved = iter([leaf.moved(memory[start : start + leaf.nbytes]) for leaf, start in jobs])
        components = tuple(
            replace(part, leaves=tuple(next(moved) for _ in part.leaves))
            for part in state.components
        )
        return FlatState(state.kind, components)

    def _copy_share(self, jobs: Sequence[_Job]) -> None:
        memory = memoryview(self._memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) if self._memory else 0
        for leaf, start in jobs:
            view = leaf.buffer()
            if view.readonly or not view.nbytes:
                memory[start : start + leaf.nbytes] = view
            else:
                source = ctypes.addressof(ctypes.c_char.from_buffer(view))
                # Unlike assignment to a slice, a foreign call lets the other shares run.
                ctypes.memmove(base + start, source, leaf.nbytes)


def _layout(leaves: Sequence[ArrayLeaf]) -> tuple[list[int], int]:
    offsets, total = [], 0
    for leaf in leaves:
        offsets.append(total)
        total += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


def _shares(jobs: Sequence[_Job], total: int) -> list[Sequence[_Job]]:
    """Split the leaves, in order, into parts of about equal bytes."""
    shares: list[Sequence[_Job]] = []
    begin = 0
    for position, (leaf, start) in enumerate(jobs, 1):
        if start + leaf.nbytes >= total * (len(shares) + 1) / _SHARES:
            shares.append(jobs[begin:position])
            begin = position
    shares.append(jobs[begin:])
    return shares
