"""The store behind a file system of fsspec, for stores without a client of ours.

`put_if_absent` is `pipe_file(mode="create")`, never a look and then a write. In most file systems
that method is itself a look and then a write, so only listed classes are written to
(`holdfast.backends.fsspec.file_systems`); all others are read only.

A backend makes an instance of its own from the one that it is given, and another one in a forked
child: an event loop and its sockets cannot be shared. Listings never come from fsspec's cache of
directories. A put counts once `info` tells its size.

At the end of a process drivers close their sessions, and thread pools take no more work, before a
run gets its last status. A request that fails then is repeated by a new instance, without a pool.
"""

from __future__ import annotations

import atexit
import inspect
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet, finalize

from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from holdfast.backends.base import (
    Backend,
    Body,
    ByteRange,
    ObjectInfo,
    as_buffers,
    check_into,
    check_key,
    cut,
    truncated,
)
from holdfast.backends.errors import (
    AccessDenied,
    ObjectNotFound,
    ObjectTruncated,
    ReadOnlyStore,
    StoreUnavailable,
    StoreUnsuitable,
)
from holdfast.backends.fsspec.dialect import Call, Dialect, Query
from holdfast.backends.limits import check_whole
from holdfast.backends.location import redact
from holdfast.backends.patience import (
    TIMEOUT,
    Attempts,
    Patience,
    patience_of_environment,
    unanswered,
)
from holdfast.backends.secrets import Secrets, hidden
from holdfast.backends.waiting import Wait, waiting

_T = TypeVar("_T")

_WRITES = ("put", "delete")
_PAGE = 1000
# Objects up to this length take one request to read whole.
_FIRST_BYTES = 2**20
# An attempt whose time is over still asks for the outcome of its write.
_LEAST_S = 0.1

_open: WeakSet[FsspecBackend] = WeakSet()
# Instances of the parent process. To finalize one in a child would wait for a dead event loop.
_inherited: list[Any] = []
# Set once the process has begun to end.
_ending = threading.Event()


class FsspecBackend(Backend):
    """Objects of a file system under a root.

    Args:
        fs: The file system; it is only a model for instances of our own.
        root: Path of the folder, or bucket and prefix.
        dialect: How this kind of file system is asked.
        patience: How long to wait; from the environment if `None`.
    """

    concurrency = 16

    def __init__(
        self, fs: Any, root: str, dialect: Dialect, patience: Patience | None = None
    ) -> None:
        self._class: type = dialect.class_of(fs)
        self._args: tuple[Any, ...] = fs.storage_args
        self._given: Mapping[str, Any] = fs.storage_options
        self._secrets = Secrets([self._args, self._given])
        self._root = fs._strip_protocol(root).rstrip("/")
        self._dialect = dialect
        self._bucket, self._prefix = dialect.split(fs, self._root)
        known = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        named = root.partition("://")[0]
        scheme = named if named in known else known[0]
        self._query = redact(dialect.query(fs))
        # Paths of some file systems, such as `http`, are URLs.
        self._url = redact(f"{scheme}://{self._root.removeprefix(f'{scheme}://')}")
        self._server = dialect.server(fs)
        self._patience = patience or patience_of_environment()
        # Until then there is less patience: a wrong address should be reported soon.
        self._answered = False
        self._made: Any = None
        self._lock = threading.Lock()
        _open.add(self)

    @property
    def url(self) -> str:
        """Scheme and path; of S3 also the server that options named."""
        return self._url + self._query

    @property
    def server(self) -> str:
        """The account of Azure."""
        return self._server

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        check_into(byte_range, into)
        path = self._path(key)
        if byte_range is None:
            return self._whole(key, path)
        wanted = byte_range
        data = self._ask(
            "get", key, lambda call: self._part(call, key, path, wanted), len(byte_range)
        )
        return cut(key, data, ByteRange(0, len(byte_range)), into)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object; it counts once the store tells its size."""
        path = self._path(key)
        self._refuse_if_read_only(key)
        data = _joined(body)

        def ask(call: Call) -> None:
            call("pipe_file", path, data, **self._dialect.put_options(data))
            self._prove(call, key, path, len(data))

        self._ask("put", key, ask, len(data))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; False may mean one's own lost answer."""
        path = self._path(key)
        self._refuse_if_read_only(key)
        data = _joined(body)

        def ask(call: Call) -> bool:
            where = self._where(key)
            try:
                with self._dialect.translated(where, writes=True):
                    if not self._create(call, path, data):
                        if self._size(call, key, path) is None:
                            said = "'exists' of an object that is absent"
                            raise unanswered(said, where, writes=True)
                        return False
            except StoreUnavailable:
                # Only the store knows whether the object was made. If it is absent, send it again.
                if self._size(call, key, path) is not None:
                    return False
                raise
            self._prove(call, key, path, len(data))
            return True

        return self._ask("put", key, ask, len(data))

    def stat(self, key: str) -> ObjectInfo:
        """Tell size and time of an object."""
        path = self._path(key)
        found = self._ask("stat", key, lambda call: self._dialect.stat(call, path))
        return ObjectInfo(key, found.size_bytes, found.modified_s)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order."""
        last, left = start_after, limit
        token: str | None = None
        while left is None or left > 0:
            query = Query(
                self._bucket,
                self._prefix + prefix,
                self._prefix + start_after if start_after else "",
                delimiter,
                _PAGE if left is None else min(left, _PAGE),
                token,
            )
            infos, next_token = self._page(prefix, query)
            for info in infos:
                # S3 counts a folder as after a key within it; and a page may come twice.
                if info.key > last and (left is None or left > 0):
                    last = info.key
                    left = None if left is None else left - 1
                    yield info
            if next_token is None:
                return
            if not next_token or next_token == token:
                raise StoreUnavailable("a listing that does not go on", where=self._where(prefix))
            token = next_token

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        path = self._path(key)
        self._refuse_if_read_only(key)
        try:
            self._ask("delete", key, lambda call: self._dialect.remove(call, path))
        except ObjectNotFound:
            return

    def keeps_versions(self) -> bool | None:
        """Tell whether the store keeps versions; None where it does not say."""
        try:
            return self._ask(
                "versioning", "", lambda call: self._dialect.keeps_versions(call, self._bucket)
            )
        except (AccessDenied, StoreUnsuitable):
            return None

    def close(self) -> None:
        """Release the connections; a later call opens new ones."""
        self._made = None

    def _forget(self) -> None:
        """Drop the instance of the parent process without finalizing it."""
        if self._made is not None:
            _inherited.append(self._made)
        self._made = None
        self._lock = threading.Lock()

    def _begin_again(self) -> None:
        """Drop the instance, whose session may be closed, and let its loop work without threads."""
        made, self._made = self._made, None
        if made is not None and isinstance(loop := getattr(made, "loop", None), AbstractEventLoop):
            loop.set_default_executor(_AtOnce())
            # Nobody will close the session of the next instance: that is no news now.
            loop.set_exception_handler(lambda _loop, _context: None)

    def _call(self, attempt: _Attempt) -> Call:
        made = self._made
        if made is None:
            with self._lock:
                made = self._made = self._made or self._make(attempt)
        return self._call_of(made, attempt)

    def _make(self, attempt: _Attempt) -> Any:
        options = self._dialect.options(self._given, self._patience)
        own = {name: value for name, value in options.items() if name not in _NOT_TAKEN}
        fs = self._class(*self._args, **own, skip_instance_cache=True)
        self._dialect.prepare(self._call_of(fs, attempt))
        return fs

    def _call_of(self, fs: Any, attempt: _Attempt) -> Call:
        return Call(fs, partial(attempt.run, fs), twins=not self._dialect.reason)

    def _ask(self, act: str, key: str, ask: Callable[[Call], _T], size: int = 0) -> _T:
        """Repeat a request until the store answers, or patience ends."""
        where = self._where(key)
        patience = self._patience if self._answered else self._patience.opening()
        attempts = Attempts(patience.allowing(size))
        timeout_s = patience.try_s + size / patience.least_bytes_per_s
        writes = act in _WRITES
        # Only for the line about a slow request: what moves in between is not seen here.
        with waiting(Wait(act, where, patience, limit=TIMEOUT, writes=writes, size_bytes=size)):
            while True:
                attempt = _Attempt(where, writes, min(timeout_s, attempts.left_s()))
                try:
                    with (
                        hidden(lambda: self._secrets),
                        self._dialect.translated(where, writes=writes),
                    ):
                        found = ask(self._call(attempt))
                except StoreUnavailable as error:
                    attempts.failed(error)
                    if _ending.is_set():
                        self._begin_again()
                except ObjectNotFound:
                    self._answered = True
                    raise
                else:
                    self._answered = True
                    return found

    def _create(self, call: Call, path: str, data: bytes) -> bool:
        try:
            call("pipe_file", path, data, mode="create", **self._dialect.put_options(data))
        except Exception as error:
            if self._dialect.says_exists(error):
                return False
            raise
        return True

    def _whole(self, key: str, path: str) -> bytes:
        data = self._ask("get", key, lambda call: self._first(call, key, path))
        if len(data) < _FIRST_BYTES:
            return data
        size = self.stat(key).size_bytes
        check_whole(size, self._where(key))
        return self._ask("get", key, lambda call: self._dialect.read_all(call, path), size)

    def _first(self, call: Call, key: str, path: str) -> bytes:
        try:
            with self._dialect.translated(self._where(key)):
                data = self._dialect.read(call, path, 0, _FIRST_BYTES)
        except ObjectTruncated:
            # An empty object has no range.
            if self._size(call, key, path) == 0:
                return b""
            raise
        return data

    def _part(self, call: Call, key: str, path: str, wanted: ByteRange) -> bytes:
        data = self._dialect.read(call, path, wanted.start, wanted.stop)
        if len(data) > len(wanted):
            raise unanswered(f"{len(data)} bytes for a range of {len(wanted)}", self._where(key))
        if len(data) < len(wanted):
            if (self._size(call, key, path) or 0) >= wanted.stop:
                raise unanswered(f"{len(data)} bytes of a range of {len(wanted)}", self._where(key))
            raise truncated(self._where(key), wanted.stop, wanted.start + len(data))
        return data

    def _size(self, call: Call, key: str, path: str) -> int | None:
        """Return the size of an object, `None` if it is absent."""
        try:
            with self._dialect.translated(self._where(key)):
                return self._dialect.stat(call, path).size_bytes
        except ObjectNotFound:
            return None

    def _prove(self, call: Call, key: str, path: str, size_bytes: int) -> None:
        found = self._size(call, key, path)
        if found != size_bytes:
            raise unanswered(
                f"a put of {size_bytes} bytes was acknowledged, and then the object "
                + ("was absent" if found is None else f"had {found} bytes"),
                self._where(key),
                writes=True,
            )

    def _page(self, prefix: str, query: Query) -> tuple[Sequence[ObjectInfo], str | None]:
        page = self._ask("list", prefix, lambda call: self._dialect.page(call, query))
        names = [info.key for info in page.objects]
        if names != sorted(names) or list(page.folders) != sorted(page.folders):
            # Continuing after the last key would miss keys that such a store lists later.
            raise StoreUnsuitable(
                "the store does not list its keys in order",
                where=self._where(""),
                hint="Use a general purpose bucket, or an account without hierarchical namespace.",
            )
        cut = len(self._prefix)
        found = [
            ObjectInfo(info.key[cut:], info.size_bytes, info.modified_s)
            for info in page.objects
            # Consoles mark a folder by an empty object of its name.
            if len(info.key) > cut and not info.key.endswith("/")
        ]
        found += [ObjectInfo(name[cut:], 0, 0.0) for name in page.folders]
        return sorted(found, key=lambda info: info.key), page.token

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}" if self._root else check_key(key)

    def _where(self, key: str) -> str:
        return f"{self._url}/{key}"

    def _refuse_if_read_only(self, key: str) -> None:
        if self._dialect.reason:
            raise ReadOnlyStore(
                f"{self._dialect.name} can only be read",
                where=self._where(key),
                found=self._dialect.reason,
                hint="Keep the registry in a folder, in S3, Azure or Google Cloud Storage.",
            )


class _Attempt:
    """One attempt of a request: all its calls together take a bounded time.

    Args:
        where: The URL of the object.
        writes: Whether the request changes the store.
        timeout_s: How long it may take.
    """

    def __init__(self, where: str, writes: bool, timeout_s: float) -> None:
        self._where = where
        self._writes = writes
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + timeout_s

    def run(self, fs: Any, function: Callable[..., Any], *args: object, **options: object) -> Any:
        """Call a function, or run a coroutine function on the loop of `fs` and stop it in time."""
        if not inspect.iscoroutinefunction(function):
            return function(*args, **options)
        left_s = max(self._ends_s - time.monotonic(), _LEAST_S)
        try:
            return sync(fs.loop, function, *args, timeout=left_s, **options)
        except FSTimeoutError as error:
            said = f"no answer in {time.monotonic() - self._began_s:.3g} s (more time: {TIMEOUT})"
            raise unanswered(said, self._where, writes=self._writes) from error


class _AtOnce(ThreadPoolExecutor):
    """Calls each function at once: thread pools take no work when a process ends."""

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call the function in this thread."""
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


# Options that our file system instance does not share with the user's.
_NOT_TAKEN = ("asynchronous", "loop", "skip_instance_cache")


def _joined(body: Body) -> bytes:
    return body if isinstance(body, bytes) else b"".join(as_buffers(body))


def _forget_all() -> None:
    for backend in _open:
        backend._forget()
    # At exit, adlfs would wait for ever for a loop that does not run in this process, and s3fs for
    # a second. There is no public way to find what they registered.
    for registered in list(getattr(finalize, "_registry", ())):
        found = registered.peek()
        if found is not None and any(isinstance(arg, AbstractEventLoop) for arg in found[2]):
            registered.detach()


os.register_at_fork(after_in_child=_forget_all)
# Python closes its thread pools before it calls what `atexit` knows. A program that is already
# ending cannot register it.
with suppress(RuntimeError):
    getattr(threading, "_register_atexit", atexit.register)(_ending.set)
