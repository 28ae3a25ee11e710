"""The file from which an interrupted verification resumes: the packs that were read in this pass.

It has a line for each pack with its key, size and time of writing. Each line has a digest of its
own, so that a line that a crash cut off is recognized. The file is valid for one registry, for
packs that have not been written since, and for `MAX_AGE_S`: a pack that was whole a month ago may
be damaged now.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, Self

from pydantic import Field

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.values.records import Record

#: A pass that began longer ago starts again.
MAX_AGE_S = 30 * 86_400
_DIGEST_CHARS = 16


class _Header(Record):
    format: Literal["holdfast.verify-notes/1"] = "holdfast.verify-notes/1"
    registry: str
    began_s: Annotated[int, Field(ge=0)]
    nonce: str


class PassNotes:
    """The packs that one pass over a registry has read so far.

    Args:
        path: The file; it is created if it is absent.
        registry_id: The id of the registry that the file must belong to.

    Attributes:
        ignored: Why existing notes were ignored; `None` where they count.

    Raises:
        InvalidInput: The file is something else, another registry's, or damaged; it is not changed.
    """

    def __init__(self, path: str | os.PathLike[str], registry_id: str) -> None:
        self._path = Path(path)
        self._registry_id = registry_id
        self._read: set[str] = set()
        self._lock = Lock()
        self.ignored: str | None = None
        try:
            exists = self._path.exists()
            held = self._path.read_bytes() if exists else b""
            self._salt, whole = self._parse(held) if held else (b"", 0)
            if not whole:
                self._salt = self._header()
            self._file = self._path.open("r+b" if exists else "xb")
            self._file.truncate(whole)  # what a crash cut off
            self._file.seek(whole)
        except OSError as error:
            raise InvalidInput(
                "cannot keep notes of a verification", where=str(path), found=error
            ) from error
        if not whole:
            self._append(self._salt)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def holds(self, info: ObjectInfo) -> bool:
        """Return whether an object was read in this pass, and not written since."""
        return _entry(info) in self._read

    def add(self, info: ObjectInfo) -> None:
        """Note that an object was read and is whole; may be called from any thread."""
        line = _with_digest(_entry(info).encode(), self._salt)
        with self._lock:
            self._append(line)

    def finish(self) -> None:
        """End the pass: the next one reads everything again."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        # Handed to the system at once, so that the file is valid even if this process is killed.
        self._file.write(line + b"\n")
        self._file.flush()

    def _header(self) -> bytes:
        header = _Header(
            registry=self._registry_id, began_s=int(time.time()), nonce=secrets.token_hex(8)
        )
        return _with_digest(header.encode(), b"")

    def _parse(self, data: bytes) -> tuple[bytes, int]:
        """Read the notes; return the first line, and the number of valid bytes in the file."""
        first, *lines = data.split(b"\n")
        header = self._parse_header(first)
        age_s = time.time() - header.began_s
        if not -86_400 < age_s < MAX_AGE_S:
            days = age_s / 86_400
            self.ignored = f"its pass began {days:.0f} days ago by this machine's clock"
            return b"", 0
        torn = lines.pop() if lines else b""
        for line in lines:
            entry = line[: -_DIGEST_CHARS - 1]
            if line != _with_digest(entry, first):
                raise self._refused("a line does not match its digest")
            self._read.add(entry.decode())
        return first, len(data) - len(torn)

    def _parse_header(self, line: bytes) -> _Header:
        encoded = line[: -_DIGEST_CHARS - 1]
        if line != _with_digest(encoded, b""):
            raise self._refused("not notes of a verification")
        try:
            header = _Header.decode(encoded, where=str(self._path))
        except Malformed as error:
            raise self._refused("notes of another version") from error
        if header.registry != self._registry_id:
            raise self._refused(
                "notes on another registry", expected=self._registry_id, found=header.registry
            )
        return header

    def _refused(self, what: str, **more: object) -> InvalidInput:
        return InvalidInput(
            what,
            where=str(self._path),
            hint="Give another file, or delete this one: everything is then read again.",
            **more,
        )


def _entry(info: ObjectInfo) -> str:
    return f"{info.key} {info.size_bytes} {float(info.modified_s).hex()}"


def _with_digest(entry: bytes, salt: bytes) -> bytes:
    digest = hashlib.sha256(salt + b"\n" + entry).hexdigest()[:_DIGEST_CHARS]
    return entry + b" " + digest.encode()
