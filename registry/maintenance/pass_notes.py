"""The file by which an interrupted verification goes on: what was read in this pass.

A line for each pack with its key, size and time of writing, each with a digest of its own, so that
a line that was cut off by a crash is known for one. The file counts for one registry, for packs
that have not been written since, and for `MAX_AGE_S`: what was whole a month ago need not be so.
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

#: A pass that began longer ago begins anew.
MAX_AGE_S = 30 * 86_400
_PROOF = 16


class _Header(Record):
    format: Literal["holdfast.verify-notes/1"] = "holdfast.verify-notes/1"
    registry: str
    began_s: Annotated[int, Field(ge=0)]
    nonce: str


class PassNotes:
    """What one pass over a registry has read so far.

    Args:
        path: The file; it is made where it is absent.
        registry_id: The registry that it must be of.

    Attributes:
        begun_anew: Why notes that were there do not count; `None` where they do.

    Raises:
        InvalidInput: The file is something else, another registry's, or damaged; it is left alone.
    """

    def __init__(self, path: str | os.PathLike[str], registry_id: str) -> None:
        self._path = Path(path)
        self._registry_id = registry_id
        self._read: set[str] = set()
        self._lock = Lock()
        self.begun_anew: str | None = None
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
        return _told(info) in self._read

    def add(self, info: ObjectInfo) -> None:
        """Note that an object was read and is whole; may be called from any thread."""
        line = _proven(_told(info).encode(), self._salt)
        with self._lock:
            self._append(line)

    def finish(self) -> None:
        """End the pass: the next one reads everything again."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        # Handed to the system at once: whatever ends this process, the file can be used.
        self._file.write(line + b"\n")
        self._file.flush()

    def _header(self) -> bytes:
        header = _Header(
            registry=self._registry_id, began_s=int(time.time()), nonce=secrets.token_hex(8)
        )
        return _proven(header.encode(), b"")

    def _parse(self, data: bytes) -> tuple[bytes, int]:
        """Read the notes; return the first line, and how many bytes of the file count."""
        first, *lines = data.split(b"\n")
        header = self._parse_header(first)
        age_s = time.time() - header.began_s
        if not -86_400 < age_s < MAX_AGE_S:
            days = age_s / 86_400
            self.begun_anew = f"its pass began {days:.0f} days ago by this machine's clock"
            return b"", 0
        torn = lines.pop() if lines else b""
        for line in lines:
            told = line[: -_PROOF - 1]
            if line != _proven(told, first):
                raise self._refused("its lines do not prove themselves")
            self._read.add(told.decode())
        return first, len(data) - len(torn)

    def _parse_header(self, line: bytes) -> _Header:
        told = line[: -_PROOF - 1]
        if line != _proven(told, b""):
            raise self._refused("not notes of a verification")
        try:
            header = _Header.decode(told, where=str(self._path))
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
            hint="Give another file, or delete this one: everything is then read anew.",
            **more,
        )


def _told(info: ObjectInfo) -> str:
    return f"{info.key} {info.size_bytes} {float(info.modified_s).hex()}"


def _proven(told: bytes, salt: bytes) -> bytes:
    proof = hashlib.sha256(salt + b"\n" + told).hexdigest()[:_PROOF]
    return told + b" " + proof.encode()
