"""A cache of loaded models that keeps the most recently used ones.

The caller decides what a model is and how it is loaded.
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
    """At most `capacity` models by their versions; the least recently used one is dropped first.

    Any number of threads may use it. The cache never holds more than `capacity` models. More may be
    in memory: models that are being loaded, and dropped ones that a caller still holds.
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
        """Return the model of a version; load it if the cache does not hold it.

        If another thread is loading the same version, the call waits for it; different versions
        load in parallel. All waiting calls raise an error of `load`, and a later call loads again.
        Only an interrupt (`KeyboardInterrupt`, `SystemExit`) stays in its own thread; then a
        waiting call loads the model itself.
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
        """Drop a version, if it is there. One that is being loaded will not be kept."""
        with self._lock:
            model = self._held.pop(version, None)
            self._loading.pop(version, None)
        del model  # not under the lock: its destructor may run code

    def clear(self) -> None:
        """Drop all versions. Those that are being loaded will not be kept."""
        with self._lock:
            held, self._held = self._held, OrderedDict()
            self._loading.clear()
        held.clear()

    def versions(self) -> tuple[int, ...]:
        """Return the versions in the cache, the least recently used first."""
        with self._lock:
            return tuple(self._held)

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def _load(self, version: int, load: Callable[[], T], mine: Future[T]) -> T:
        try:
            model = load()
            # The dropped models die here and not under the lock: a destructor may run code.
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
        """Keep a model that was not dropped meanwhile; return the models dropped for it."""
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
