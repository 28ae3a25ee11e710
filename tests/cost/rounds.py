"""Counting dependent round trips, without a clock and without threads.

Time is logical. Every call to the store takes one round; work that is handed to a pool begins at
the round in which it was handed over, or in which one of the pool is free; who waits for a
result goes on at the round in which it came. So many rounds are what a slow network makes felt.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from holdfast.backends import Backend, Body, ByteRange, ObjectInfo
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.face.registry import Registry

#: What a bucket tells in one answer.
_PAGE = 1000


class Clock:
    """Attributes: `now`, the rounds that have passed for whoever is at work."""

    def __init__(self) -> None:
        self.now = 0

    def rounds(self, act: Callable[[], Any]) -> int:
        """Return how many rounds an act takes."""
        before = self.now
        act()
        return self.now - before


class Timed(Wrapper):
    """A backend each call of which takes a round; a listing takes one for each page."""

    def __init__(self, inner: Backend, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        self._clock.now += 1
        return self.inner.get(key, byte_range, into=into)

    def put(self, key: str, body: Body) -> None:
        self._clock.now += 1
        self.inner.put(key, body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        self._clock.now += 1
        return self.inner.put_if_absent(key, body)

    def stat(self, key: str) -> ObjectInfo:
        self._clock.now += 1
        return self.inner.stat(key)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        self._clock.now += 1
        found = self.inner.list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)
        for number, info in enumerate(found):
            if number and number % _PAGE == 0:
                self._clock.now += 1
            yield info

    def delete(self, key: str) -> None:
        self._clock.now += 1
        self.inner.delete(key)


class _Timed(Future[Any]):
    """A result that comes at a round of its own."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.came_at = 0

    def result(self, timeout: float | None = None) -> Any:
        self._clock.now = max(self._clock.now, self.came_at)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._clock.now = max(self._clock.now, self.came_at)
        return super().exception(timeout)


class _Pool(Executor):
    """Threads that do not exist, but are busy."""

    def __init__(self, clock: Clock, threads: int) -> None:
        self._clock = clock
        self._free_at = [0] * threads

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Timed(self._clock)
        handed_over = self._clock.now
        self._clock.now = max(handed_over, heapq.heappop(self._free_at))
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        future.came_at, self._clock.now = self._clock.now, handed_over
        heapq.heappush(self._free_at, future.came_at)
        return future


class _Pools:
    def __init__(self, clock: Clock, concurrency: int) -> None:
        self.hashing = _Pool(clock, 2)
        self.bulk = _Pool(clock, concurrency)
        self.small = _Pool(clock, 64)

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


def timed(registry: Registry, clock: Clock) -> Registry:
    """Let a registry work by the logical clock."""
    registry.handle.store.pools.close()
    registry.handle.store.pools = _Pools(clock, registry.handle.store.backend.concurrency)
    return registry
