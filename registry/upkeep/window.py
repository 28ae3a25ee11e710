"""Work on many objects in a few threads, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import TypeVar

from holdfast.registry.store import results

#: Placements and tables read at once.
_READS_AT_ONCE = 64
#: Logs replayed or marked at once.
RUNS_AT_ONCE = 256

_T = TypeVar("_T")
_R = TypeVar("_R")


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
