"""The thread pools of a handle, started at their first use, also in a forked child.

A thread of a pool may wait only for pools of a lower rank. Work that it gives to its own pool or to
a higher one runs in the thread itself. So threads of runs may wait for bulk and small ones, bulk
threads for small ones, small and hashing threads wait for nobody, and pools full of waiting threads
cannot block each other. For the same
reason no work in the small pool may take the lock of a log: its holder waits for that pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from threading import Condition, Lock, local
from typing import Any, ParamSpec, TypeVar

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import cores

#: Threads that fetch small objects: enough to read the tail of a log in one round trip.
_SMALL_FETCHES = 64

#: Small objects read at once, such as placements and tables.
_READS_AT_ONCE = 64
#: Logs replayed or marked at once.
RUNS_AT_ONCE = 256
#: Runs copied at once; each also has threads for its packs.
_RUNS_COPIED = 16

#: A thread may wait only for pools of a lower rank.
_RANKS = {"hash": 0, "small": 0, "bulk": 1, "runs": 2}

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R")
#: The rank of the pool that the current thread belongs to.
_thread = local()


class _Caller(Executor):
    """Runs work in the calling thread."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done

    def map(self, fn: Callable[..., _T], *iterables: Iterable[Any], **_: Any) -> Iterator[_T]:
        return map(fn, *iterables)


_CALLER = _Caller()


class _Once:
    """Work that is done by whoever begins it first: a thread of the pool, or the caller."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._begun = Lock()
        self.made: Future[Any] = Future()  # its result

    def __call__(self) -> Any:
        if not self._begun.acquire(blocking=False):
            return None
        try:
            result = self._work()
        except BaseException as error:
            self.made.set_exception(error)
            del self  # or the error would hold the work, and that the caller's memory
            raise
        self.made.set_result(result)
        return result


class Threads(ThreadPoolExecutor):
    """A thread pool that runs work in the calling thread if no thread can be started for it.

    Python refuses new work for pools after the main thread has ended, but other threads may still
    be saving. The system refuses new threads where a container or a user may have only a few.
    """

    _closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Give work to the pool."""
        work = _Once(partial(fn, *args, **kwargs))
        try:
            return super().submit(work)
        except RuntimeError as error:
            if self._closed:
                raise _closed() from error
            # Even if a thread could not be started, the pool has queued the work.
            with suppress(BaseException):
                work()
            return work.made

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work."""
        self._closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def _closed() -> InvalidInput:
    return InvalidInput(
        "the registry was closed while another thread used it",
        hint="Close it after the last call. What was acknowledged stays.",
    )


def _join(rank: int) -> None:
    _thread.rank = rank


def results(futures: Sequence[Future[_T]]) -> list[_T]:
    """Return the results of all of them; after an error, none of them is still running."""
    try:
        return [future.result() for future in futures]
    except CancelledError as error:
        raise _closed() from error
    finally:
        abandon(futures)


def abandon(futures: Iterable[Future[Any]]) -> None:
    """Cancel work that has not begun and wait for the rest: it uses the caller's memory."""
    begun = [future for future in futures if not future.cancel()]
    wait(begun)


class Pools:
    """One thread pool for each kind of work."""

    def __init__(self, concurrency: int) -> None:
        own = cores()
        self._sizes = {"hash": own, "bulk": max(own, concurrency), "small": _SMALL_FETCHES}
        self._sizes["runs"] = _RUNS_COPIED
        self._lock = Lock()
        self._pid = os.getpid()
        self._started: dict[str, Threads] = {}

    @property
    def hashing(self) -> Executor:
        """Threads for SHA-256, one for each core."""
        return self.pool("hash")

    @property
    def copying(self) -> Executor:
        """What copies memory while the caller waits: threads, or the caller on a single core."""
        return self.hashing if self._sizes["hash"] > 1 else _CALLER

    @property
    def bulk(self) -> Executor:
        """Threads that move packs."""
        return self.pool("bulk")

    @property
    def runs(self) -> Executor:
        """Threads that copy runs."""
        return self.pool("runs")

    @property
    def small(self) -> Executor:
        """Threads that move small objects."""
        return self.pool("small")

    def close(self) -> None:
        """Wait for running work, cancel waiting work, and stop the threads."""
        if self._pid != os.getpid():
            return  # a fork copies the pools without their threads, and perhaps with locks held
        with self._lock:  # another thread may start a pool
            started, self._started = self._started, {}
        for pool in started.values():
            pool.shutdown(cancel_futures=True)

    def pool(self, name: str) -> Executor:
        """Return the threads of a name; a thread that would wait for itself does the work."""
        if _RANKS[name] >= getattr(_thread, "rank", len(_RANKS)):
            return _CALLER
        if self._pid != os.getpid():
            # A fork copies the pools without their threads; their work would never start.
            self._pid, self._lock, self._started = os.getpid(), Lock(), {}
        with self._lock:
            if name not in self._started:
                self._started[name] = Threads(
                    self._sizes[name], f"holdfast-{name}", _join, (_RANKS[name],)
                )
            return self._started[name]


class Claims:
    """Names that threads work on: who wants one that another has claimed waits for it."""

    def __init__(self) -> None:
        self._claimed: set[object] = set()
        self._changed = Condition()

    @contextmanager
    def of(self, names: Iterable[object]) -> Iterator[None]:
        """Claim all of these at once, so that two threads cannot wait for each other."""
        wanted = set(names)
        with self._changed:
            self._changed.wait_for(lambda: self._claimed.isdisjoint(wanted))
            self._claimed |= wanted
        try:
            yield
        finally:
            with self._changed:
                self._claimed -= wanted
                self._changed.notify_all()


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


def together(
    items: Iterable[_T],
    size_of: Callable[[_T], int],
    most: int,
    kind_of: Callable[[_T], object] = lambda _: None,
) -> Iterator[list[_T]]:
    """Yield neighbours of one kind in lists of at most this size; a larger item is alone."""
    batch, held, kind = list[_T](), 0, None
    for item in items:
        size, of = size_of(item), kind_of(item)
        if batch and (of != kind or held + size > most):
            yield batch
            batch, held = [], 0
        batch.append(item)
        held, kind = held + size, of
    if batch:
        yield batch
