"""Dialects of fsspec file systems: the differences between their kinds, behind one interface.

`FsspecBackend` uses fsspec's common methods. A dialect adds the rest: pages of a listing that start
where they are wanted, the size and time of an object, and the meaning of errors. The dialects of
S3 and Azure are in modules of their own, since they need the libraries of those stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.backends.base import ObjectInfo
from holdfast.backends.errors import (
    AccessDenied,
    ObjectNotFound,
    StorageError,
    StoreUnsuitable,
)
from holdfast.backends.patience import Patience, unanswered

# The names under which file systems tell when an object was written.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True, slots=True)
class Call:
    """Calls methods of a file system, each for a bounded time.

    Attributes:
        fs: The file system.
        run: Runs a function, or a coroutine function on the event loop of `fs`.
        twins: Whether each method is known to have an asynchronous twin.
    """

    fs: Any
    run: Callable[..., Any]
    twins: bool

    def __call__(self, name: str, *args: object, **options: object) -> Any:
        """Call the method `name`, or its asynchronous twin, which can be bounded in time."""
        # fsspec sets a method on the instance if it made the method from the twin.
        twin = self.twins or name in vars(self.fs)
        return self.run(getattr(self.fs, f"_{name}" if twin else name), *args, **options)


@dataclass(frozen=True, slots=True)
class Query:
    """One page of a listing that is asked for.

    Attributes:
        bucket: The bucket or container, as `Dialect.split` gave it.
        prefix: Only names that begin with it.
        start_after: Only names after it. A dialect may ignore this.
        delimiter: Whether to fold what is below the next `/`.
        size: At most this number of entries.
        token: Where the page before ended, or `None`.
    """

    bucket: str
    prefix: str
    start_after: str
    delimiter: bool
    size: int
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing.

    Attributes:
        objects: Objects by their names in the bucket, in order.
        folders: Names of folders, in order; each ends with `/`.
        token: Where the next page begins; `None` if there is none.
    """

    objects: Sequence[ObjectInfo]
    folders: Sequence[str]
    token: str | None = None


class Dialect:
    """An unknown file system, which can only be read.

    Args:
        name: What it is, for messages.
        reason: Why nothing is written to it; empty if it may be written to.
    """

    # How to give credentials, for messages.
    log_in = ""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def class_of(self, fs: Any) -> type:
        """Return the class of our own instances."""
        return type(fs)

    def options(self, given: Mapping[str, Any], patience: Patience) -> dict[str, Any]:  # noqa: ARG002
        """Return the options for an instance of our own, from those of the user's instance."""
        return dict(given)

    def prepare(self, call: Call) -> None:
        """Set up a new instance."""

    def split(self, fs: Any, root: str) -> tuple[str, str]:  # noqa: ARG002
        """Return a root as a bucket and the prefix of all names in it."""
        return root.rstrip("/"), ""

    def query(self, fs: Any) -> str:  # noqa: ARG002
        """Return the query of a store's URL, with the question mark; empty if it needs none."""
        return ""

    def server(self, fs: Any) -> str:  # noqa: ARG002
        """Answer `Backend.server`."""
        return ""

    def put_options(self, data: bytes) -> dict[str, Any]:  # noqa: ARG002
        """Return options of `pipe_file` for an object."""
        return {}

    def says_exists(self, error: Exception) -> bool:
        """Return whether an exclusive create was refused because the object exists."""
        return isinstance(error, FileExistsError)

    def read(self, call: Call, path: str, start: int, end: int) -> bytes:
        """Read a range of an object."""
        found: bytes = call("cat_file", path, start=start, end=end)
        return found

    def remove(self, call: Call, path: str) -> None:
        """Remove an object.

        Raises:
            ObjectNotFound: It is absent; the error of the file system for that counts, too.
        """
        call("rm_file", path)

    def read_all(self, call: Call, path: str) -> bytes:
        """Read an object by one request, so that all bytes are of one version of it."""
        found: bytes = call("cat_file", path)
        return found

    def stat(self, call: Call, path: str) -> ObjectInfo:
        """Return size and time of an object; `key` is its path."""
        call.fs.invalidate_cache()
        return _described(path, call("info", path))

    def page(self, call: Call, query: Query) -> Page:
        """Return a page of a listing; here it is the only one, and may be long."""
        folder = query.prefix.rpartition("/")[0]
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            return Page((), ())
        call.fs.invalidate_cache()
        top = f"{query.bucket}/{folder}".rstrip("/") if folder else query.bucket
        try:
            if query.delimiter:
                found = call("ls", top, detail=True)
            else:
                found = call("find", top, detail=True).values()
        except _ABSENT:
            return Page((), ())
        start = f"{query.bucket.strip('/')}/".lstrip("/")
        objects, folders = [], []
        for entry in found:
            path = entry["name"].strip("/")
            name = path.removeprefix(start)
            if not path.startswith(start) or not f"{name}/".startswith(query.prefix):
                continue
            if entry["type"] == "directory":
                folders.append(f"{name}/")
            elif name.startswith(query.prefix):
                if not isinstance(entry.get("size"), int):
                    entry = call("info", entry["name"])  # listings of web servers have no sizes
                objects.append(_described(name, entry))
        return Page(sorted(objects, key=lambda info: info.key.encode()), sorted(set(folders)))

    def keeps_versions(self, call: Call, bucket: str) -> bool | None:  # noqa: ARG002
        """Answer `Backend.keeps_versions`."""
        return None

    @contextmanager
    def translated(self, where: str, *, writes: bool = False) -> Iterator[None]:
        """Turn errors of the file system into ours."""
        try:
            yield
        except StorageError:
            raise
        except _ABSENT as error:
            raise ObjectNotFound("no such object", where=where) from error
        except PermissionError as error:
            raise AccessDenied("access is denied", where=where, found=said(error)) from error
        except NotImplementedError as error:
            raise StoreUnsuitable(
                f"{self.name} cannot do this", where=where, found=said(error)
            ) from error
        except (OSError, EOFError) as error:
            raise unanswered(said(error), where, writes=writes) from error
        except Exception as error:
            # Each library has errors of its own.
            raise StorageError(f"{self.name} failed", where=where, found=said(error)) from error


class BucketDialect(Dialect):
    """A store of buckets, or of containers."""

    def split(self, fs: Any, root: str) -> tuple[str, str]:
        """Return bucket and prefix."""
        bucket, prefix, _ = fs.split_path(root)
        return bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""


def said(error: Exception) -> str:
    """Return class and first line of an error of a library, not too much of it."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300].rstrip('.')}"


def _described(name: str, entry: Mapping[str, Any]) -> ObjectInfo:
    if entry.get("type") == "directory":
        raise FileNotFoundError(name)
    size = entry.get("size")
    if not isinstance(size, int):
        raise OSError("the file system does not tell the size of a file")
    time = next((entry[word] for word in _TIMES if entry.get(word) is not None), 0.0)
    return ObjectInfo(name, size, _seconds(time))


def _seconds(time: object) -> float:
    """Return a time in any form of file systems as seconds since the epoch, 0 if unknown."""
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return 0.0
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return float(time) if isinstance(time, (int, float)) else 0.0
