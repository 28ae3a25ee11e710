"""Loaded models, the most recently used ones kept.

Owns who is kept and who goes; what a model is, where it lies and how it is loaded is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import Lock
from typing import Generic, TypeVar

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

T = TypeVar("T")


class ModelCache(Generic[T]):
    """At most `capacity` models by their versions; the least recently used one goes first.

    Any number of threads may use it. It never holds more than `capacity` models, and that is all
    it answers for: a model that is just being loaded is in memory besides, and one that a caller
    still holds stays there after it went.

    Args:
        capacity: How many models it keeps, from 1. (Hydra keeps 5: `seeds/hydra.md`, Opponent
            Pool Versioning.)

    Raises:
        InvalidInput: The capacity is anything else.
    """

    def __init__(self, capacity: int) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise InvalidInput(
                "not a number of models",
                where="capacity",
                expected="a whole number from 1",
                found=quoted(capacity),
            )
        self._capacity = capacity
        self._lock = Lock()
        self._held: OrderedDict[int, T] = OrderedDict()
        self._loading: dict[int, Future[T]] = {}

    def get(self, version: int, load: Callable[[], T]) -> T:
        """Return the model of a version, loaded now if it is not held.

        Whoever asks for a version that another thread is loading waits for that one; different
        versions load side by side. What `load` raises is not kept: it goes to all who wait, and
        the next one to ask loads anew. Only an interrupt (`KeyboardInterrupt`, `SystemExit`) is
        for its own thread alone, and those who wait load themselves.

        Args:
            version: Which.
            load: Loads it. It must not ask this cache for the same version.
        """
        while True:
            with self._lock:
                if version in self._held:
                    self._held.move_to_end(version)
                    return self._held[version]
                awaited = self._loading.get(version)
                if awaited is None:
                    mine = self._loading[version] = Future()
            if awaited is None:
                return self._load(version, load, mine)
            try:
                return awaited.result()
            except CancelledError:
                if not awaited.cancelled():
                    raise

    def drop(self, version: int) -> None:
        """Let go of a version, if it is there. One that is being loaded will not be kept."""
        with self._lock:
            model = self._held.pop(version, None)
            self._loading.pop(version, None)
        del model  # not under the lock: its end may run code

    def clear(self) -> None:
        """Let go of all. What is being loaded will not be kept."""
        with self._lock:
            held, self._held = self._held, OrderedDict()
            self._loading.clear()
        held.clear()

    def versions(self) -> tuple[int, ...]:
        """Return what is held, the least recently used first."""
        with self._lock:
            return tuple(self._held)

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def _load(self, version: int, load: Callable[[], T], mine: Future[T]) -> T:
        try:
            model = load()
            # What made room is let go here and not under the lock: its end may run code.
            self._keep(version, model, mine)
            mine.set_result(model)
        except BaseException as error:
            self._forget(version, mine)
            if isinstance(error, Exception):
                mine.set_exception(error)
            else:
                mine.cancel()
            raise
        return model

    def _keep(self, version: int, model: T, mine: Future[T]) -> list[T]:
        """Hold a model that was not dropped meanwhile; return those that made room for it."""
        evicted: list[T] = []
        with self._lock:
            if self._loading.get(version) is mine:
                del self._loading[version]
                while len(self._held) >= self._capacity:
                    evicted.append(self._held.popitem(last=False)[1])
                self._held[version] = model
        return evicted

    def _forget(self, version: int, mine: Future[T]) -> None:
        with self._lock:
            if self._loading.get(version) is mine:
                del self._loading[version]
