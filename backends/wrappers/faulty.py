"""Fail on purpose: crashes, errors and flipped bits at a chosen call.

A crash test runs its scenario with a crash at call 1, 2, 3, ... until a run ends without one, and
reopens the inner backend each time:

    for at in itertools.count(1):
        faulty = Faulty(inner, [Fault(at, after=True)])
        try:
            scenario(faulty)
        except InjectedCrash:
            check(inner)
        else:
            break
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo, as_buffers
from holdfast.backends.errors import StorageError
from holdfast.backends.wrappers.base import Wrapper

_T = TypeVar("_T")


class InjectedCrash(BaseException):
    """The process is dead: no later call of it has an effect."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        at: The number of the counted call that fails, from 1.
        after: Whether the call has its effect before it fails, so that its answer is lost.
        error: The error to raise; without it the process dies, and every later call raises too.
    """

    at: int
    after: bool = False
    error: StorageError | None = None


class Faulty(Wrapper):
    """A backend that fails at chosen calls.

    Args:
        inner: The backend that gets the calls.
        faults: The faults.
        count_reads: Whether `get`, `stat`, `list`, `make_durable` and `keeps_versions` count as
            calls too, not only writes.
        flipped: Key -> the bit, counted from the start of the object, that `get` inverts.

    Attributes:
        calls: Number of counted calls that have begun.
    """

    def __init__(
        self,
        inner: Backend,
        faults: Sequence[Fault] = (),
        *,
        count_reads: bool = False,
        flipped: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(inner)
        self.calls = 0
        self._faults = {fault.at: fault for fault in faults}
        self._count_reads = count_reads
        self._flipped = dict(flipped or {})
        self._dead = False
        self._lock = threading.Lock()

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        data = self._read(lambda: self.inner.get(key, byte_range, into=into))
        if key not in self._flipped:
            return data
        byte, bit = divmod(self._flipped[key], 8)
        shown = bytearray(data)
        parts = as_buffers(shown if into is None else into)
        _flip(parts, byte - (byte_range.start if byte_range else 0), bit)
        return bytes(shown)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        self._act(lambda: self.inner.put(key, body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        return self._act(lambda: self.inner.put_if_absent(key, body))

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""
        return self._read(lambda: self.inner.stat(key))

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order."""
        return self._read(
            lambda: self.inner.list(
                prefix, start_after=start_after, limit=limit, delimiter=delimiter
            )
        )

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._act(lambda: self.inner.delete(key))

    def make_durable(self, keys: Iterable[str]) -> None:
        """Make objects of other processes durable; counts as a read."""
        self._read(lambda: self.inner.make_durable(keys))

    def keeps_versions(self) -> bool | None:
        """Return whether the store keeps a deleted or replaced object; counts as a read."""
        return self._read(self.inner.keeps_versions)

    def clear_unfinished(self, older_than_s: float) -> int:
        """Remove unfinished files of dead writers; counts as a write."""
        return self._act(lambda: self.inner.clear_unfinished(older_than_s))

    def keep_reserve(self, below: str) -> None:
        """Reserve some space, unless the process is dead; not counted."""
        self._live()
        self.inner.keep_reserve(below)

    def give_up_reserve(self, most: int | None = None) -> int:
        """Free reserved space; not counted."""
        self._live()
        return self.inner.give_up_reserve(most)

    def _read(self, call: Callable[[], _T]) -> _T:
        if self._count_reads:
            return self._act(call)
        self._live()
        return call()

    def _act(self, call: Callable[[], _T]) -> _T:
        fault = self._begin()
        if fault is not None and not fault.after:
            self._fail(fault)
        try:
            answer = call()
        finally:
            # Also if the call itself fails: the process dies before it sees that error.
            if fault is not None and fault.after:
                self._fail(fault)
        # A call that was running in another thread at the crash never returns.
        self._live()
        return answer

    def _begin(self) -> Fault | None:
        with self._lock:
            self._live()
            self.calls += 1
            return self._faults.get(self.calls)

    def _fail(self, fault: Fault) -> None:
        if fault.error is not None:
            raise fault.error
        self._dead = True
        self._live()

    def _live(self) -> None:
        if self._dead:
            raise InjectedCrash(f"dead since call {self.calls}")


def _flip(parts: Sequence[memoryview], byte: int, bit: int) -> None:
    """Invert a bit of the byte `byte` of all parts together, if they have it."""
    for part in parts:
        if 0 <= byte < len(part):
            part[byte] ^= 1 << bit
            return
        byte -= len(part)
