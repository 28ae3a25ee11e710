"""Zip archives of unknown origin: check an archive's claims before taking memory for them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import BinaryIO

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import Budget

#: Bytes of memory for a byte of the directory: an entry takes 46 bytes there, and an object here.
_DIRECTORY_BYTES = 24


def entries_of(file: BinaryIO, path: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive."""
    with zipfile.ZipFile(_Listed(file, path)) as archive:
        return archive.infolist()


class _Listed:
    """The file of an archive while it is listed: the library reads the directory by one call.

    Where the directory is, and how long, only the library can say: there are many ways to hide it.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._budget = Budget(path, "listing it", InvalidInput)
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int = -1) -> bytes:
        """Return bytes, unless the entries that they describe take too much memory."""
        self._budget.take(max(0, count) * _DIRECTORY_BYTES)
        return self._file.read(count)
