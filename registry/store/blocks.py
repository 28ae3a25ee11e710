"""Blocks of memory for the copies that a save makes of the caller's bytes.

New memory costs more than the copy itself, so later saves of any handle of the process reuse the
blocks. `holdfast.registry.writing.hashing` decides which bytes are copied.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from threading import Condition, Lock

#: A block holds one chunk, or many small ones.
BLOCK_BYTES = 4 * 2**20
#: The most blocks in use: 256 MiB, the size of four packs that are being uploaded.
MOST_BLOCKS = 64

# Shared by the handles of a process. Its methods are atomic, and a forked child has its own copy.
_idle: deque[memoryview] = deque(maxlen=MOST_BLOCKS)


class Blocks:
    """The blocks that a handle may have in use."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._left = self._most

    def lease(self) -> Lease:
        """Begin a save."""
        if self._pid != os.getpid():
            # A fork copies the count of blocks in use, but only the parent's threads return them.
            self._start()
        return Lease(self)

    def reserve(self, count: int, *, wait: bool) -> bool:
        """Reserve blocks for a save; return whether that many were free."""
        with self._changed:
            while count > self._left:
                if not wait:
                    return False
                self._changed.wait()
            self._left -= count
            return True

    def release(self, count: int) -> None:
        """Count blocks as free again."""
        if count:
            with self._changed:
                self._left += count
                self._changed.notify_all()


class Lease:
    """The blocks of one save. Any thread may take and give blocks.

    Only the thread that began the save waits for blocks, never a thread of a pool: other threads
    may need that pool to return their blocks.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lock = Lock()
        self._reserved = 0
        self._is_lost = False
        self._taken: dict[int, memoryview] = {}

    def reserve(self, count: int, *, wait: bool = False) -> bool:
        """Reserve blocks for `take`; return whether that many were free."""
        if not self._blocks.reserve(count, wait=wait):
            return False
        with self._lock:
            self._reserved += count
        return True

    def take(self) -> memoryview:
        """Return one of the reserved blocks."""
        try:
            block = _idle.pop()
        except IndexError:
            block = memoryview(bytearray(BLOCK_BYTES))
        self._taken[id(block)] = block
        return block

    def _give_up(self, count: int) -> None:
        with self._lock:
            if self._is_lost:
                return
            self._reserved -= count
        self._blocks.release(count)

    def give(self, blocks: Iterable[memoryview]) -> None:
        """Give blocks back, each once; does nothing after `close`."""
        given = [block for block in blocks if self._taken.pop(id(block), None) is not None]
        _idle.extend(given)
        self._give_up(len(given))

    def close(self) -> None:
        """End the save and return all its blocks."""
        self.give(list(self._taken.values()))
        self._give_up(self._reserved)

    def lose(self) -> None:
        """End a save whose threads may still use its blocks: no other save may get them."""
        with self._lock:
            self._is_lost, count = True, self._reserved
        self._taken.clear()
        self._blocks.release(count)
