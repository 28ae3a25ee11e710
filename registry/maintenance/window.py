"""Many objects through a few threads: so many at once, and so many bytes, never more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import TypeVar

from registry.pools import abandon

#: Bytes of objects held in memory at once; a larger object is held alone.
BYTES_IN_FLIGHT = 256 * 2**20
_AT_ONCE = 32

_T = TypeVar("_T")
_R = TypeVar("_R")


def completed(
    pool: Executor,
    work: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    size_of: Callable[[_T], int] = lambda _: 0,
) -> Iterator[tuple[_T, Future[_R]]]:
    """Yield items with what came of them, in the order in which they are done.

    The next one begins as soon as there is room for it; nobody waits for the slowest of a batch.
    What is under way when the caller stops is waited for.

    Args:
        pool: The threads.
        work: What is done with each.
        items: Asked for one at a time, no further ahead than the window.
        size_of: Bytes that an item takes while it is under way.
    """
    running: dict[Future[_R], _T] = {}
    held = 0
    try:
        for item in items:
            while running and (held + size_of(item) > BYTES_IN_FLIGHT or len(running) >= _AT_ONCE):
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    done = running.pop(future)
                    held -= size_of(done)
                    yield done, future
            held += size_of(item)
            running[pool.submit(work, item)] = item
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future
    finally:
        abandon(running)
