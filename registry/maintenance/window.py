"""Many objects through a few threads: so many at once, and so many bytes, never more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import TypeVar

from holdfast.registry.storage.threads import abandon

#: Bytes of objects held in memory at once; a larger object is held alone.
BYTES_IN_FLIGHT = 256 * 2**20
_AT_ONCE = 32

_T = TypeVar("_T")
_R = TypeVar("_R")


def each(
    pool: Executor,
    work: Callable[[_T], _R],
    items: Iterable[_T],
    take: Callable[[_T, Future[_R]], object],
    *,
    size_of: Callable[[_T], int] = lambda _: 0,
) -> None:
    """Work on items in parallel, and take what came of each in the order in which they are done.

    The next one begins as soon as there is room for it; nobody waits for the slowest of a batch.
    After an error none runs on: what is under way is waited for, what waits is dropped.

    Args:
        pool: The threads.
        work: What is done with each, in a thread.
        items: Asked for one at a time, no further ahead than the window.
        take: Told of each in the caller's thread.
        size_of: Bytes that an item takes while it is under way.
    """
    running: dict[Future[_R], _T] = {}
    held = 0

    def take_some() -> None:
        nonlocal held
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            item = running.pop(future)
            held -= size_of(item)
            take(item, future)

    try:
        for item in items:
            size = size_of(item)
            while running and (held + size > BYTES_IN_FLIGHT or len(running) >= _AT_ONCE):
                take_some()
            held += size
            running[pool.submit(work, item)] = item
        while running:
            take_some()
    finally:
        abandon(running)
