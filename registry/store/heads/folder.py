"""The folder in which a user's heads are kept: one file for each registry, and some beside it.

Nothing depends on it: a file that cannot be read is ignored. Links are not followed, and foreign
files are left alone. Any number of processes can share the folder.
"""

# pathlib cannot use names in an open folder.
# ruff: noqa: PTH111, PTH117, PTH118
from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.backends import Location
from holdfast.registry.store.cache_folder import OPEN, lock_folder, open_folder
from holdfast.registry.store.heads.record import MAX_FILE_BYTES
from holdfast.registry.values import host_name

#: The most registries with heads; beyond that the files written longest ago are removed.
MAX_FILES = 1000
_SUFFIX = ".heads"
#: Endings of the files beside it.
BESIDE = (".verified", ".packs")
_STAGED = ".new-"
_ABANDONED_S = 3600.0


def state_folder() -> str | None:
    """Return the folder: `holdfast/heads` in the user's state folder."""
    said = os.environ.get("XDG_STATE_HOME", "")
    base = said if os.path.isabs(said) else os.path.expanduser("~/.local/state")
    return os.path.join(base, "holdfast", "heads") if os.path.isabs(base) else None


def file_name(location: Location) -> str:
    """Return the name of a registry's file.

    The name depends on the machine for a folder: another machine with the same home folder may have
    another registry at the same path. It depends on the endpoint for a bucket of S3, and on the
    server or account of other stores: another one may have a bucket of the same name.
    """
    if location.scheme == "file":
        of = host_name()
    elif location.scheme != "s3":
        of = location.server
    else:
        of = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    place = f"{of} {location.url}"
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:40] + _SUFFIX


def beside(name: str, suffix: str) -> str:
    """Return the name of another file of the same registry."""
    return name.removesuffix(_SUFFIX) + suffix


def read(path: str, name: str) -> bytes | None:
    """Return the bytes of a file in the folder at `path`; `None` if there is none."""
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return None
    try:
        return read_in(folder, name)
    finally:
        os.close(folder)


def read_in(folder: int, name: str) -> bytes | None:
    """Return the bytes of a file in an open folder, as `read` does."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | OPEN, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{name} is no file of this user")
        if found.st_size > MAX_FILE_BYTES:
            raise OSError(f"{name} is longer than {MAX_FILE_BYTES} bytes")
        return file.read(MAX_FILE_BYTES)


@contextmanager
def locked(path: str) -> Iterator[int]:
    """Open the folder at `path` and hold its lock; make the folder if there is none."""
    folder = open_folder(path, make=True)
    try:
        with lock_folder(folder):
            yield folder
    finally:
        os.close(folder)


def replace(folder: int, name: str, data: bytes) -> None:
    """Replace a file atomically; the caller holds the lock."""
    is_new = not _exists(folder, name)
    staged = _STAGED + secrets.token_hex(8)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged, dir_fd=folder)
        raise
    if is_new:
        _tidy(folder)


def remove(folder: int, name: str) -> bool:
    """Remove a file; return whether there was one."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _tidy(folder: int) -> None:
    """Remove the oldest files beyond the bound, and abandoned temporary files."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                written_s = entry.stat(follow_symlinks=False).st_mtime
                if entry.name.endswith(_SUFFIX):
                    files.append((written_s, entry.name))
                elif entry.name.startswith(_STAGED) and time.time() - written_s > _ABANDONED_S:
                    remove(folder, entry.name)
    for _, name in sorted(files)[:-MAX_FILES]:
        remove(folder, name)
        for suffix in BESIDE:
            remove(folder, beside(name, suffix))
