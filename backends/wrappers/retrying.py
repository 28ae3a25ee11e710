"""Repeat calls while a store is unavailable: bounded in number and in time, with full jitter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.patience import Attempts, Patience
from holdfast.backends.wrappers.base import Wrapper

_T = TypeVar("_T")


class Retrying(Wrapper):
    """A backend that repeats a call if the store was unavailable.

    Every method can be repeated. A repeated `put_if_absent` returns False if the first call created
    the object and only its answer was lost; a caller who must know reads the object. A repeated
    `clear_unfinished` returns the bytes of its last call alone.

    Args:
        inner: The backend that gets the calls.
        patience: How long to keep trying.
        sleep: Waits for a number of seconds; for tests.
        clock: Returns seconds that never go back; for tests.
    """

    def __init__(
        self,
        inner: Backend,
        patience: Patience | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._patience = patience or Patience()
        self._sleep = sleep
        self._clock = clock

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        return self._retry(lambda: self.inner.get(key, byte_range, into=into))

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        self._retry(lambda: self.inner.put(key, body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; False may mean that its own answer was lost."""
        return self._retry(lambda: self.inner.put_if_absent(key, body))

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""
        return self._retry(lambda: self.inner.stat(key))

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order; after an interruption, continue after the last one."""
        attempt = Attempts(self._patience, self._sleep, self._clock)
        while True:
            try:
                for info in self.inner.list(
                    prefix, start_after=start_after, limit=limit, delimiter=delimiter
                ):
                    yield info
                    start_after = info.key
                    limit = None if limit is None else limit - 1
                    attempt = Attempts(self._patience, self._sleep, self._clock)
            except StoreUnavailable as error:
                attempt.failed(error)
            else:
                return

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._retry(lambda: self.inner.delete(key))

    def make_durable(self, keys: Iterable[str]) -> None:
        """Make objects of other processes durable."""
        seen = list(keys)
        self._retry(lambda: self.inner.make_durable(seen))

    def keeps_versions(self) -> bool | None:
        """Return whether the store keeps a deleted or replaced object."""
        return self._retry(self.inner.keeps_versions)

    def clear_unfinished(self, older_than_s: float) -> int:
        """Remove unfinished files of dead writers; return the number of bytes freed."""
        return self._retry(lambda: self.inner.clear_unfinished(older_than_s))

    def _retry(self, call: Callable[[], _T]) -> _T:
        attempt = Attempts(self._patience, self._sleep, self._clock)
        while True:
            try:
                return call()
            except StoreUnavailable as error:
                attempt.failed(error)
