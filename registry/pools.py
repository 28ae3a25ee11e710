"""The threads of a handle: started at first use, started anew in a forked child."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, TypeVar

#: Small objects are fetched by so many threads, so that the tail of a log is one round trip.
_SMALL_FETCHES = 64

_T = TypeVar("_T")


def results(futures: Sequence[Future[_T]]) -> list[_T]:
    """Return what all of them return; after an error none of them runs on."""
    try:
        return [future.result() for future in futures]
    finally:
        abandon(futures)


def abandon(futures: Iterable[Future[Any]]) -> None:
    """Cancel what has not begun and wait for the rest: it uses memory that is not ours to keep."""
    begun = [future for future in futures if not future.cancel()]
    wait(begun)


class Pools:
    """Thread pools by what they are for.

    Args:
        concurrency: How many bulk calls at once the store gains from.
    """

    def __init__(self, concurrency: int) -> None:
        cores = os.cpu_count() or 1
        self._sizes = {
            "hash": cores,
            "bulk": max(cores, concurrency),
            "small": _SMALL_FETCHES,
        }
        self._lock = Lock()
        self._pid = os.getpid()
        self._started: dict[str, ThreadPoolExecutor] = {}

    @property
    def hashing(self) -> ThreadPoolExecutor:
        """Threads for SHA-256, one for each core."""
        return self._pool("hash")

    @property
    def bulk(self) -> ThreadPoolExecutor:
        """Threads that move packs."""
        return self._pool("bulk")

    @property
    def small(self) -> ThreadPoolExecutor:
        """Threads that move small objects."""
        return self._pool("small")

    def close(self) -> None:
        """Let what is running finish, drop what is waiting, stop the threads."""
        for pool in self._started.values():
            pool.shutdown(wait=self._pid == os.getpid(), cancel_futures=True)
        self._started.clear()

    def _pool(self, name: str) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            # A fork copies the pools without their threads; work given to them would never start.
            self._pid, self._lock, self._started = os.getpid(), Lock(), {}
        with self._lock:
            if name not in self._started:
                self._started[name] = ThreadPoolExecutor(self._sizes[name], f"holdfast-{name}")
            return self._started[name]
