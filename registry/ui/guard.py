"""The guard of the local server: it admits this machine, by its own name, with the URL's token.

The token works once; the browser gets another secret for it, in a cookie. A page of another site
cannot read the answers: it does not know the token, its requests carry no cookie
(`SameSite=Strict`), and a foreign name that points at this machine is not in the list of hosts.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlencode, urlsplit

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

#: Plotly makes an empty style element and fills it by rules, so only the empty text needs a digest.
EMPTY_STYLE = f"'sha256-{base64.b64encode(hashlib.sha256(b'').digest()).decode()}'"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    f"{EMPTY_STYLE}; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TOKEN = "token"  # noqa: S105 - the name of the parameter
_STRANGER = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Holdfast</title>
<h1>This page is private</h1>
<p>Open the URL that <code>holdfast ui</code> printed last: it has a token, which works once.
If you did so in this browser already, <a href="">try again</a>.</p></html>"""

Next = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Entrance:
    """The secrets of a server."""

    base: str
    renewed: Callable[[str], object] = id  # called with the next URL after a token was used
    #: Admits the next browser, once.
    token: str = field(default_factory=partial(secrets.token_urlsafe, 24))
    #: The cookie of all admitted browsers.
    session: str = field(default_factory=partial(secrets.token_urlsafe, 24))

    @property
    def url(self) -> str:
        """The address for the next browser."""
        return f"{self.base}/?{_TOKEN}={self.token}"

    def admits(self, token: str) -> bool:
        """Return whether a token is right; if so, replace it by another one."""
        if not _is_same(token, self.token):
            return False
        self.token = secrets.token_urlsafe(24)
        self.renewed(self.url)
        return True


class Guard(BaseHTTPMiddleware):
    """Refuse strangers, and set the headers that separate pages from other sites."""

    def __init__(self, app: ASGIApp, *, entrance: Entrance) -> None:
        super().__init__(app)
        self._entrance, port = entrance, urlsplit(entrance.base).port
        ends = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers omit the port of HTTP
        self._hosts = {name + end for name in ("127.0.0.1", "localhost", "[::1]") for end in ends}
        self._cookie = f"holdfast_{port}"  # browsers share cookies between ports

    async def dispatch(self, request: Request, call_next: Next) -> Response:
        """Answer a request, or refuse it."""
        response = self._refusal(request) or await call_next(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        if not request.url.path.startswith("/static/"):
            response.headers["Cache-Control"] = "no-store"
        return response

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("host", "") not in self._hosts:
            return PlainTextResponse("not a name of this server\n", 421)
        given = request.query_params.get(_TOKEN)
        is_known = _is_same(request.cookies.get(self._cookie, ""), self._entrance.session)
        if given is not None and (is_known or self._entrance.admits(given)):
            return self._admitted(request)
        return None if is_known and given is None else _strange(request)

    def _admitted(self, request: Request) -> Response:
        """Exchange the token for a cookie, so that it stays in no history and in no link."""
        rest = [pair for pair in request.query_params.multi_items() if pair[0] != _TOKEN]
        query = f"?{urlencode(rest)}" if rest else ""
        # A path that begins with two slashes would be the name of another server.
        response = RedirectResponse(f"/{request.url.path.lstrip('/')}{query}", 303)
        session = self._entrance.session
        response.set_cookie(self._cookie, session, httponly=True, samesite="strict", path="/")
        return response


def _strange(request: Request) -> Response:
    # A link from elsewhere, such as the file that the browser was given, brings no cookie: the
    # browser has one after a redirect, and sends it when the page asks again by itself.
    is_link = request.headers.get("sec-fetch-site") == "cross-site"
    return HTMLResponse(_STRANGER, 403, {"Refresh": "0"} if is_link else None)


def _is_same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())
