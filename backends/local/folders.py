"""Open folders below a root without following symbolic links.

The root itself may be reached through links: a registry at `/data` may be in `/mnt/data`. Below the
root, a link could make a writer or a collector change files outside of the registry, or on another
file system; so every link there is refused, and the error names it.
"""

# Paths are strings here: making a Path costs more than many of these calls.
# ruff: noqa: PTH114
from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.backends.base import link_found

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def refuse_links(root: str, name: str) -> None:
    """Raise if a name, or a folder on the path to it, is a symbolic link.

    Args:
        root: The folder of the registry.
        name: A path relative to it; it need not exist.

    Raises:
        StoreUnsuitable: There is a link; the message names it.
    """
    path = root
    for part in name.split("/"):
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(mode):
            raise link_found(path)


@contextmanager
def opened(root: str, folder: str) -> Iterator[int]:
    """Open a folder below `root`; replacing it by a link afterwards has no effect.

    Raises:
        StoreUnsuitable: It is a link, or a link is on the path to it.
    """
    path, fd = root, os.open(root, _FOLDER)
    try:
        for part in folder.split("/") if folder else ():
            path = f"{path}/{part}"
            above, fd = fd, _open_below(fd, part, path)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def open_file(root: str, name: str) -> int:
    """Open something below `root` for reading, and follow no link; return its descriptor.

    The caller checks whether it is a file: an open of a pipe returns at once.

    Args:
        root: A folder, which may be a link itself.
        name: A path relative to it, with `/` and without `..`.

    Raises:
        StoreUnsuitable: It is a link, or a link is on the path to it.
        OSError: It cannot be opened, or the name leads out of the folder.
    """
    above, _, last = name.rpartition("/")
    if {"", ".", ".."} & set(name.split("/")):
        raise NotADirectoryError(errno.ENOTDIR, "not a name in the folder", name)
    with opened(root, above) as folder:
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(last, flags, dir_fd=folder)
        except OSError as error:
            if is_link(last, folder):
                raise link_found(f"{root}/{name}") from error
            raise


def _open_below(above: int, name: str, path: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        # For a link Linux gives ENOTDIR, other systems ELOOP.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and is_link(name, above):
            raise link_found(path) from error
        raise


def is_link(name: str, folder: int) -> bool:
    """Return whether a name in an open folder is a symbolic link."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def links(root: str, prefix: str, *, delimiter: bool) -> Iterator[str]:
    """Yield the names of links below `root`, as `Backend.links` does, without following any."""
    folder, slash, start = prefix.rpartition("/")
    path = ""
    for part in folder.split("/") if folder else ():
        path += part
        if os.path.islink(f"{root}/{path}"):
            yield path
            return
        path += "/"
    waiting = [(folder + slash, False)]
    while waiting:
        here, is_linked = waiting.pop()
        if is_linked:
            yield here
            continue
        try:
            with os.scandir(f"{root}/{here}") as entries:
                found = sorted(
                    (entry.name, entry.is_symlink())
                    for entry in entries
                    if entry.name.startswith(start)
                    and (entry.is_symlink() or (entry.is_dir() and not delimiter))
                )
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise
            continue
        waiting += [(here + name + "/" * (not linked), linked) for name, linked in reversed(found)]
        start = ""
