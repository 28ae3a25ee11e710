"""Write a file of the user: whole or not at all, and never over another one by accident.

Bytes go to a temporary file in the same folder and are synced. Then the file gets its name by a
link, which fails if the name exists, or with `force` by a rename. All calls go through one
descriptor of the folder, so that nobody can exchange it meanwhile; a symlink at the path is
refused.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from holdfast.backends.escape import quoted
from holdfast.backends.local.disk import NO_ROOM, no_room, sync_folder
from holdfast.registry.errors import (
    AccessDenied,
    InvalidInput,
    RegistryError,
    StorageError,
    StoreFull,
)

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


def check_target(path: Path, *, force: bool = False) -> None:
    """Check that a path can be written, before anything is fetched for it."""
    folder = _open_folder(path)
    try:
        _check_free(folder, path, force=force)
    finally:
        os.close(folder)


@contextmanager
def new_file(path: Path, size_bytes: int, *, force: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write to; it appears at `path` only when the block ends without an error."""
    folder = _open_folder(path)
    temporary = f".{path.name[:100]}.{secrets.token_hex(6)}.part"
    try:
        _check_free(folder, path, force=force)
        fd = os.open(
            temporary,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o666,
            dir_fd=folder,
        )
        try:
            with os.fdopen(fd, "r+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _give_name(folder, temporary, path, force=force)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
        os.fsync(folder)
    except RegistryError:
        raise
    except OSError as error:
        fail(error, path, size_bytes)
    finally:
        os.close(folder)


@contextmanager
def new_folder(path: Path, size_bytes: int) -> Iterator[Path]:
    """Yield a folder to fill; it appears at `path` only when the block ends without an error."""
    if path.exists():
        raise _exists(path)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.part")
    try:
        temporary.mkdir()
        try:
            yield temporary
            _sync_folders(temporary)
            try:
                path.mkdir()  # fails if the path exists; an empty folder can be renamed over
            except FileExistsError as error:
                raise _exists(path) from error
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        fail(error, path, size_bytes)


def put_file(path: Path, data: bytes | memoryview | Iterator[memoryview]) -> int:
    """Write and sync a new file, with the folders around it; return its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with path.open("xb", buffering=0) as file:
        for part in data if isinstance(data, Iterator) else [memoryview(data)]:
            size += len(part)
            rest = part
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return size


def _exists(path: Path) -> InvalidInput:
    return InvalidInput("the path exists", where=path, expected="the path of a new folder")


def _sync_folders(folder: Path) -> None:
    for name, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(name))


def fail(error: OSError, path: Path, size_bytes: int) -> NoReturn:
    """Raise the error of ours that fits an error of writing."""
    if error.errno in NO_ROOM:
        raise no_room(error, str(path), size_bytes) from error
    if error.errno == errno.EFBIG:
        raise StoreFull(
            "the file is too large for the file system or for a limit of this process",
            where=path,
            found=f"{size_bytes} bytes",
            hint="Raise the limit (ulimit -f), or write to another file system.",
        ) from error
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        raise AccessDenied(
            "the folder may not be written to", where=path.parent, found=f"user id {os.geteuid()}"
        ) from error
    raise StorageError("the file could not be written", where=path, found=error) from error


def _open_folder(path: Path) -> int:
    if path.name in ("", "..") or "\0" in str(path):
        raise InvalidInput("not the name of a file", where=quoted(str(path)))
    try:
        return os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInput("no such folder", where=path.parent, hint="Create it first.") from error
    except OSError as error:
        fail(error, path, 0)


def _check_free(folder: int, path: Path, *, force: bool) -> None:
    try:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        fail(error, path, 0)
    if stat.S_ISLNK(found.st_mode):
        raise InvalidInput(
            "the path is a symlink", where=path, hint="Give the path that it points to."
        )
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "something other than a file"
        raise InvalidInput(f"the path is {kind}", where=path, expected="the path of a new file")
    if not force:
        raise InvalidInput(
            "the file exists", where=path, hint="Use --force to replace it, or another name."
        )


def _give_name(folder: int, temporary: str, path: Path, *, force: bool) -> None:
    if force:
        _check_free(folder, path, force=True)
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        return
    try:
        os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        _check_free(folder, path, force=False)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without links: an exclusive create keeps the name until the rename.
        os.close(os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder))
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
