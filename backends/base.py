"""The interface of a backend: seven methods, seven with default answers, and five promises.

The latter seven are for collection, for a writer that depends on objects of other writers, for
symbolic links and for a full store; a backend overrides a default answer that is wrong for it.

A backend knows where bytes live and nothing of checkpoints. Keys are `/`-separated segments of
`[A-Za-z0-9._-]`, no segment empty, `.` or `..`.

The five promises, each of which `holdfast.backends.testing.BackendContract` tries to break:

1. Atomic visibility: an object is seen whole or not at all.
2. Exclusive create: of any number of concurrent `put_if_absent` of one key exactly one creates it.
3. Read after write: an acknowledged put is seen by every later `get`, `stat` and `list`, anywhere.
4. Consistent listing: `list` sees every put that completed before it began, in order of the
   UTF-8 bytes of the keys.
5. Durable on return: an acknowledged put survives the death of the process, and on a local disk
   the loss of power. So does the object that made `put_if_absent` return False.

They hold for answers of the store, so a backend with a network in between believes an answer only
if it proves that the store gave it: what does not is `StoreUnavailable`, never an acknowledgment,
an absence or a listing. A folder and the memory of a process have nothing in between.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.backends.errors import InvalidLocation, ObjectTruncated, StoreUnsuitable
from holdfast.backends.escape import quoted

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]

_KEY = re.compile(r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes of an object.

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


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store tells of an object without its bytes.

    Attributes:
        key: The object's key; ends with `/` for a folder of a delimited listing.
        size_bytes: Length of the object; 0 for a folder.
        modified_s: When its bytes were last written, by the store's clock and never by ours;
            seconds since the epoch, 0 for a folder. Rounded down to whole seconds at the coarsest:
            of one object `stat` may say up to a second less than a listing, so times of two
            objects that are closer together than that say nothing of their order. It may lie
            before the moment at which the object was seen first.
    """

    key: str
    size_bytes: int
    modified_s: float


class Backend(ABC):
    """A place for objects. Methods may be called from any thread."""

    #: How many calls at once the store gains from.
    concurrency: int = 8
    #: What one read should move at least, so that what it waits for counts for little.
    least_read_bytes: int = 2**20

    @property
    @abstractmethod
    def url(self) -> str:
        """Where this backend is, without secrets, fit for messages."""

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
            byte_range: The part that is wanted; the whole object without it.
            into: Writable, contiguous byte buffers to fill one after another instead of
                allocating; their lengths add up to that of `byte_range`, which is then required.

        Returns:
            The bytes, exactly as many as asked for; empty when they went into `into`.

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
            body: The bytes, or buffers that are stored one after another without joining them. They
                are not read after this returns or raises: their memory is used again.
        """

    @abstractmethod
    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it.

        Raises:
            StoreUnavailable: The outcome is unknown: read the key back, or call again.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Tell size and time of an object.

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
            prefix: Only keys that begin with it (any string, not only whole segments).
            start_after: Only entries whose key is greater than it, folders of a delimited
                listing included.
            limit: At most so many; the store is not asked for more.
            delimiter: Fold everything below the next `/` after `prefix` into one entry whose key
                ends with `/`, as S3 does with `Delimiter="/"`.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""

    def make_durable(self, keys: Iterable[str]) -> None:  # noqa: B027
        """Make objects durable that other processes put: they then survive a loss of power.

        In most stores every visible object is durable, and this does nothing. On a disk a name can
        be seen before its folder is synced: the process that put it may be slow, or dead.

        Args:
            keys: Objects that were seen, by `get`, `stat` or `list`, before this call began.
        """

    def keeps_versions(self) -> bool | None:
        """Tell whether a deleted or replaced object goes on taking space, as a noncurrent version.

        Returns:
            False where its bytes are free at once; True where they stay until somebody removes the
            version; None where the store does not say, or where it depends on the object.
        """
        return False

    def clear_unfinished(self, older_than_s: float) -> int:  # noqa: ARG002
        """Remove what writers that died left unfinished and no listing shows.

        Never touches an object. Nothing tells a dead writer from a slow one, so age alone decides:
        a writer that still lives then fails with `StoreUnavailable` and has made nothing visible.
        Whoever calls leaves writers enough time.

        Args:
            older_than_s: Age, by the store's own clock, from which something is removed.

        Returns:
            Bytes that this freed.
        """
        return 0

    def links(self, prefix: str = "", *, delimiter: bool = False) -> Iterator[str]:  # noqa: ARG002
        """Yield the names of symbolic links, in order; none is followed.

        Reading follows a link, but a write or a deletion through it would change files elsewhere.
        A bucket has none.

        Args:
            prefix: Only links whose name begins with it, or a link on the path to it.
            delimiter: Only names directly below `prefix`, not those in deeper folders.
        """
        return iter(())

    def free_bytes(self) -> int | None:
        """Return how many bytes can still be written; `None` where the store does not know.

        Space that only some users may use does not count. A quota may be unknown.
        """
        return None

    def keep_reserve(self, below: str) -> None:  # noqa: B027
        """Set some space aside, so that small objects can be put when the store is full.

        Does nothing if the store is never full, is read-only, or has no space for it.

        Args:
            below: Set aside space for one small object in each folder directly below it.
        """

    def give_up_reserve(self, most: int | None = None) -> int:  # noqa: ARG002
        """Free the reserve of `most` small objects, or all; return for how many."""
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
        InvalidLocation: It is not.
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
    """Return a body as a list of flat byte views, copying nothing; empty buffers are left out."""
    parts = [body] if isinstance(body, (bytes, bytearray, memoryview)) else body
    views: list[memoryview] = [memoryview(part) for part in parts]
    # Left out because a view with a zero in its shape cannot be cast.
    return [view.cast("B") for view in views if view.nbytes]


def cut(key: str, held: bytes, byte_range: ByteRange, into: Sequence[memoryview] | None) -> bytes:
    """Answer a ranged `get` of an object whose bytes are in memory."""
    views = check_into(byte_range, into)
    if byte_range.stop > len(held):
        raise ObjectTruncated(
            "the object ends before the range does",
            where=key,
            expected=f"at least {byte_range.stop} bytes",
            found=f"{len(held)} bytes",
        )
    if into is None:
        return held[byte_range.start : byte_range.stop]
    position = byte_range.start
    for view in views:
        view[:] = memoryview(held)[position : position + len(view)]
        position += len(view)
    return b""
