"""Names of files in a folder, as data from elsewhere gives them; none becomes a path unchecked.

A name is relative, its parts are joined with `/`, and it means the same file on every system. Names
that differ only in case or in the form of their accents are one file on some systems, so a folder
may not have two of them.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

_LONGEST_PART, _LONGEST = 255, 1024
_RESERVED = {"con", "prn", "aux", "nul"} | {
    f"{device}{number}" for device in ("com", "lpt") for number in range(1, 10)
}
#: Folders whose settings start programs, and what one of them is called on old file systems.
_RUNNING = {".git", ".hg", "git~1"}
_FORBIDDEN = set('\\:*?"<>|')


def check_path_name(name: object, where: object = None) -> str:
    """Return a name that is safe as a relative path."""
    fault = "not text" if not isinstance(name, str) else _fault(name)
    if fault is not None or not isinstance(name, str):
        raise InvalidInput(
            f"not a safe name of a file: {fault}",
            where=where,
            expected="a relative path that every system can have",
            found=quoted(name)[:300],
            hint="Rename it.",
        )
    return name


def check_path_names(names: Iterable[str], where: object = None) -> None:
    """Check the names of all files of a folder."""
    seen: dict[str, str] = {}
    files: set[str] = set()
    for name in names:
        parts = check_path_name(name, where).split("/")
        for depth in range(1, len(parts) + 1):
            here = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
            known = seen.setdefault(unicodedata.normalize("NFC", here).casefold().rstrip("/"), here)
            if known != here or here in files:
                raise InvalidInput(
                    "two names would be one file on some systems",
                    where=where,
                    found=f"{quoted(known)} and {quoted(here)}"[:600],
                    hint="Rename one of them.",
                )
        files.add(name)


def _fault(name: str) -> str | None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it is not Unicode"
    if name.startswith("/"):
        return "it is absolute"
    if size > _LONGEST:
        return f"it is longer than {_LONGEST} bytes"
    return next((fault for part in name.split("/") if (fault := _part_fault(part))), None)


def _part_fault(part: str) -> str | None:
    if part in ("", os.curdir, os.pardir):
        return "it leaves its folder, or has an empty part"
    if len(part.encode()) > _LONGEST_PART:
        return f"a part of it is longer than {_LONGEST_PART} bytes"
    if any(char in _FORBIDDEN or not char.isprintable() for char in part):
        return "it has a character that some system refuses"
    if part.split(".")[0].rstrip().casefold() in _RESERVED:
        return "it is the name of a device on Windows"
    if part.casefold() in _RUNNING:
        return "git or another tool would run programs that it names"
    if part[-1] in ". ":
        return "it ends with a dot or a space"
    return None
