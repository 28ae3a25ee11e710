"""Who may ask the local server: this machine, under its own name, with the token of the URL.

A page of another site cannot read the answers: it does not know the token, its requests carry no
cookie (`SameSite=Strict`), and a name that was pointed at this machine is not in the list of hosts.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlencode

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

#: Plotly makes an empty style element and fills it by rules, which needs the digest of no text.
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
<p>Open the URL that <code>holdfast ui</code> has printed: it has a token.
If you did so in this browser already, <a href="">try again</a>.</p></html>"""

Next = Callable[[Request], Awaitable[Response]]


class Guard(BaseHTTPMiddleware):
    """Refuses strangers, and sets the headers that keep pages apart from other sites.

    Args:
        app: The pages.
        token: The secret of this server.
        port: Its port.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        super().__init__(app)
        self._token = token
        ends = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers omit the port of HTTP
        self._hosts = {name + end for name in ("127.0.0.1", "localhost", "[::1]") for end in ends}
        self._cookie = f"holdfast_{port}"  # cookies do not tell ports apart

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
        if given is not None:
            return self._admitted(request) if self._is_right(given) else _strange()
        if not self._is_right(request.cookies.get(self._cookie, "")):
            return _strange()
        return None

    def _is_right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _admitted(self, request: Request) -> Response:
        """Exchange the token for a cookie, so that it stays in no history and in no link."""
        rest = [pair for pair in request.query_params.multi_items() if pair[0] != _TOKEN]
        query = f"?{urlencode(rest)}" if rest else ""
        # A path that begins with two slashes would be the name of another server.
        response = RedirectResponse(f"/{request.url.path.lstrip('/')}{query}", 303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response


def _strange() -> Response:
    return HTMLResponse(_STRANGER, 403)
