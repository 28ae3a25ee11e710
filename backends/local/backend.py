"""The store in a folder of a local disk.

A file is written under `.tmp/` of the same file system and synced. Then it gets its name by a link
(exclusive create) or a rename (replace), and the folder of the name is synced. A process that dies
meanwhile leaves at most one of two things: a file in `.tmp/`, which is never listed and which
`clear_unfinished` removes, or a name whose folder is not synced; `make_durable` syncs that for a
writer that depends on it.

`put_if_absent` makes a hard link, because a link to an existing name fails for every client,
without a lock and without check-then-act. The first put makes the folder itself, never a reader.

Reading follows symbolic links below the folder. Writing and deleting refuse them (`folders`).

`mounts` checks the file system; `HOLDFAST_ALLOW_NETWORK_FS=1` allows network ones.
"""

# Paths are strings here: making a Path costs more than many of these calls.
# ruff: noqa: PTH100, PTH102, PTH103, PTH112, PTH116, PTH118, PTH119, PTH120, PTH208
from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from io import FileIO
from itertools import groupby, islice
from typing import NamedTuple, NoReturn, TypeVar

from holdfast.backends.base import (
    Backend,
    Body,
    Buffer,
    ByteRange,
    ObjectInfo,
    Unfinished,
    as_buffers,
    body_bytes,
    check_into,
    check_key,
    link_found,
)
from holdfast.backends.errors import (
    InvalidLocation,
    ObjectNotFound,
    ReadOnlyStore,
    StorageError,
    StoreUnavailable,
)
from holdfast.backends.limits import check_whole
from holdfast.backends.local import disk, folders, reserve
from holdfast.backends.local.mounts import check_file_system, tells_free_bytes
from holdfast.backends.local.walk import TEMPORARY, Walk
from holdfast.backends.location import Location

_T = TypeVar("_T")

#: The name of an unfinished file: `<process>-<16 random hex digits>`.
_UNFINISHED = r"[0-9]+-[0-9a-f]{16}"


class LocalBackend(Backend):
    """Objects as files of a folder.

    Args:
        root: The folder; it need not exist yet.

    Raises:
        StoreUnsuitable: Its file system cannot keep the promises.
        InvalidLocation: The path names a file.
    """

    concurrency = 4  # a registry has a thread for each core that it may use besides
    least_read_bytes = 2**18
    #: Modes of new files and folders, before the umask.
    file_mode, folder_mode = 0o666, 0o777

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._temporary = os.path.join(self._root, TEMPORARY)
        # Folders known to exist and to be synced into their parents. A copy in a forked child
        # remains true, and a folder that was removed meanwhile is made again.
        self._known: set[str] = set()
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise InvalidLocation("not a folder", where=self._root)
        nearest = disk.nearest(self._root)
        check_file_system(nearest)
        self._tells_free_bytes = tells_free_bytes(nearest)

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
        try:
            folders.refuse_links(self._root, key)
            with self._synced(body) as file:
                self._name(key, lambda name, folder: os.replace(file, name, dst_dir_fd=folder))
            disk.sync_folder(os.path.dirname(path))
        except OSError as error:
            _fail_write(error, path, body_bytes(body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        path = self._path(key)
        try:
            folders.refuse_links(self._root, key)
            created = not os.path.lexists(path) and self._create(key, body)
            if not created:
                _check_object(path)
            # Also if another process made the name: the caller depends on it, and that process may
            # not have synced it yet.
            disk.sync_folder(os.path.dirname(path))
        except OSError as error:
            _fail_write(error, path, body_bytes(body))
        return created

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""
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
        """List objects in order, including names that are not legal keys."""
        found = Walk(self._root, prefix, start_after, delimiter)
        try:
            yield from islice(found, limit)
        except OSError as error:
            disk.fail(error, self._root)

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error.

        Not synced: if a loss of power undoes a deletion, the file can be deleted again. An empty
        folder is kept: a writer that has synced it into its parent once would not sync a new folder
        of the same name, and a loss of power could remove that with its objects.
        """
        for error in self.delete_many([key]).values():
            raise error

    def delete_many(self, keys: Iterable[str]) -> Mapping[str, StorageError]:
        """Remove objects; a folder is opened once for keys of it that follow each other."""
        failed: dict[str, StorageError] = {}
        for folder, paths in groupby(map(self._path, keys), os.path.dirname):
            for path, error in _delete_in(self._root, folder, paths):
                if isinstance(error, (ReadOnlyStore, StoreUnavailable)):
                    raise error
                failed[path[len(self._root) + 1 :]] = error
        return failed

    def make_durable(self, keys: Iterable[str]) -> None:
        """Sync the folders of objects that were seen, and every folder on the path to them.

        A folder gets new names, so it is synced each time; the path to it only once.
        """
        seen = dict.fromkeys(os.path.dirname(self._path(key)) for key in keys)
        if seen and os.statvfs(self._root).f_flag & os.ST_RDONLY:
            return  # some read-only file systems have no sync, and they lose nothing
        for folder in seen:
            try:
                self._sync_path(folder)
                disk.sync_folder(folder)
            except OSError as error:
                disk.fail(error, folder)

    def begin(self, size_bytes: int) -> Unfinished | None:
        """Begin a file in `.tmp/`; if space is short, objects that are there must take none."""
        free_bytes = self.free_bytes()
        return _File(self) if free_bytes is None or free_bytes > 2 * size_bytes else None

    def clear_unfinished(self, older_than_s: float) -> int:
        """Remove old files of `.tmp/`; return the number of bytes freed.

        Files with other names are kept. The process id in a name proves nothing: on a shared file
        system it may belong to another host. The clock is the time that the file system gives to a
        new file; on NFS it is the server's. A file ages only while nobody writes to it.
        """
        try:
            with folders.opened(self._root, TEMPORARY) as folder:
                names = [name for name in os.listdir(folder) if re.fullmatch(_UNFINISHED, name)]
                if not names:
                    return 0
                latest_s = self._now_s(folder) - older_than_s
                return sum(_clear(name, folder, latest_s) for name in names)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except OSError as error:
            disk.fail(error, self._temporary)

    def links(self, prefix: str = "", *, delimiter: bool = False) -> Iterator[str]:
        """Yield the names of symbolic links below the folder, including those in `.tmp/`."""
        try:
            yield from folders.links(self._root, prefix, delimiter=delimiter)
        except OSError as error:
            disk.fail(error, self._root)

    def free_bytes(self) -> int | None:
        """Return the free bytes for users; a quota may allow less."""
        if not self._tells_free_bytes:
            return None
        try:
            return reserve.free_bytes(disk.nearest(self._root))
        except OSError:
            return None

    def keep_reserve(self, below: str) -> None:
        """Reserve space in `.tmp/reserve/` for one small file in each folder below `below`."""
        reserve.keep(self._root, below)

    def give_up_reserve(self, most: int | None = None) -> int:
        """Remove files of the reserve; return how many."""
        try:
            return reserve.give_up(self._root, most)
        except OSError as error:
            disk.fail(error, self._temporary)

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, key: str) -> str:
        if check_key(key).partition("/")[0] == TEMPORARY:
            raise InvalidLocation(f"{TEMPORARY}/ is reserved for unfinished files", where=key)
        return os.path.join(self._root, key)

    @contextmanager
    def _synced(self, body: Body) -> Iterator[str]:
        """Yield the path of a synced file in `.tmp/`; an unfinished one stays."""
        if isinstance(body, _File):
            yield body.synced()
            return
        with closing(_File(self)) as file:
            file.append(as_buffers(body))
            yield file.synced()

    def open_unfinished(self) -> tuple[str, int]:
        """Make a file in `.tmp/`; return its path and descriptor."""
        path = self._temporary_path()
        folders.refuse_links(self._root, TEMPORARY)
        return path, self._in_folder(path, lambda: disk.open_new(path, self.file_mode))

    def _now_s(self, temporary: int) -> float:
        """Return the time by the clock of the file system; `temporary` is `.tmp/`, open."""
        clock = self._temporary_path()
        try:
            return self._in_folder(clock, lambda: disk.now_s(clock))
        except OSError as error:
            if error.errno not in disk.NO_ROOM:
                raise
            # On a full disk no file can be made, but an existing one can get a new time.
            os.utime(temporary)
            return os.fstat(temporary).st_mtime

    def _temporary_path(self) -> str:
        return os.path.join(self._temporary, f"{os.getpid()}-{secrets.token_hex(8)}")

    def _create(self, key: str, body: Body) -> bool:
        with self._synced(body) as file:
            return self._name(key, lambda name, folder: _link(file, name, folder))

    def _name(self, key: str, act: Callable[[str, int], _T]) -> _T:
        """Call `act` with the last name of a key and the descriptor of its folder."""
        path = self._path(key)

        def named() -> _T:
            with folders.opened(self._root, key.rpartition("/")[0]) as folder:
                return act(os.path.basename(path), folder)

        return self._in_folder(path, named)

    def _in_folder(self, path: str, act: Callable[[], _T]) -> _T:
        """Call `act` after making the folder of `path` if it does not exist."""
        folder = os.path.dirname(path)
        self._ensure(folder)
        try:
            return act()
        except FileNotFoundError:
            # Somebody removed the folder after we saw it.
            self._known.clear()
            self._ensure(folder)
            return act()

    def _ensure(self, folder: str) -> None:
        """Make a folder if it is absent, and sync it and the folders above it once."""
        if folder in self._known:
            return
        if folder != self._root:
            self._ensure(os.path.dirname(folder))
            with suppress(FileExistsError):
                os.mkdir(folder, self.folder_mode)
        else:
            os.makedirs(folder, self.folder_mode, exist_ok=True)
        self._sync_path(folder)

    def _sync_path(self, folder: str) -> None:
        """Sync the parents of a folder and of the folders above it, once each.

        Also if the folder existed: the process that made it may have died before the sync.
        """
        if folder in self._known:
            return
        if folder == self._root:
            disk.sync_above(folder)
        else:
            self._sync_path(os.path.dirname(folder))
            disk.sync_folder(os.path.dirname(folder))
        self._known.add(folder)


class _File(Unfinished):
    """A file in `.tmp/`, made at the first write."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._file: FileIO | None = None

    def write(self, buffers: Sequence[Buffer]) -> None:
        views = as_buffers(buffers)
        try:
            self.append(views)
        except OSError as error:
            _fail_write(error, self._backend._root, body_bytes(views))

    def append(self, views: Sequence[memoryview]) -> None:
        disk.write_all(self._opened().fileno(), views)
        self.size_bytes += sum(map(len, views))

    def _opened(self) -> FileIO:
        if self._file is None:
            self._path, fd = self._backend.open_unfinished()
            self._file = FileIO(fd, "w")
        return self._file

    def synced(self) -> str:
        """Sync the file, once, and return its path."""
        if not (file := self._opened()).closed:
            try:
                disk.sync(file.fileno())
            except BaseException:
                self.close()
                raise
            file.close()
        return self._path

    def close(self) -> None:
        """Remove what was not put; what cannot be removed here is cleared later."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                disk.remove(self._path)


class _Whole(NamedTuple):
    """The range of a whole object; unlike a `ByteRange` it may be empty."""

    stop: int
    start: int = 0


def _link(temporary: str, name: str, folder: int) -> bool:
    """Give a file its name in an open folder; return whether this call created the name."""
    try:
        os.link(temporary, name, dst_dir_fd=folder)
    except OSError as error:
        # NFS may lose the answer to a successful link, repeat the request and report EEXIST.
        if os.stat(temporary).st_nlink == 2:
            return True
        if isinstance(error, FileExistsError):
            return False
        if disk.no_links(error):
            disk.refuse_without_links(error, temporary)
        raise
    return True


def _delete_in(root: str, folder: str, paths: Iterable[str]) -> Iterator[tuple[str, StorageError]]:
    """Delete files of one folder; yield the errors."""
    try:
        # By descriptors, so that a link that is made meanwhile has no effect.
        with folders.opened(root, folder[len(root) + 1 :]) as held:
            for path in paths:
                try:
                    _unlink(path, held)
                except StorageError as error:
                    yield path, error
    except (FileNotFoundError, NotADirectoryError):
        pass
    except StorageError as error:
        yield from ((path, error) for path in paths)
    except OSError as error:
        disk.fail(error, folder)


def _unlink(path: str, folder: int) -> None:
    name = os.path.basename(path)
    try:
        if folders.is_link(name, folder):
            raise link_found(path)
        os.unlink(name, dir_fd=folder)
    except StorageError:
        raise
    except FileNotFoundError:
        pass
    except OSError as error:
        # EISDIR on Linux, EPERM on macOS: a folder is not an object, so the object is absent.
        if not os.path.isdir(path):
            disk.fail(error, path)


def _clear(name: str, folder: int, latest_s: float) -> int:
    """Remove a file that was last written at `latest_s` or before; return the bytes freed."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if found.st_mtime > latest_s or not stat.S_ISREG(found.st_mode):
            return 0
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return 0  # its writer was alive, or another collector removed it
    # A file with a second name is an object; its writer died before it removed the first name.
    return found.st_size if found.st_nlink == 1 else 0


def _fail_write(error: OSError, path: str, needed_bytes: int) -> NoReturn:
    if isinstance(error, FileNotFoundError) and not isinstance(error, StorageError):
        raise StoreUnavailable(
            "the folder or the unfinished file was removed during the write", where=path
        ) from error
    disk.fail(error, path, needed_bytes=needed_bytes)


def _check_object(path: str, missing: StorageError | None = None) -> None:
    """Refuse a folder in place of an object."""
    if os.path.isdir(path):
        raise missing or InvalidLocation("a folder is where an object is needed", where=path)
