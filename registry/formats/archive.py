"""Zip archives of unknown origin: check what an archive claims before memory is taken for it."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.parse_limits import check_bytes

#: Bytes of memory for a byte of the directory: an entry takes 46 bytes there, and an object here.
_DIRECTORY_BYTES = 24
#: The end record of an archive, the longest comment behind it, and what version 64 puts before it.
_END, _COMMENT, _LOCATOR, _END_64 = 22, 2**16, 20, 56


def entries_of(file: BinaryIO, path: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive.

    Raises:
        InvalidInput: The list of its entries would take too much memory.
        zipfile.BadZipFile: It is no archive, or a damaged one; also `OSError`, `ValueError` and
            `NotImplementedError`.
    """
    check_bytes(
        _directory_size(file) * _DIRECTORY_BYTES, "listing it", where=path, kind=InvalidInput
    )
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()


def _directory_size(file: BinaryIO) -> int:
    """Return the length of the directory as the archive's end claims it, at most the file's."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _END - _COMMENT - _LOCATOR - _END_64))
    tail = file.read()
    claimed = [0]
    for sign, at, form in ((b"PK\x05\x06", 12, "<L"), (b"PK\x06\x06", 40, "<Q")):
        start = tail.rfind(sign)
        field = tail[start + at : start + at + struct.calcsize(form)] if start >= 0 else b""
        if len(field) == struct.calcsize(form):
            claimed += struct.unpack(form, field)
    return min(size, max(claimed))
