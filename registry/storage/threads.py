"""The threads of a handle: started at first use, started anew in a forked child.

A thread of a pool never waits for one of the same pool or of one above it: what it hands there
runs in itself. Bulk threads may wait for small ones, and small and hashing ones for nobody, so
pools that are full of waiting threads cannot lock each other out. For the same reason nothing that
runs in the small pool may take a log's lock, whose holder waits for that pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from threading import Lock, local
from typing import Any, ParamSpec, TypeVar

#: Small objects are fetched by so many threads, so that the tail of a log is one round trip.
_SMALL_FETCHES = 64

#: Who may wait for whom: only for pools of a lower rank.
_RANKS = {"hash": 0, "small": 0, "bulk": 1}

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: The rank of the pool that the current thread belongs to.
_thread = local()


class _Here(Executor):
    """Runs what it is given in the calling thread."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done

    def map(self, fn: Callable[..., _T], *iterables: Iterable[Any], **_: Any) -> Iterator[_T]:
        return map(fn, *iterables)


_HERE = _Here()


class Threads(ThreadPoolExecutor):
    """A thread pool that goes on working in the calling thread when the program is ending.

    Python refuses new work for pools after the main thread has ended; other threads may still save.
    """

    _closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Hand work over."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if self._closed or not str(error).startswith("cannot schedule new futures"):
                raise
            return _HERE.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work."""
        self._closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def _join(rank: int) -> None:
    _thread.rank = rank


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
        self._started: dict[str, Threads] = {}

    @property
    def hashing(self) -> Executor:
        """Threads for SHA-256, one for each core."""
        return self._pool("hash")

    @property
    def bulk(self) -> Executor:
        """Threads that move packs."""
        return self._pool("bulk")

    @property
    def small(self) -> Executor:
        """Threads that move small objects."""
        return self._pool("small")

    def close(self) -> None:
        """Let what is running finish, drop what is waiting, stop the threads."""
        for pool in self._started.values():
            pool.shutdown(wait=self._pid == os.getpid(), cancel_futures=True)
        self._started.clear()

    def _pool(self, name: str) -> Executor:
        if _RANKS[name] >= getattr(_thread, "rank", len(_RANKS)):
            return _HERE
        if self._pid != os.getpid():
            # A fork copies the pools without their threads; work given to them would never start.
            self._pid, self._lock, self._started = os.getpid(), Lock(), {}
        with self._lock:
            if name not in self._started:
                self._started[name] = Threads(
                    self._sizes[name], f"holdfast-{name}", _join, (_RANKS[name],)
                )
            return self._started[name]
