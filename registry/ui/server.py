"""The local web server: pages over one registry, on loopback alone, read-only without an editor.

Its guard admits this machine, by its own name, with the URL's token. The token works once; the
browser gets another secret for it, in a cookie. A page of another site cannot read the answers: it
does not know the token, its requests carry no cookie (`SameSite=Strict`), and a foreign name that
points at this machine is not in the list of hosts. `SameSite` ignores ports: what writes is a POST
whose Origin is this server, with the token of the page that it came from.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from holdfast.registry.errors import Conflict, InvalidInput, NotFound, RegistryError
from holdfast.registry.ui.editing import MOST_FORM, Editor
from holdfast.registry.ui.pages import VIEWS
from holdfast.registry.ui.pages.view import PATIENCE_S, Asked, Shown, View, trouble_of
from holdfast.registry.ui.rendering import FOLDER, render, script_path, style_ids
from holdfast.registry.ui.serving import HOST, Listener, is_same, loopback_hosts
from holdfast.registry.ui.source import Source
from holdfast.registry.values import HERE

_BY_NAME = {view.name: view for view in VIEWS}
#: Plotly makes an empty style element and fills it by rules, so only the empty text needs a digest.
EMPTY_STYLE = f"'sha256-{base64.b64encode(hashlib.sha256(b'').digest()).decode()}'"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    f"{EMPTY_STYLE}; img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; "
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


class Server:
    """Pages over a registry, served until the process is interrupted."""

    def __init__(
        self,
        source: Source,
        port: int = 0,
        renewed: Callable[[str], object] = id,
        editor: Editor | None = None,
    ) -> None:
        self._listener = Listener(HOST, port)
        self._entrance = Entrance(f"http://{HOST}:{self._listener.port}", renewed)
        self._app = application(source, self._entrance, editor)

    @property
    def url(self) -> str:
        """The address with the token, for the person at the keyboard; it admits one browser."""
        return self._entrance.url

    def serve(self) -> None:
        """Answer requests until SIGINT or SIGTERM comes, or `stop` is called."""
        self._listener.serve(self._app)

    def stop(self) -> None:
        """Stop the server: `serve` returns."""
        self._listener.stop()


def application(source: Source, entrance: Entrance, editor: Editor | None = None) -> Starlette:
    """Return the pages over a registry as an ASGI application."""
    routes = [
        Route(view.path, partial(_answer, source, editor, view), methods=["GET"], name=view.name)
        for view in VIEWS
    ]
    if editor is not None:
        edit = partial(_edit, source, editor)
        routes.append(Route("/runs/{run}/edit", edit, methods=["POST"]))
    return Starlette(
        routes=[
            *routes,
            Route("/samples/{name}", partial(_picture, source), methods=["GET"]),
            Route("/changes.json", partial(_changes, source), methods=["GET"]),
            Route("/static/plotly.min.js", _plotly, methods=["GET"]),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
            Route("/{path:path}", partial(_absent, source), methods=["GET"]),
        ],
        middleware=[Middleware(Guard, entrance=entrance, edits=editor is not None)],
    )


def _plotly(request: Request) -> Response:  # noqa: ARG001
    return FileResponse(
        script_path(),
        media_type="text/javascript",
        headers={"Cache-Control": "private, max-age=86400"},
    )


def _picture(source: Source, request: Request) -> Response:
    """Answer with a picture that a page has shown, by its digest: never as a page of its own."""
    found = source.pictures.get(request.path_params["name"])
    if found is None:
        return PlainTextResponse("not shown lately: load its page again\n", 404)
    kind, data = found
    return Response(
        data,
        media_type=f"image/{kind}",
        headers={
            "Content-Disposition": f'attachment; filename="sample.{kind}"',
            "Content-Security-Policy": "default-src 'none'; sandbox",
        },
    )


def _answer(source: Source, editor: Editor | None, view: View, request: Request) -> Response:
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    asked = Asked(request.path_params, query, within_s=PATIENCE_S)
    return _page(source, view, asked, lambda: view.ask(source, asked), editor)


async def _edit(source: Source, editor: Editor, request: Request) -> Response:
    """Write what a form of the page of a run says, and show the page again."""
    run, headers = request.path_params["run"], request.headers
    # The guard has checked the host.
    if headers.get("origin") != f"http://{headers['host']}":
        return PlainTextResponse("not from a page of this server\n", 403)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM:
            return PlainTextResponse("too long\n", 413)
    form = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
    if not editor.is_token(form.get("token", ""), run):
        return PlainTextResponse("not from the page of this run\n", 403)
    try:
        await run_in_threadpool(editor.act, run, form)
    except RegistryError as error:
        failed = partial(_raise, error)
        return await run_in_threadpool(_page, source, _BY_NAME["run"], Asked(), failed, editor)
    return RedirectResponse(f"{link('run', run=run)}#edit", 303)


def _absent(source: Source, request: Request) -> Response:
    error = NotFound("there is no such page", where=request.url.path)
    return _page(source, _BY_NAME["runs"], Asked(), lambda: _raise(error))


def _raise(error: RegistryError) -> Shown:
    raise error


def _page(
    source: Source,
    view: View,
    asked: Asked,
    ask: Callable[[], Shown],
    editor: Editor | None = None,
) -> Response:
    began = time.monotonic()
    status, template = 200, view.template
    with source.meter.measure() as cost:
        try:
            shown = ask()
        except RegistryError as error:
            status, template = _status(error), "error.html"
            shown = Shown(_heading(error), trouble_of(error))
    HERE.add("ui_pages_total", status=status)
    context = {
        "layout": "frame.html",
        "is_file": False,
        "style_ids": style_ids(),
        "level": 2,
        "prefix": "",
        "views": VIEWS,
        "view": view,
        "asked": asked,
        "shown": shown,
        "editor": editor,
        "link": link,
        "picture_url": "/samples/{}".format,
        "place": source.registry.url,
        "following": {"runs": dict(shown.live), "partial": shown.is_partial},
        "cost": cost,
        "took_ms": round(1000 * (time.monotonic() - began)),
    }
    return HTMLResponse(render(template, context), status)


def _status(error: RegistryError) -> int:
    match error:
        case NotFound():
            return 404
        case InvalidInput():
            return 400
        case Conflict():
            return 409
    return 502


def _heading(error: RegistryError) -> str:
    return "Not found" if isinstance(error, NotFound) else "This cannot be done"


def link(view: str, **arguments: object) -> str | None:
    """Return the URL of a view; `None` if there is no such view.

    Arguments that its path does not name go into the query; empty ones are skipped.
    """
    known = _BY_NAME.get(view)
    if known is None:
        return None
    path, rest = known.path, dict(arguments)
    for name, value in arguments.items():
        for part, safe in (("{%s}" % name, ""), ("{%s:path}" % name, "/")):  # noqa: UP031
            if part in path:
                path = path.replace(part, quote(str(value), safe=safe))
                del rest[name]
    given = [(name, value) for name, value in rest.items() if value not in (None, "", ())]
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def _changes(source: Source, request: Request) -> Response:
    """Answer whether any of some runs has grown: one request to the store for each run.

    The query has `run=NAME@COMMITS`, the number of commits that the page shows.
    """
    known = dict(text.rpartition("@")[::2] for text in request.query_params.getlist("run"))
    try:
        found = source.runs(list(known))
    except RegistryError as error:
        return JSONResponse({"changed": False, "error": error.summary})
    changed = any(str(run.manifest.commits) != known[name] for name, run in found.runs.items())
    return JSONResponse({"changed": changed or bool(found.failed)})


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
        if not is_same(token, self.token):
            return False
        self.token = secrets.token_urlsafe(24)
        self.renewed(self.url)
        return True


class Guard(BaseHTTPMiddleware):
    """Refuse strangers, and set the headers that separate pages from other sites."""

    def __init__(self, app: ASGIApp, *, entrance: Entrance, edits: bool = False) -> None:
        super().__init__(app)
        # With `no-referrer` browsers tell no origin when they send a form.
        self._headers = {**_HEADERS, "Referrer-Policy": "same-origin"} if edits else _HEADERS
        self._entrance, port = entrance, urlsplit(entrance.base).port
        self._hosts = loopback_hosts(port or 80)
        self._cookie = f"holdfast_{port}"  # browsers share cookies between ports

    async def dispatch(self, request: Request, call_next: Next) -> Response:
        """Answer a request, or refuse it."""
        refusal = self._refusal(request)
        response = refusal or await call_next(request)
        if refusal is not None:  # a stranger gets one answer on a connection
            response.headers["Connection"] = "close"
        for name, value in self._headers.items():
            response.headers.setdefault(name, value)
        if not request.url.path.startswith("/static/"):
            response.headers["Cache-Control"] = "no-store"
        return response

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("host", "") not in self._hosts:
            return PlainTextResponse("not a name of this server\n", 421)
        given = request.query_params.get(_TOKEN)
        is_known = is_same(request.cookies.get(self._cookie, ""), self._entrance.session)
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
