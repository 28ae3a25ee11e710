"""A proxy on loopback that passes requests on to a server of objects, or answers in its place.

It is what stands between many machines and their bucket: a corporate proxy, the login page of a
network, a load balancer. A lie says which requests it answers and with what; everything else goes
through unchanged, both ways.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

PAGE = b"<html><head><title>Please log in</title></head><body><p>Wifi</p></body></html>"


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    @property
    def operation(self) -> str:
        """Name what is asked of the store: of S3, Azure or Google."""
        if self.method == "GET" and (
            "list-type" in self.query or self.query.get("comp") == ["list"]
        ):
            return "list"
        if self.method == "GET" and self.path.startswith("/storage/v1/b/"):
            if "alt" in self.query:
                return "get"
            return "list" if urlsplit(self.path).path.endswith("/o") else "versioning"
        if self.method == "GET" and "versioning" in self.query:
            return "versioning"
        return {"GET": "get", "HEAD": "head", "PUT": "put", "POST": "put", "DELETE": "delete"}[
            self.method
        ]


@dataclass
class Answer:
    """An answer of the store, or one in its place."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


#: Makes an answer of a request; it may ask the store itself.
Lie = Callable[[Request, Callable[[Request], Answer]], Answer]


class Weather:
    """A lie of an S3 that is slow and has faults now and then.

    Args:
        kinds: Faults: `busy` is 503, `lost` hangs up after the store has done what was asked,
            `short` gives half of what was read as if it were all, `wrong` inverts a bit of it.
        share: The share of the requests that meet one.
        late_s: Seconds that every answer comes late.

    Attributes:
        met: Number of the faults by kind.
    """

    def __init__(self, kinds: Sequence[str], share: float, late_s: float = 0.0) -> None:
        self.met: Counter[str] = Counter()
        self._kinds, self._share, self._late_s = kinds, share, late_s
        self._chance, self._lock = random.Random(1), threading.Lock()

    def __call__(self, request: Request, ask: Callable[[Request], Answer]) -> Answer:
        time.sleep(self._late_s)
        fitting = [
            one for one in self._kinds if one in ("busy", "lost") or request.operation == "get"
        ]
        kind = ""
        with self._lock:
            if self._chance.random() < self._share:
                kind = min(fitting, key=self.met.__getitem__)  # the rarest so far
                self.met[kind] += 1
        if kind == "busy":
            return Answer(503, {}, b"<Error><Code>SlowDown</Code><Message>no</Message></Error>")
        said = ask(request)
        if kind == "lost":
            raise ConnectionAbortedError
        if kind == "short":
            said.headers = {n: v for n, v in said.headers.items() if n.lower() != "content-length"}
            said.body = said.body[: len(said.body) // 2]
        if kind == "wrong" and said.body:
            at = len(said.body) // 2
            said.body = said.body[:at] + bytes([said.body[at] ^ 4]) + said.body[at + 1 :]
        return said


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *given: Any) -> None:
        """Print what a lie does wrong, unless it hangs up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*given)


class Gateway:
    """The proxy; a context manager.

    Args:
        endpoint_url: The server behind it.
    """

    def __init__(self, endpoint_url: str) -> None:
        self.requests: list[Request] = []
        self._behind = urlsplit(endpoint_url).netloc
        self._lie: Lie | None = None
        self._meant: Callable[[Request], bool] = lambda _: False
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a body would wait 40 ms for the receipt of its head

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                headers = dict(self.headers.items())
                request = Request(self.command, self.path, headers, self.rfile.read(size))
                answer = gateway._answer(request)
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.status != 204 and "content-length" not in map(str.lower, answer.headers):
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def lie(self, meant: Callable[[Request], bool], lie: Lie) -> None:
        """Answer in the store's place from now on where `meant` says so."""
        self._lie, self._meant = lie, meant

    def be_honest(self) -> None:
        """Pass everything on."""
        self._lie, self._meant = None, lambda _: False

    def _answer(self, request: Request) -> Answer:
        self.requests.append(request)
        if self._lie is not None and self._meant(request):
            return self._lie(request, self._ask)
        return self._ask(request)

    def _ask(self, request: Request) -> Answer:
        connection = HTTPConnection(self._behind, timeout=300)
        try:
            # The body is here already, so there is nothing to wait for.
            headers = {n: v for n, v in request.headers.items() if n.lower() != "expect"}
            connection.request(request.method, request.path, request.body, headers)
            found = connection.getresponse()
            body = found.read()
            kept = {
                name: value
                for name, value in found.getheaders()
                if name.lower() not in ("connection", "transfer-encoding")
            }
            return Answer(found.status, kept, body)
        finally:
            connection.close()
