"""List a tree of folders in the order of whole keys, and read only the folders that matter.

The order is that of the UTF-8 bytes of the keys, so a folder sorts as its name with the slash:
`a.b` comes before `a/c`, although the name `a` comes before the name `a.b`.
"""

# Paths are strings here: making a Path costs more than many of these calls.
# ruff: noqa: PTH114, PTH116, PTH118, PTH120
from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from holdfast.backends.base import ObjectInfo
from holdfast.backends.errors import StoreUnsuitable

#: The folder in which files are written before they get their name; never listed.
TEMPORARY = ".tmp"
#: The folder of probes. Listings skip links there, so that no deletion follows them.
PROBES = ".probe"
#: A folder was deleted during the listing; or nobody can read or write what is below it.
_NO_KEYS = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class Walk:
    """One listing of the tree under `root`; the other fields are arguments of `Backend.list`."""

    def __init__(self, root: str, prefix: str, start_after: str, delimiter: bool) -> None:
        self.root, self.prefix = root, prefix
        self.start_after, self.delimiter = start_after, delimiter

    def __iter__(self) -> Iterator[ObjectInfo]:
        base = self.prefix[: self.prefix.rfind("/") + 1]
        segments = base.split("/")[:-1]
        # Such a prefix matches no key, but its path could be outside of the root.
        if any(s in ("", ".", "..") or "\0" in s for s in segments) or base.startswith(
            TEMPORARY + "/"
        ):
            return iter(())
        if _is_scratch(base) and any(
            os.path.islink(os.path.join(self.root, *segments[:depth]))
            for depth in range(1, len(segments) + 1)
        ):
            return iter(())
        return self._below(base)

    def _below(self, base: str) -> Iterator[ObjectInfo]:
        waiting = [iter(self._names(base))]  # no recursion: folders may be nested in any number
        while waiting:
            key = next(waiting[-1], None)
            if key is None:
                waiting.pop()
            elif not (key.startswith(self.prefix) or self.prefix.startswith(key)):
                continue
            elif not key.endswith("/"):
                yield from self._file(key)
            elif self._passed(key):
                continue
            elif self.delimiter and len(key) > len(self.prefix):
                if _order(key) > _order(self.start_after) and self._holds_object(key):
                    yield ObjectInfo(key, 0, 0.0)
            else:
                waiting.append(iter(self._names(key)))

    def _file(self, key: str) -> Iterator[ObjectInfo]:
        if not key.startswith(self.prefix) or _order(key) <= _order(self.start_after):
            return
        try:
            found = os.stat(self.root + "/" + key)
        except OSError as error:
            if error.errno in _NO_KEYS:
                return  # deleted during the listing
            raise
        yield ObjectInfo(key, found.st_size, found.st_mtime)

    def _passed(self, folder: str) -> bool:
        """Return whether every key below `folder` is at or before `start_after`."""
        return _order(folder) <= _order(self.start_after) and not self.start_after.startswith(
            folder
        )

    def _holds_object(self, folder: str) -> bool:
        # Deletions leave empty folders, which a bucket would not list.
        waiting = [folder]
        while waiting:
            names = self._names(waiting.pop(), ordered=False)
            if not all(name.endswith("/") for name in names):
                return True
            waiting += names
        return False

    def _names(self, folder: str, *, ordered: bool = True) -> list[str]:
        """Return the keys of files and folders directly below `folder`."""
        try:
            with os.scandir(self.root + "/" + folder) as entries:
                names = [
                    self._key(folder, entry)
                    for entry in entries
                    if not (_is_scratch(folder + entry.name) and entry.is_symlink())
                ]
        except OSError as error:
            if error.errno in _NO_KEYS:
                return []
            raise
        if not folder:
            names = [name for name in names if name not in (TEMPORARY, TEMPORARY + "/")]
        return sorted(names, key=_order) if ordered else names

    def _key(self, folder: str, entry: os.DirEntry[str]) -> str:
        if not entry.is_dir():
            return folder + entry.name
        # Listings follow links as `get` does: an object that is not listed may be collected.
        if entry.is_symlink() and _loops(entry.path):
            raise StoreUnsuitable("a symbolic link leads back to its own folder", where=entry.path)
        return folder + entry.name + "/"


def _is_scratch(name: str) -> bool:
    return name == PROBES or name.startswith(PROBES + "/")


def _loops(link: str) -> bool:
    target = os.path.realpath(link)
    return os.path.join(os.path.realpath(os.path.dirname(link)), "").startswith(
        os.path.join(target, "")
    )


def _order(key: str) -> bytes:
    # The system gives names that are not UTF-8 with lone surrogates.
    return key.encode("utf-8", "surrogateescape")
