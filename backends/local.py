"""The store in a folder of a local disk.

A file is written under `.tmp/` of the same file system, synced, and then linked (exclusive create)
or renamed (replace) into place; last the folder that got the name is synced. A process that dies on
the way leaves at most a file in `.tmp/`, never listed, which `clear_unfinished` removes.

`put_if_absent` is a hard link because a link to an existing name fails, on every client alike;
no lock, no check-then-act. The folder itself is made by the first put, never by a reader.

File systems are judged by `backends.mounts`; `HOLDFAST_ALLOW_NETWORK_FS=1` admits network ones.
"""

# Paths stay strings here: to make a Path costs more than many of these calls.
# ruff: noqa: PTH100, PTH102, PTH105, PTH108, PTH112, PTH116, PTH118, PTH120
from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn, TypeVar

from backends import disk
from backends.base import Backend, Body, ByteRange, ObjectInfo, as_buffers, check_into, check_key
from backends.errors import InvalidLocation, ObjectNotFound, StorageError, StoreUnavailable
from backends.limits import check_whole
from backends.location import Location
from backends.mounts import check_file_system
from backends.walk import TEMPORARY, Walk

_T = TypeVar("_T")


class LocalBackend(Backend):
    """Objects as files of a folder.

    Args:
        root: The folder; need not exist yet.

    Raises:
        StoreUnsuitable: Its file system cannot keep the promises.
        InvalidLocation: A file stands there.
    """

    concurrency = max(4, os.cpu_count() or 4)
    least_read_bytes = 2**18

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._temporary = os.path.join(self._root, TEMPORARY)
        # Folders known to exist and to be synced into their parents. A copy in a forked child
        # stays true, and one that was removed since is made again.
        self._known: set[str] = set()
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise InvalidLocation("not a folder", where=self._root)
        check_file_system(disk.nearest(self._root))

    @property
    def url(self) -> str:
        """The folder as a `file://` URL."""
        return Location("file", path=self._root).url

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        views = check_into(byte_range, into)
        path = self._path(key)
        try:
            fd, size = disk.open_file(path, key)
            try:
                if byte_range is None:
                    check_whole(size, key)
                wanted = byte_range or _Whole(size)
                disk.check_size(size, wanted.stop, key)
                if into is None:
                    return disk.read(fd, wanted.start, wanted.stop - wanted.start, key)
                disk.read_into(fd, wanted.start, views, key)
                return b""
            finally:
                os.close(fd)
        except NotADirectoryError as error:
            raise ObjectNotFound("no such object", where=path) from error
        except OSError as error:
            disk.fail(error, path)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object, atomically and durably."""
        path = self._path(key)
        buffers = as_buffers(body)
        try:
            temporary = self._write(buffers)
            try:
                self._in_folder(path, lambda: os.replace(temporary, path))
            except BaseException:
                disk.remove(temporary)
                raise
            disk.sync_folder(os.path.dirname(path))
        except OSError as error:
            _fail_write(error, path, buffers)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        path = self._path(key)
        buffers = as_buffers(body)
        try:
            created = not os.path.lexists(path) and self._create(path, buffers)
            if not created:
                _check_object(path)
            # For a name that somebody else made as well: the caller builds on its being there,
            # and its maker may not have come to this line.
            disk.sync_folder(os.path.dirname(path))
        except OSError as error:
            _fail_write(error, path, buffers)
        return created

    def stat(self, key: str) -> ObjectInfo:
        """Tell size and time of an object."""
        path = self._path(key)
        try:
            _check_object(path, missing=ObjectNotFound("no such object", where=path))
            found = os.stat(path)
        except NotADirectoryError as error:
            raise ObjectNotFound("no such object", where=path) from error
        except OSError as error:
            disk.fail(error, path)
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order; a name that is no legal key is listed too."""
        found = Walk(self._root, prefix, start_after, delimiter)
        try:
            yield from islice(found, limit)
        except OSError as error:
            disk.fail(error, self._root)

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error.

        Not synced: a deletion that a loss of power undoes only leaves a file to delete again. The
        folder stays, even if empty: a writer that knows it to be synced into its parent would not
        sync one that somebody else made anew, and an object in that could go with the power.
        """
        path = self._path(key)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            # Linux says EISDIR, macOS EPERM: a folder is no object, and so is absent.
            if not os.path.isdir(path):
                disk.fail(error, path)

    def clear_unfinished(self, older_than_s: float) -> int:
        """Remove files of `.tmp/` by their age; return the bytes that this freed.

        The process id in a name is no evidence: on a shared file system it may be another host's.
        The clock is the time that the file system gives a file written there now, which on NFS is
        the server's. A writer's file grows older only while it is not written to.
        """
        try:
            names = _file_names(self._temporary)
            if not names:
                return 0
            clock = self._temporary_path()
            latest_s = self._in_folder(clock, lambda: disk.now_s(clock)) - older_than_s
            return sum(_clear(os.path.join(self._temporary, name), latest_s) for name in names)
        except OSError as error:
            disk.fail(error, self._temporary)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _path(self, key: str) -> str:
        if check_key(key).partition("/")[0] == TEMPORARY:
            raise InvalidLocation(f"{TEMPORARY}/ is reserved for unfinished files", where=key)
        return os.path.join(self._root, key)

    def _write(self, buffers: Sequence[memoryview]) -> str:
        """Write a synced file in `.tmp/` and return its path."""
        path = self._temporary_path()
        self._in_folder(path, lambda: disk.write_new(path, buffers))
        return path

    def _temporary_path(self) -> str:
        return os.path.join(self._temporary, f"{os.getpid()}-{secrets.token_hex(8)}")

    def _create(self, path: str, buffers: Sequence[memoryview]) -> bool:
        temporary = self._write(buffers)
        try:
            return self._in_folder(path, lambda: _link(temporary, path))
        finally:
            disk.remove(temporary)

    def _in_folder(self, path: str, act: Callable[[], _T]) -> _T:
        """Do something to `path` in a folder that exists, making it where needed."""
        folder = os.path.dirname(path)
        self._ensure(folder)
        try:
            return act()
        except FileNotFoundError:
            # Somebody removed the folder since we last saw it.
            self._known.clear()
            self._ensure(folder)
            return act()

    def _ensure(self, folder: str) -> None:
        if folder in self._known:
            return
        if folder != self._root:
            self._ensure(os.path.dirname(folder))
            _make_folder(folder)
        elif not os.path.isdir(folder):
            _make_with_parents(folder)
        self._known.add(folder)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The range of a whole object, which unlike a `ByteRange` may be empty."""

    stop: int
    start: int = 0


def _link(temporary: str, path: str) -> bool:
    """Give a file its name; return whether this call did."""
    try:
        os.link(temporary, path)
    except OSError as error:
        # NFS may lose the answer to a link that was made, and say EEXIST when it asks again.
        if os.stat(temporary).st_nlink == 2:
            return True
        if isinstance(error, FileExistsError):
            return False
        if disk.no_links(error):
            disk.refuse_without_links(error, path)
        raise
    return True


def _file_names(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _clear(path: str, latest_s: float) -> int:
    """Remove a file last written at `latest_s` or before; return the bytes that this freed."""
    try:
        found = os.lstat(path)
        if found.st_mtime > latest_s:
            return 0
        os.unlink(path)
    except FileNotFoundError:
        return 0  # its writer was alive, or another collector came first
    # With a second name it is an object whose writer died before it removed the first.
    return found.st_size if found.st_nlink == 1 else 0


def _fail_write(error: OSError, path: str, buffers: Sequence[memoryview]) -> NoReturn:
    if isinstance(error, FileNotFoundError) and not isinstance(error, StorageError):
        raise StoreUnavailable(
            "the folder or the unfinished file was removed during the write", where=path
        ) from error
    disk.fail(error, path, needed_bytes=sum(map(len, buffers)))


def _check_object(path: str, missing: StorageError | None = None) -> None:
    """Refuse what is there but no file."""
    if os.path.isdir(path):
        raise missing or InvalidLocation("a folder stands where an object is needed", where=path)


def _make_folder(folder: str) -> None:
    # Synced when it was there already, too: whoever made it may not have come to that.
    with suppress(FileExistsError):
        os.mkdir(folder)
    disk.sync_folder(os.path.dirname(folder))


def _make_with_parents(folder: str) -> None:
    """Make a folder outside of which nothing is ours: only what is new is synced."""
    parent = os.path.dirname(folder)
    if not os.path.isdir(parent):
        _make_with_parents(parent)
    _make_folder(folder)
