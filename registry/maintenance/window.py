"""Work on many objects in a few threads, with a bounded number of them and of bytes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from typing import TypeVar

from holdfast.registry.storage.threads import abandon, results

#: Bytes of objects held in memory at once; a larger object is held alone.
BYTES_IN_FLIGHT = 256 * 2**20
_AT_ONCE = 32
#: Placements and tables read at once.
_READS_AT_ONCE = 64
#: Logs replayed or marked at once.
RUNS_AT_ONCE = 256

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
    """Work on items in parallel, and take each result as soon as it is there.

    The next item begins as soon as there is room for it; no batch waits for its slowest item. After
    an error, items that have begun are waited for, and no more begin.

    Args:
        pool: The threads.
        work: The work on an item, done in a thread.
        items: The items; read one at a time, no further ahead than the window.
        take: Called in the caller's thread with each item and its future.
        size_of: Returns the bytes that an item takes in memory meanwhile.
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


def in_batches(
    pool: Executor,
    work: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    at_once: int = _READS_AT_ONCE,
) -> Iterator[_R]:
    """Yield the results of work on items, in the order of the items, a batch at a time."""
    waiting = iter(items)
    while batch := list(islice(waiting, at_once)):
        yield from results([pool.submit(work, item) for item in batch])
