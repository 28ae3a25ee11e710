"""The endpoint as an ASGI application: who may ask, what is answered, what is noted of it.

The clients use their cache without a word when an answer is 5xx, or there is none; they stop at 404
with `RevisionNotFound`. So a revision by name that cannot be read is answered in that way. One by
digits means the same bytes for ever: there a 503 makes the client try again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.types import Message, Receive, Scope, Send

from holdfast.backends.escape import printable
from holdfast.registry.errors import InvalidInput, NotFound, RegistryError, StoreUnavailable
from holdfast.registry.face import exposition
from holdfast.registry.hub.access import Access, Token
from holdfast.registry.hub.catalog import EXACT, Catalog
from holdfast.registry.hub.requests import (
    Asked,
    asked,
    byte_range,
    headers_of,
    info,
    paths_info,
    tree,
)
from holdfast.registry.hub.views import View
from holdfast.registry.loading import Joined
from holdfast.registry.values import Figures, check_json

#: Seconds within which a revision must be found: the clients give up after 10.
_PATIENCE_S = 8.0
#: Seconds for which a client may leave an answer unread.
_STALLED_S = 60.0
#: Bytes that are read at once. An answer holds two such parts: one is sent, the next is read.
_PART_BYTES = 8 * 2**20
#: The most files that are sent at once; further ones wait. With `_PART_BYTES` this bounds memory.
_OPEN_FILES = 32
_RESOLVERS, _READERS = 16, 16
_LONGEST_BODY = 2**20
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that is known."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reason: str = ""  # what went wrong, for the access log


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a file, which is sent as it is read."""

    status: int
    headers: Mapping[str, str]
    file: Joined
    start: int  # its first byte
    stop: int  # the byte after its last
    request: Asked  # what it answers


class _Broken(Exception):
    """The reason for which an answer ended before its length."""


class Endpoint:
    """Answers the clients of Hugging Face over one registry.

    Args:
        catalog: Its repositories and views.
        access: Who may ask.
        hosts: The values of `Host` that name this endpoint; other requests are refused, so that no
            web page reaches it under a name of its own.
        log: Called with a line for each request.
        figures: What `/metrics` shows; by default its own alone.
    """

    def __init__(
        self,
        catalog: Catalog,
        access: Access,
        hosts: frozenset[str],
        log: Callable[[str], object],
        figures: Figures | None = None,
    ) -> None:
        self._catalog, self._access, self._hosts, self._log = catalog, access, hosts, log
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "holdfast-hub")
        self._readers = ThreadPoolExecutor(_READERS, "holdfast-hub-read")
        self._files: asyncio.Semaphore | None = None  # made in the loop of the server
        self._figures = figures or Figures()

    def close(self) -> None:
        """Stop reading."""
        for pool in (self._resolvers, self._readers):
            pool.shutdown(cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        began_s, sent = time.monotonic(), Counter[str]()

        async def counted(message: Message) -> None:
            sent["bytes"] += len(message.get("body", b""))
            await send(message)

        headers = {key.decode("latin-1"): text.decode("latin-1") for key, text in scope["headers"]}
        caller = self._access.caller(headers.get("authorization"))
        status, reason = 500, ""
        self._figures.add("hub_open_requests")
        try:
            found = await self._answer(scope, headers, caller, receive)
            status = found.status
            answer = (
                await self._send_part(found, receive, counted)
                if isinstance(found, _Part)
                else found
            )
            if answer is not None:
                status, reason = answer.status, answer.reason
                await _send(answer, counted, is_last=caller is None)
        except _Broken as error:
            reason = f"broken off: {error}"
            self._figures.add("hub_broken_answers_total")
        finally:
            self._figures.add("hub_open_requests", -1)
            self._figures.add("hub_requests_total", status=status)
            self._figures.add("hub_sent_bytes_total", sent["bytes"])
            took = f"{1000 * (time.monotonic() - began_s):.0f}ms"
            self._note(scope, caller, status, sent["bytes"], took, printable(reason))

    def _note(self, scope: Scope, caller: Token | None, *result: object) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        name = "?" if caller is None else caller.name
        path = printable(scope["raw_path"].decode("latin-1"))
        self._log(" ".join(map(str, [now, name, scope["method"], path, *result])).rstrip())

    # Answers

    async def _answer(
        self, scope: Scope, headers: Mapping[str, str], caller: Token | None, receive: Receive
    ) -> _Answer | _Part:
        path, method = scope["raw_path"], scope["method"]
        if path == b"/healthz":
            return _text(200, "ok\n")
        if headers.get("host", "") not in self._hosts:
            return _text(421, "not a name of this server\n")
        if path == b"/metrics":
            return _text(200, exposition(self._figures).decode())
        if caller is None:
            return _error(401, "", "Invalid credentials in Authorization header")
        request = asked(path)
        if method not in ("GET", "HEAD") and not (
            method == "POST" and request is not None and request.kind == "paths-info"
        ):
            return _error(405, "", "this endpoint is read-only")
        if request is None:
            return _absent()
        try:
            return await self._of(request, scope, headers, caller, receive)
        except Exception as error:  # a 500 would send the client to its cache
            return _unread(request, error)

    async def _of(
        self,
        request: Asked,
        scope: Scope,
        headers: Mapping[str, str],
        caller: Token,
        receive: Receive,
    ) -> _Answer | _Part:
        # Decided by the name alone: nobody learns from the time whether there is such a run.
        if not caller.allows(request.repo.rpartition("/")[2]):
            return _absent()
        view = self._catalog.known(request.repo, request.revision)
        if view is None:
            loop = asyncio.get_running_loop()
            coming = loop.run_in_executor(self._resolvers, self._find, request)
            view = await asyncio.wait_for(coming, _PATIENCE_S)
            if view is None:
                return _absent()
        query = parse_qs(scope["query_string"].decode("latin-1"))
        match request.kind:
            case "info":
                return _json(info(request.repo, view))
            case "tree":
                recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
                entries = tree(view, request.path.strip("/"), recursive=recursive)
                return _missing(view) if entries is None else _json(entries)
            case "paths-info":
                return _json(paths_info(view, await _paths(headers, receive)))
        return self._file(view, request, scope["method"], headers)

    def _find(self, request: Asked) -> View | None:
        """Return the view; `None` if there is no such repository."""
        try:
            run = self._catalog.run(request.repo)
        except (NotFound, InvalidInput):
            return None
        return self._catalog.view(request.repo, run, request.revision)

    def _file(
        self, view: View, request: Asked, method: str, headers: Mapping[str, str]
    ) -> _Answer | _Part:
        file = view.files.get(request.path)
        if file is None:
            return _missing(view)
        own = headers_of(view, request.path)
        if request.revision != view.revision:
            # The client goes on with the digits: the ref may move before it asks for the bytes.
            place = f"/{request.repo}/resolve/{view.revision}/{quote(request.path)}"
            return _Answer(307, {"location": place, "x-repo-commit": view.revision})
        is_same = headers.get("if-range", own["etag"]) == own["etag"]
        part = byte_range(headers.get("range") if is_same else None, file.size)
        if part is None:
            return _Answer(416, {**own, "content-range": f"bytes */{file.size}"})
        start, stop = part
        about, status = {**own, "content-length": str(stop - start)}, 200
        if (start, stop) != (0, file.size):
            about["content-range"], status = f"bytes {start}-{stop - 1}/{file.size}", 206
        if method == "HEAD" or start == stop:
            return _Answer(status, about)
        return _Part(status, about, file, start, stop, request)

    # Bytes

    async def _send_part(self, part: _Part, receive: Receive, send: Send) -> _Answer | None:
        """Send a part of a file, or return the answer that says why nothing of it was sent."""
        if self._files is None:
            self._files = asyncio.Semaphore(_OPEN_FILES)
        async with self._files:
            gone = asyncio.ensure_future(_disconnected(receive))
            coming = self._read(part, part.start)
            try:
                try:
                    data = await coming
                except Exception as error:
                    return _unread(part.request, error)
                await send(_start(part.status, part.headers))
                at = part.start + len(data)
                while not gone.done():
                    more = at < part.stop
                    coming = self._read(part, at)
                    message = {"type": "http.response.body", "body": data, "more_body": more}
                    async with asyncio.timeout(_STALLED_S):
                        await send(message)
                    if not more:
                        return None
                    data = await coming
                    at += len(data)
                raise _Broken("the client went away")
            except TimeoutError:
                raise _Broken("the client stopped reading") from None
            except RegistryError as error:
                raise _Broken(_said(error)) from error
            finally:
                gone.cancel()
                coming.cancel()

    def _read(self, part: _Part, at: int) -> asyncio.Future[bytes]:
        loop, stop = asyncio.get_running_loop(), min(at + _PART_BYTES, part.stop)
        begin = part.file.begin_of_chunk(stop) if stop < part.stop else stop
        if begin - at >= _PART_BYTES // 2:  # where a chunk is larger, parts split it
            stop = begin
        return loop.run_in_executor(self._readers, part.file.read, at, stop)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _paths(headers: Mapping[str, str], receive: Receive) -> list[str]:
    """Return the paths in the body of a request, a form or JSON."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _LONGEST_BODY:
            raise InvalidInput("the body is too long", expected=f"at most {_LONGEST_BODY} bytes")
    if "json" in headers.get("content-type", ""):
        check_json(body, where="paths-info", kind=InvalidInput)
        try:
            found = json.loads(body)["paths"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput("no paths in the body", found=type(error).__name__) from error
    else:
        found = parse_qs(body.decode(errors="replace")).get("paths", [])
    return [one for one in ([found] if isinstance(found, str) else found) if isinstance(one, str)]


async def _send(answer: _Answer, send: Send, *, is_last: bool) -> None:
    about = {"content-length": str(len(answer.body)), **answer.headers}
    if is_last:  # a stranger gets one answer on a connection
        about["connection"] = "close"
    await send(_start(answer.status, about))
    await send({"type": "http.response.body", "body": answer.body})


def _start(status: int, headers: Mapping[str, str]) -> Message:
    pairs = [(name.encode(), text.encode("latin-1")) for name, text in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _json(value: Any) -> _Answer:
    about = {"content-type": "application/json", "cache-control": "private, no-cache"}
    return _Answer(200, about, json.dumps(value).encode())


def _text(status: int, text: str) -> _Answer:
    return _Answer(status, {"content-type": "text/plain; charset=utf-8"}, text.encode())


def _error(status: int, code: str, message: str, **headers: str) -> _Answer:
    about = {"content-type": "application/json", "x-error-message": message, **headers}
    if code:
        about["x-error-code"] = code
    return _Answer(status, about, json.dumps({"error": message}).encode(), message)


def _absent() -> _Answer:
    """Return the answer to a run that is absent, and to one that the caller may not read."""
    return _error(404, "RepoNotFound", "Repository not found")


def _missing(view: View) -> _Answer:
    return _error(404, "EntryNotFound", "Entry not found", **{"x-repo-commit": view.revision})


def _unread(request: Asked, error: Exception) -> _Answer:
    """Return the answer to a revision that cannot be read now, or is not there."""
    is_away = isinstance(error, (StoreUnavailable, TimeoutError))
    if is_away and EXACT.fullmatch(request.revision):
        return _error(503, "", _said(error), **{"retry-after": "5"})
    return _error(404, "RevisionNotFound", _said(error))


def _said(error: Exception) -> str:
    """Return an error in one line of ASCII, which fits into a header."""
    text = str(error) if isinstance(error, RegistryError) else type(error).__name__
    line = printable(" ".join(text.split()))[:_REASON_CHARACTERS]
    return line.encode("ascii", "backslashreplace").decode()
