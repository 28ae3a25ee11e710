"""The largest object that is read whole into memory.

Everything but the chunks of tensors is read whole. A sparse file can be longer than any memory and
take no space on a disk. Nothing that Holdfast writes comes near the bound.
"""

from __future__ import annotations

import os

from holdfast.backends.errors import InvalidLocation, StorageError

VARIABLE = "HOLDFAST_MAX_RECORD_BYTES"
DEFAULT_BYTES = 1536 * 2**20


def max_record_bytes() -> int:
    """Return the bound: the value of the variable, or the default.

    Raises:
        InvalidLocation: The variable is not a positive number.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT_BYTES)
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text)):
        raise InvalidLocation(
            "not a number of bytes", where=VARIABLE, expected="such as 4294967296", found=text[:40]
        )
    return int(text)


def check_whole(size_bytes: int, where: str) -> None:
    """Check the size of an object before memory is taken for all of it.

    Raises:
        StorageError: It is beyond the bound.
    """
    most = max_record_bytes()
    if size_bytes > most:
        raise StorageError(
            "the object is too long to be read as a whole",
            where=where,
            expected=f"at most {most} bytes",
            found=f"{size_bytes} bytes",
            hint=f"Nothing was read. The object is damaged or hostile, or {VARIABLE} is too small.",
        )
