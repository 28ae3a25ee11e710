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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.backends.escape import printable
from holdfast.registry.errors import InvalidInput, RegistryError, StoreUnavailable
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
    unmet,
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


class _Part(NamedTuple):
    """A part of a file, which is sent as it is read."""

    answer: Response  # its status and headers
    file: Joined
    start: int  # its first byte
    stop: int  # the byte after its last
    wanted: Asked  # what it answers


class _Broken(Exception):
    """The reason for which an answer ended before its length."""


class Endpoint:
    """Answers the clients of Hugging Face over one registry."""

    def __init__(
        self,
        catalog: Catalog,
        access: Access,
        hosts: frozenset[str],  # values of `Host`; others are refused, so that no page gets in
        log: Callable[[str], object],  # called with a line for each request
        figures: Figures,  # what `/metrics` shows
    ) -> None:
        self._catalog, self._access, self._hosts, self._log = catalog, access, hosts, log
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "holdfast-hub")
        self._readers = ThreadPoolExecutor(_READERS, "holdfast-hub-read")
        self._files, self._figures = asyncio.Semaphore(_OPEN_FILES), figures

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

        request = Request(scope, receive)
        caller = self._access.caller(request.headers.get("authorization"))
        status, reason = 500, ""
        self._figures.add("hub_open_requests")
        try:
            answer: Response | _Part | None = await self._answer(request, caller)
            if isinstance(answer, _Part):
                status = answer.answer.status_code
                answer = await self._send_part(answer, request, counted)
            if answer is not None:
                status, reason = answer.status_code, answer.headers.get("x-error-message", "")
                if caller is None:  # a stranger gets one answer on a connection
                    answer.headers["connection"] = "close"
                await answer(scope, receive, counted)
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

    async def _answer(self, request: Request, caller: Token | None) -> Response | _Part:
        path, method = request.scope["raw_path"], request.method
        if path == b"/healthz":
            return PlainTextResponse("ok\n")
        if request.headers.get("host", "") not in self._hosts:
            return PlainTextResponse("not a name of this server\n", 421)
        if path == b"/metrics":
            return PlainTextResponse(exposition(self._figures))
        if caller is None:
            reason = "Invalid credentials in Authorization header"
            return _error(401, "", reason, **{"www-authenticate": "Bearer"})
        wanted = asked(path)
        if method not in ("GET", "HEAD") and not (
            method == "POST" and wanted is not None and wanted.kind == "paths-info"
        ):
            return _error(405, "", "this endpoint is read-only", allow="GET, HEAD")
        # Decided by the name alone: nobody learns from the time whether there is such a run.
        if wanted is None or not caller.allows(wanted.repo.rpartition("/")[2]):
            return _absent()
        try:
            return await self._of(wanted, request)
        except Exception as error:  # a 500 would send the client to its cache
            return _unread(wanted, error)

    async def _of(self, wanted: Asked, request: Request) -> Response | _Part:
        view = self._catalog.known(wanted.repo, wanted.revision)
        if view is None:
            loop = asyncio.get_running_loop()
            find = partial(self._catalog.view, wanted.repo, wanted.revision)
            coming = loop.run_in_executor(self._resolvers, find)
            view = await asyncio.wait_for(coming, _PATIENCE_S)
            if view is None:
                return _absent()
        match wanted.kind:
            case "info":
                return _json(info(wanted.repo, view))
            case "tree":
                recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
                entries = tree(view, wanted.path.strip("/"), recursive=recursive)
                return _missing(view) if entries is None else _json(entries)
            case "paths-info":
                return _json(paths_info(view, await _paths(request)))
        return _file(view, wanted, request)

    # Bytes

    async def _send_part(self, part: _Part, request: Request, send: Send) -> Response | None:
        """Send a part of a file, or return the answer that says why nothing of it was sent."""
        async with self._files:
            coming = self._read(part, part.start)
            try:
                data = await coming
            except Exception as error:
                return _unread(part.wanted, error)
            status, headers = part.answer.status_code, part.answer.raw_headers
            try:
                await send({"type": "http.response.start", "status": status, "headers": headers})
                at = part.start + len(data)
                while not await request.is_disconnected():
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
                coming.cancel()

    def _read(self, part: _Part, at: int) -> asyncio.Future[bytes]:
        loop, end = asyncio.get_running_loop(), part.file.part_end(at, _PART_BYTES, part.stop)
        return loop.run_in_executor(self._readers, part.file.read, at, end)


def _file(view: View, wanted: Asked, request: Request) -> Response | _Part:
    file = view.files.get(wanted.path)
    if file is None:
        return _missing(view)
    own = headers_of(view, wanted.path)
    if wanted.revision != view.revision:
        # The client goes on with the digits: the ref may move before it asks for the bytes.
        project, slash, run = wanted.repo.rpartition("/")  # a project may have slashes of its own
        repo = f"{quote(project, safe='')}{slash}{run}"
        place = f"/{repo}/resolve/{view.revision}/{quote(wanted.path)}"
        return Response(None, 307, {"location": place, "x-repo-commit": view.revision})
    if status := unmet(request.headers, own["etag"]):
        return Response(None, status, own)
    is_same = request.headers.get("if-range", own["etag"]) == own["etag"]
    has_range = is_same and request.method == "GET"  # a HEAD has no ranges
    part = byte_range(request.headers.get("range") if has_range else None, file.size)
    if part is None:
        return Response(None, 416, {**own, "content-range": f"bytes */{file.size}"})
    start, stop = part
    about, status = {**own, "content-length": str(stop - start)}, 200
    if (start, stop) != (0, file.size):
        about["content-range"], status = f"bytes {start}-{stop - 1}/{file.size}", 206
    answer = Response(None, status, about)
    if request.method == "HEAD" or start == stop:
        return answer
    return _Part(answer, file, start, stop, wanted)


async def _paths(request: Request) -> list[str]:
    """Return the paths in the body of a request, a form or JSON."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST_BODY:
            raise InvalidInput("the body is too long", expected=f"at most {_LONGEST_BODY} bytes")
    if "json" in request.headers.get("content-type", ""):
        check_json(body, where="paths-info", kind=InvalidInput)
        try:
            found = json.loads(body)["paths"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput("no paths in the body", found=type(error).__name__) from error
    else:
        found = parse_qs(body.decode(errors="replace")).get("paths", [])
    return [one for one in ([found] if isinstance(found, str) else found) if isinstance(one, str)]


def _json(value: Any) -> Response:
    return JSONResponse(value, headers={"cache-control": "private, no-cache"})


def _error(status: int, code: str, message: str, **headers: str) -> Response:
    about = {"x-error-message": message, **headers}
    if code:
        about["x-error-code"] = code
    return JSONResponse({"error": message}, status, about)


def _absent() -> Response:
    """Return the answer to a run that is absent, and to one that the caller may not read."""
    return _error(404, "RepoNotFound", "Repository not found")


def _missing(view: View) -> Response:
    return _error(404, "EntryNotFound", "Entry not found", **{"x-repo-commit": view.revision})


def _unread(wanted: Asked, error: Exception) -> Response:
    """Return the answer to a revision that cannot be read now, or is not there."""
    is_away = isinstance(error, (StoreUnavailable, TimeoutError))
    if is_away and EXACT.fullmatch(wanted.revision):
        return _error(503, "", _said(error), **{"retry-after": "5"})
    return _error(404, "RevisionNotFound", _said(error))


def _said(error: Exception) -> str:
    """Return an error in one line of ASCII, which fits into a header."""
    text = str(error) if isinstance(error, RegistryError) else type(error).__name__
    line = printable(" ".join(text.split()))[:_REASON_CHARACTERS]
    return line.encode("ascii", "backslashreplace").decode()
