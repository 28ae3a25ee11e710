"""Count calls and bytes, for tests of round trips and for benchmarks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo, body_bytes
from holdfast.backends.errors import StorageError
from holdfast.backends.wrappers.base import Wrapper


@dataclass(frozen=True, slots=True)
class Call:
    """One call, in the order in which calls began.

    Attributes:
        method: Name of the method.
        key: The key, the prefix of a listing, or "" if the call is for the whole store.
        byte_range: The range of a `get`.
    """

    method: str
    key: str
    byte_range: ByteRange | None = None


@dataclass(slots=True)
class Usage:
    """The use of a store.

    Attributes:
        calls: Number of calls by method, including failed ones.
        read_bytes: Bytes that `get` returned.
        written_bytes: Bytes of bodies whose put returned, including refused exclusive creates.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def requests(self) -> int:
        """Number of all calls."""
        return sum(self.calls.values())

    def since(self, before: Usage) -> Usage:
        """Return the usage since `before`."""
        calls = {m: n - before.calls.get(m, 0) for m, n in self.calls.items()}
        return Usage(
            {m: n for m, n in calls.items() if n},
            self.read_bytes - before.read_bytes,
            self.written_bytes - before.written_bytes,
        )


class Metered(Wrapper):
    """A backend that counts calls and bytes.

    Args:
        inner: The backend that gets the calls.
        log: Each call is appended to it, if it is given.
    """

    def __init__(self, inner: Backend, log: MutableSequence[Call] | None = None) -> None:
        super().__init__(inner)
        self._log = log
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._read_bytes = 0
        self._written_bytes = 0

    def snapshot(self) -> Usage:
        """Return the counts so far."""
        with self._lock:
            return Usage(dict(self._calls), self._read_bytes, self._written_bytes)

    @contextmanager
    def measure(self) -> Iterator[Usage]:
        """Yield a usage; when the block ends, it has the counts of the block."""
        before, within = self.snapshot(), Usage()
        try:
            yield within
        finally:
            found = self.snapshot().since(before)
            within.calls = found.calls
            within.read_bytes = found.read_bytes
            within.written_bytes = found.written_bytes

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        self._count(Call("get", key, byte_range))
        data = self.inner.get(key, byte_range, into=into)
        self._moved(read=len(data) if byte_range is None else len(byte_range))
        return data

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        self._count(Call("put", key))
        self.inner.put(key, body)
        self._moved(written=body_bytes(body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        self._count(Call("put_if_absent", key))
        created = self.inner.put_if_absent(key, body)
        self._moved(written=body_bytes(body))
        return created

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""
        self._count(Call("stat", key))
        return self.inner.stat(key)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order; this counts as one call for any number of pages."""
        self._count(Call("list", prefix))
        return self.inner.list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._count(Call("delete", key))
        self.inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> Mapping[str, StorageError]:
        """Remove objects; this counts as one call for any number of keys."""
        self._count(Call("delete_many", ""))
        return self.inner.delete_many(keys)

    def move_to_class(self, key: str, storage_class: str) -> None:
        """Move an object to another storage class."""
        self._count(Call("move_to_class", key))
        self.inner.move_to_class(key, storage_class)

    def restore(self, key: str, days: int) -> None:
        """Ask the store to make an archived object readable."""
        self._count(Call("restore", key))
        self.inner.restore(key, days)

    def keeps_versions(self) -> bool | None:
        """Return whether the store keeps a deleted or replaced object."""
        self._count(Call("keeps_versions", ""))
        return self.inner.keeps_versions()

    def clear_unfinished(self, older_than_s: float) -> int:
        """Remove unfinished files of dead writers; return the number of bytes freed."""
        self._count(Call("clear_unfinished", ""))
        return self.inner.clear_unfinished(older_than_s)

    def _count(self, call: Call) -> None:
        with self._lock:
            self._calls[call.method] += 1
            if self._log is not None:
                self._log.append(call)

    def _moved(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self._read_bytes += read
            self._written_bytes += written
