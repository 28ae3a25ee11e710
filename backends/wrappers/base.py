"""`Wrapper` forwards every call to another backend; `ReadOnly` forwards only reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo, Unfinished
from holdfast.backends.errors import ReadOnlyStore, StorageError


class Wrapper(Backend):
    """A backend that forwards each call.

    Args:
        inner: The backend that gets the calls.

    Attributes:
        inner: The same backend.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.concurrency = inner.concurrency
        self.least_read_bytes = inner.least_read_bytes

    @property
    def url(self) -> str:
        """The URL of the inner backend."""
        return self.inner.url

    @property
    def server(self) -> str:
        """The server of the inner backend."""
        return self.inner.server

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        return self.inner.get(key, byte_range, into=into)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        self.inner.put(key, body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        return self.inner.put_if_absent(key, body)

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""
        return self.inner.stat(key)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order."""
        return self.inner.list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> Mapping[str, StorageError]:
        """Remove objects; one by one in a subclass that has a `delete` of its own."""
        if type(self).delete is not Wrapper.delete:
            return super().delete_many(keys)
        return self.inner.delete_many(keys)

    def make_durable(self, keys: Iterable[str]) -> None:
        """Make objects of other processes durable."""
        self.inner.make_durable(keys)

    def keeps_versions(self) -> bool | None:
        """Return whether the store keeps a deleted or replaced object."""
        return self.inner.keeps_versions()

    def move_to_class(self, key: str, storage_class: str) -> None:
        """Move an object to another storage class."""
        self.inner.move_to_class(key, storage_class)

    def restore(self, key: str, days: int) -> None:
        """Ask the store to make an archived object readable."""
        self.inner.restore(key, days)

    def begin(self, size_bytes: int) -> Unfinished | None:
        """Begin an object before its key is known."""
        return self.inner.begin(size_bytes)

    def clear_unfinished(self, older_than_s: float) -> int:
        """Remove unfinished files of dead writers; return the number of bytes freed."""
        return self.inner.clear_unfinished(older_than_s)

    def links(self, prefix: str = "", *, delimiter: bool = False) -> Iterator[str]:
        """Yield the names of symbolic links."""
        return self.inner.links(prefix, delimiter=delimiter)

    def free_bytes(self) -> int | None:
        """Return how many bytes can still be written."""
        return self.inner.free_bytes()

    def keep_reserve(self, below: str) -> None:
        """Reserve some space for the time when the store is full."""
        self.inner.keep_reserve(below)

    def give_up_reserve(self, most: int | None = None) -> int:
        """Free reserved space; return for how many small objects."""
        return self.inner.give_up_reserve(most)

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()


class ReadOnly(Wrapper):
    """A backend that refuses every write before it reaches the store."""

    def put(self, key: str, body: Body) -> None:  # noqa: ARG002
        """Refuse."""
        self._refuse(key)

    def put_if_absent(self, key: str, body: Body) -> bool:  # noqa: ARG002
        """Refuse."""
        self._refuse(key)

    def delete(self, key: str) -> None:
        """Refuse."""
        self._refuse(key)

    def move_to_class(self, key: str, storage_class: str) -> None:  # noqa: ARG002
        """Refuse."""
        self._refuse(key)

    def restore(self, key: str, days: int) -> None:  # noqa: ARG002
        """Refuse."""
        self._refuse(key)

    def begin(self, size_bytes: int) -> Unfinished | None:  # noqa: ARG002
        """Refuse."""
        self._refuse("an unfinished object")

    def clear_unfinished(self, older_than_s: float) -> int:  # noqa: ARG002
        """Refuse."""
        self._refuse("unfinished files")

    def keep_reserve(self, below: str) -> None:
        """Reserve nothing; callers accept that."""

    def give_up_reserve(self, most: int | None = None) -> int:  # noqa: ARG002
        """Refuse."""
        self._refuse("the reserve")

    def _refuse(self, what: str) -> NoReturn:
        raise ReadOnlyStore(
            "the store was opened for reading",
            where=f"{self.url}: {what}",
            hint="Open it again without read-only.",
        )
