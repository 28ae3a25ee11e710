"""The interface of a backend: seven methods, eleven more with defaults, and five promises.

The methods with defaults are for collection, for writers that depend on objects of other writers,
for symbolic links, for storage classes and for full stores. A backend overrides a default that is
wrong for it.

A backend stores bytes and knows nothing of checkpoints. Keys are segments of `[A-Za-z0-9._-]`
joined by `/`; no segment is empty, `.` or `..`.

The five promises, each of which `holdfast.backends.testing.BackendContract` tries to break:

1. Atomic visibility: a reader sees a whole object or none.
2. Exclusive create: of all concurrent `put_if_absent` of one key exactly one creates the object.
3. Read after write: an acknowledged put is seen by every later `get`, `stat` and `list`, anywhere.
4. Consistent listing: `list` sees every put that completed before it began, in order of the
   UTF-8 bytes of the keys.
5. Durable on return: an acknowledged put survives the death of the process, and on a local disk
   the loss of power. So does the object that made `put_if_absent` return False.

These are promises of the store. Over a network, a backend accepts an answer only if the answer
proves that it came from the store. Every other answer raises `StoreUnavailable`; it never counts as
an acknowledgment, an absence or a listing. A folder and the memory of a process need no proof.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.backends.errors import (
    InvalidLocation,
    ObjectTruncated,
    ReadOnlyStore,
    StorageError,
    StoreUnavailable,
    StoreUnsuitable,
)
from holdfast.backends.escape import quoted

Buffer = bytes | bytearray | memoryview

_KEY = re.compile(r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of the bytes of an object.

    Attributes:
        start: First byte, counted from 0.
        stop: One past the last byte; greater than `start`.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"not a byte range: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


class ObjectInfo(NamedTuple):
    """Key, size and time of an object.

    Attributes:
        key: The object's key; ends with `/` for a folder of a delimited listing.
        size_bytes: Length of the object; 0 for a folder.
        modified_s: Time of the last write, by the store's clock and never by ours; seconds since
            the epoch, 0 for a folder. It may be rounded down to whole seconds: for one object,
            `stat` may give up to a second less than a listing. So times that differ by less than a
            second do not show which object was written first. It may be earlier than the moment at
            which the object became visible.
        is_archived: Whether it is in a storage class of the store that has to be restored before it
            can be read. An object that was restored for some days still says so.
    """

    key: str
    size_bytes: int
    modified_s: float
    is_archived: bool = False


class Unfinished(ABC):
    """An object that is written before its key is known; then its backend takes it as a body."""

    size_bytes = 0  # bytes written so far

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write the next bytes; their memory can be reused after this call."""

    @abstractmethod
    def close(self) -> None:
        """Remove the bytes unless they are an object now; may be called twice."""


Body = Buffer | Sequence[Buffer] | Unfinished


class Backend(ABC):
    """A place for objects. Methods may be called from any thread."""

    #: The number of simultaneous calls that makes the store fastest.
    concurrency: int = 8
    #: The least bytes for one read, so that its latency matters little.
    least_read_bytes: int = 2**20
    #: The storage classes to which an object can be moved; of these, the archives.
    storage_classes: frozenset[str] = frozenset()
    archives: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of this backend, without secrets, for messages."""

    @property
    def server(self) -> str:
        """The server or account that the URL leaves open; empty if there is none."""
        return ""

    @abstractmethod
    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it.

        Args:
            key: The object's key.
            byte_range: The part to read; the whole object without it.
            into: Writable, contiguous byte buffers to fill in order, instead of allocating. Their
                lengths add up to that of `byte_range`, which is then required.

        Returns:
            Exactly the requested bytes; none if they were read into `into`.

        Raises:
            ObjectNotFound: The key is absent.
            ObjectTruncated: The object ends before the range does.
            StorageError: Any other failure, or the whole of an object that is longer than
                `holdfast.backends.limits` allows.
        """

    @abstractmethod
    def put(self, key: str, body: Body) -> None:
        """Create or replace an object, atomically and durably.

        Args:
            key: The object's key.
            body: The bytes, or buffers that are stored in order without joining them. They are not
                read after this call returns or raises, so their memory can be reused.
        """

    @abstractmethod
    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it.

        Raises:
            StoreUnavailable: The outcome is unknown: read the key back, or call again.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object.

        Raises:
            ObjectNotFound: The key is absent.
        """

    @abstractmethod
    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order of their keys' bytes.

        Args:
            prefix: List only keys that begin with it (any string, not only whole segments).
            start_after: List only entries whose key is greater, including folders of a delimited
                listing.
            limit: The most entries; the store is not asked for more.
            delimiter: Replace all keys below the next `/` after `prefix` by one entry whose key
                ends with `/`, as S3 does with `Delimiter="/"`.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""

    def delete_many(self, keys: Iterable[str]) -> Mapping[str, StorageError]:
        """Remove objects, in any order and by few requests if the store can; some may be absent.

        Returns:
            The error of each key that could not be removed. All other keys are absent now.

        Raises:
            StoreUnavailable: The store does not answer. Some keys may be left: call again.
            StorageError: Nothing can be removed, for a reason that concerns all keys.
        """
        failed = {}
        for key in keys:
            try:
                self.delete(key)
            except (InvalidLocation, ReadOnlyStore, StoreUnavailable):
                raise
            except StorageError as error:
                failed[key] = error
        return failed

    def make_durable(self, keys: Iterable[str]) -> None:  # noqa: B027
        """Make objects of other processes durable, so that they survive a loss of power.

        In most stores every visible object is durable, and this does nothing. On a disk a name can
        be visible before its folder is synced: the process that put it may be slow or dead.

        Args:
            keys: Objects that were seen, by `get`, `stat` or `list`, before this call began.
        """

    def keeps_versions(self) -> bool | None:
        """Return whether the store keeps a deleted or replaced object as a noncurrent version.

        Returns:
            False if its bytes are freed at once; True if they are kept until somebody removes the
            version; None if the store does not tell, or if it depends on the object.
        """
        return False

    def move_to_class(self, key: str, storage_class: str) -> None:
        """Move an object to one of `storage_classes`; key and bytes stay, its time may be new.

        Raises:
            ObjectNotFound: It is gone.
            Archived: It has to be restored first.
            StoreUnsuitable: The store has no such class.
        """
        raise StoreUnsuitable(
            "the store has no such storage class",
            where=self.url,
            expected=", ".join(sorted(self.storage_classes)) or "a bucket with storage classes",
            found=f"{storage_class} for {key}",
        )

    def restore(self, key: str, days: int) -> None:
        """Ask the store to make an archived object readable for some days; it takes hours."""
        raise StoreUnsuitable(
            "the store has no archive", where=self.url, found=f"{key} for {days} days"
        )

    def begin(self, size_bytes: int) -> Unfinished | None:  # noqa: ARG002
        """Begin an object of about this size before its key is known; `None` if that cannot be."""
        return None

    def clear_unfinished(self, older_than_s: float) -> int:  # noqa: ARG002
        """Remove unfinished files of dead writers, which no listing shows.

        It never touches an object. A dead writer looks like a slow one, so only the age decides. A
        slow writer then fails with `StoreUnavailable` and has made nothing visible, so the caller
        must allow enough time.

        Args:
            older_than_s: The age of the files to remove, by the store's clock.

        Returns:
            The number of bytes freed.
        """
        return 0

    def links(self, prefix: str = "", *, delimiter: bool = False) -> Iterator[str]:  # noqa: ARG002
        """Yield the names of symbolic links, in order, without following any.

        Reading follows a link, but a write or a deletion through it would change files elsewhere.
        A bucket has none.

        Args:
            prefix: Yield only links whose name begins with it, or a link on the path to it.
            delimiter: Yield only names directly below `prefix`, not those in deeper folders.
        """
        return iter(())

    def free_bytes(self) -> int | None:
        """Return how many bytes can still be written; `None` if the store does not know.

        Space that only some users may use does not count. A quota may be unknown.
        """
        return None

    def keep_reserve(self, below: str) -> None:  # noqa: B027
        """Reserve some space, so that small objects can be written when the store is full.

        Does nothing if the store is never full, is read-only, or has no space for it.

        Args:
            below: Reserve space for one small object in each folder directly below it.
        """

    def give_up_reserve(self, most: int | None = None) -> int:  # noqa: ARG002
        """Free the reserve of `most` small objects, or all of it; return the number of objects."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; may be called twice."""


def refuse_links(backend: Backend, prefix: str, *, delimiter: bool = False) -> None:
    """Raise if there is a symbolic link; the arguments are those of `Backend.links`.

    Raises:
        StoreUnsuitable: There is a link; the message names it.
    """
    for link in backend.links(prefix, delimiter=delimiter):
        raise link_found(f"{backend.url}/{link}")


def link_found(where: str) -> StoreUnsuitable:
    """Return the error for a symbolic link below a store's root."""
    return StoreUnsuitable(
        "there is a symbolic link in the registry",
        where=where,
        expected="a file or folder of the registry itself",
        hint="Holdfast reads through links, but never writes or deletes through one. Replace the "
        "link by the file or folder that it names. Only the registry's own folder may be a link.",
    )


def check_key(key: str) -> str:
    """Return `key` if it is a legal key.

    Raises:
        InvalidLocation: It is not a legal key.
    """
    if not _KEY.fullmatch(key):
        raise InvalidLocation(
            "not a legal key",
            where=quoted(key),
            expected="segments of [A-Za-z0-9._-] joined by '/', none empty, '.' or '..'",
        )
    return key


def check_into(
    byte_range: ByteRange | None, into: Sequence[memoryview] | None
) -> Sequence[memoryview]:
    """Return the buffers of a `get` as flat views, or none.

    Raises:
        ValueError: They do not add up to the range, or cannot be written to.
    """
    if into is None:
        return ()
    views = as_buffers(into)
    wanted = -1 if byte_range is None else len(byte_range)
    given = sum(map(len, views))
    if given != wanted or any(view.readonly for view in views):
        raise ValueError(f"`into` must be {wanted} writable bytes in all, not {given}")
    return views


def as_buffers(body: Body) -> list[memoryview]:
    """Return a body as a list of flat byte views, copying nothing; empty buffers are skipped."""
    if isinstance(body, Unfinished):
        raise TypeError("this unfinished object is of another backend")
    parts = [body] if isinstance(body, (bytes, bytearray, memoryview)) else body
    views: list[memoryview] = [memoryview(part) for part in parts]
    # A view with a zero in its shape cannot be cast.
    return [view.cast("B") for view in views if view.nbytes]


def body_bytes(body: Body) -> int:
    """Return how many bytes a body has."""
    return body.size_bytes if isinstance(body, Unfinished) else sum(map(len, as_buffers(body)))


def truncated(where: str, stop: int, found_bytes: int) -> ObjectTruncated:
    """Return the error for an object that is shorter than a range of it."""
    return ObjectTruncated(
        "the object ends before the range does",
        where=where,
        expected=f"at least {stop} bytes",
        found=f"{found_bytes} bytes",
    )


def cut(key: str, held: bytes, byte_range: ByteRange, into: Sequence[memoryview] | None) -> bytes:
    """Return the result of a ranged `get` for an object whose bytes are in memory."""
    views = check_into(byte_range, into)
    if byte_range.stop > len(held):
        raise truncated(key, byte_range.stop, len(held))
    if into is None:
        return held[byte_range.start : byte_range.stop]
    position = byte_range.start
    for view in views:
        view[:] = memoryview(held)[position : position + len(view)]
        position += len(view)
    return b""
