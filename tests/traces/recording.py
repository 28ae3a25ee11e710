"""A store that writes down each call: client, begin, end and answer.

A call that changes the store has two lines, so that one that never ends is known too. Times are
those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Self

from holdfast.backends import Backend, Body
from holdfast.backends.base import ByteRange, ObjectInfo, as_buffers
from holdfast.backends.errors import ObjectNotFound, StorageError
from holdfast.backends.wrappers import Wrapper

#: Objects whose bytes are kept, since a collection may delete them before the trace is read.
KEPT = "placements/"
#: Listings of which the answer is kept: those on which the protocol depends.
LISTED = ("epochs/", "runs/")


class Recorded(Wrapper):
    """A store whose calls are written into a folder, by a file for each process.

    Args:
        inner: The store.
        folder: An existing folder.
    """

    def __init__(self, inner: Backend, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder
        self._numbers = itertools.count()
        self._lock = Lock()
        self._pid = -1

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        begin = time.monotonic_ns()
        try:
            data = self.inner.get(key, byte_range, into=into)
        except ObjectNotFound:
            self._say(method="get", key=key, begin=begin, answer="absent")
            raise
        if byte_range is None and key.startswith(LISTED):
            self._say(method="get", key=key, begin=begin, answer=digest(data))
        return data

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        found = self.inner.list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)
        if delimiter or limit is not None or not prefix.startswith(LISTED):
            return found
        return self._whole_list(prefix, start_after)

    def _whole_list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        begin = time.monotonic_ns()
        infos = list(self.inner.list(prefix, start_after=start_after))
        keys = [one.key for one in infos]
        self._say(method="list", key=prefix, begin=begin, answer=keys, after=start_after)
        return iter(infos)

    def put(self, key: str, body: Body) -> None:
        with self._changing("put", key, body) as call:
            self.inner.put(key, body)
            call.answer = True

    def put_if_absent(self, key: str, body: Body) -> bool:
        with self._changing("put_if_absent", key, body) as call:
            call.answer = self.inner.put_if_absent(key, body)
        return bool(call.answer)

    def delete(self, key: str) -> None:
        with self._changing("delete", key) as call:
            self.inner.delete(key)
            call.answer = True

    def _changing(self, method: str, key: str, body: Body | None = None) -> _Call:
        told: dict[str, Any] = {"method": method, "key": key}
        if body is not None:
            data = b"".join(as_buffers(body))
            told["digest"] = digest(data)
            if key.startswith(KEPT):
                told["body"] = base64.b64encode(data).decode()
        return _Call(self, told)

    def _say(self, **told: Any) -> None:
        """Write a line, by one system call: a kill can tear only the last line of a file."""
        with self._lock:
            if self._pid != os.getpid():  # also after a fork
                self._pid = os.getpid()
                self._client = f"{self._pid}-{secrets.token_hex(4)}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._folder / f"{self._client}.trace", flags)
            line = {"client": self._client, "end": time.monotonic_ns(), **told}
            os.write(self._fd, json.dumps(line).encode() + b"\n")


class _Call:
    """A call that changes the store; without an answer its outcome is unknown."""

    def __init__(self, store: Recorded, told: dict[str, Any]) -> None:
        self._store, self._told = store, told
        self._number = next(store._numbers)
        self.answer: bool | str | None = None

    def __enter__(self) -> Self:
        begin = time.monotonic_ns()
        self._store._say(**self._told, call=self._number, begin=begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, StorageError):
            self.answer = kind.__name__
        if self.answer is not None:
            self._store._say(call=self._number, answer=self.answer)


def digest(data: bytes) -> str:
    """Return the digest by which bytes are compared."""
    return hashlib.sha256(data).hexdigest()
