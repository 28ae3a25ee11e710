"""The settings of a journal: its folder and its bound."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import host_name

#: The variable that names the folder of the journal; empty for none.
FOLDER_VARIABLE = "HOLDFAST_JOURNAL"
BYTES_VARIABLE = "HOLDFAST_JOURNAL_BYTES"
DEFAULT_BYTES = 64 * 2**30


class Journal:
    """A folder on a local disk for saves that are not in the registry yet, and its bound."""

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))  # noqa: PTH100, PTH111
        self.max_bytes = _bound(max_bytes)

    def __repr__(self) -> str:
        return f"<Journal {self.path} {self.max_bytes} bytes>"


def choose_journal(given: str | os.PathLike[str] | Journal | None) -> Journal | None:
    """Return the journal that an argument or the environment names."""
    if isinstance(given, Journal):
        return given
    path = os.environ.get(FOLDER_VARIABLE, "") if given is None else given
    return Journal(path) if os.fspath(path) else None


def this_machine() -> str:
    """Return a text that differs between machines, even with copied disks."""
    known = ""
    with suppress(OSError):
        known = Path("/etc/machine-id").read_text("ascii", "replace")
    return hashlib.sha256(f"{known} {host_name()}".encode()).hexdigest()[:32]


def _bound(given: int | None) -> int:
    text = os.environ.get(BYTES_VARIABLE, "")
    try:
        bound = given if given is not None else int(text) if text else DEFAULT_BYTES
    except ValueError:
        bound = 0
    if type(bound) is not int or bound <= 0:
        raise InvalidInput(
            "not a bound of a journal",
            where=BYTES_VARIABLE if given is None else "max_bytes",
            expected="a number of bytes above 0",
            found=repr(text if given is None else given),
        )
    return bound
