"""The size limit of an object that is read into memory as a whole.

Everything but the chunks of tensors is read as a whole, and a sparse file can be longer than any
memory and take no space on a disk. Holdfast itself writes nothing near the limit.
"""

from __future__ import annotations

import os

from holdfast.backends.errors import InvalidLocation, StorageError

VARIABLE = "HOLDFAST_MAX_RECORD_BYTES"
DEFAULT_BYTES = 1536 * 2**20


def max_record_bytes() -> int:
    """Return the limit: the value of the variable, or the default.

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
    """Check the size of an object before memory is allocated for all of it.

    Raises:
        StorageError: It is above the limit.
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
