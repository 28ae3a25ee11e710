"""One server for each kind of registry, and what a page did wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

import holdfast
from holdfast.registry.store.address import Address
from tests.registry.ui.kinds import make

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

    from holdfast.registry.ui import Server

_LIBRARIES = ("jinja2", "plotly", "starlette", "uvicorn")
_NEEDS_THEM = [
    f"test_{name}.py"
    for name in ("browser", "editing", "page", "questions", "samples", "server", "views")
]
collect_ignore = [] if all(map(find_spec, _LIBRARIES)) else _NEEDS_THEM


@dataclass(frozen=True)
class Site:
    """A running server.

    Attributes:
        server: The server.
        base: Scheme, host and port.
    """

    server: Server
    base: str

    @property
    def url(self) -> str:
        """The URL with the token, which is another one each time that it was used."""
        return self.server.url


@contextmanager
def served(place: object, *, edits: bool = False) -> Iterator[Site]:
    """Serve a registry."""
    from holdfast.registry.ui import Editor, Server, Source

    source = Source.open(Address(place))
    writable = holdfast.open(place) if edits else None
    server = Server(source, editor=None if writable is None else Editor(writable))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield Site(server, f"http://{urlsplit(server.url).netloc}")
    finally:
        server.stop()
        thread.join(300)
        assert not thread.is_alive(), "the server does not end"
        source.close()
        if writable is not None:
            writable.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Site]]:
    """Return the server of a kind of registry; it is made at its first use."""
    known: dict[str, Site] = {}
    with ExitStack() as stack:

        def of(kind: str) -> Site:
            if kind not in known:
                folder = make(kind, tmp_path_factory.mktemp("ui") / kind)
                known[kind] = stack.enter_context(served(folder))
            return known[kind]

        yield of


@dataclass
class Watched:
    """A page of the browser, and everything that it did wrong.

    Attributes:
        page: The page.
        wrong: Errors, violations of the policy, and requests to other places.
    """

    page: Page
    wrong: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fail if anything went wrong."""
        assert self.wrong == []

    def ready(self) -> Page:
        """Wait until the script of the page has run and the visible charts are drawn."""
        self.page.wait_for_selector("html[data-ready]")
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.plot')]"
            ".filter(one => { const at = one.getBoundingClientRect();"
            " return at.top < innerHeight && at.bottom > 0; })"  # a link may lead past a chart
            ".every(one => one.querySelector('.main-svg'))"
        )
        return self.page


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One for a file, so that the large library is fetched and compiled once."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as found:
        yield found


@pytest.fixture
def watched(context: BrowserContext) -> Iterator[Callable[[str], Watched]]:
    """Return a function that opens a page which may ask only this base address."""
    with watch_pages(context) as opened:
        yield opened


@contextmanager
def watch_pages(context: BrowserContext) -> Iterator[Callable[[str], Watched]]:
    """Yield that function; its pages are closed at the end of the block."""
    with ExitStack() as stack:

        def opened(base: str) -> Watched:
            found = Watched(context.new_page())
            stack.callback(found.page.close)
            page, wrong = found.page, found.wrong
            page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
            # Errors of the console are violations of the policy, and answers that are no pages.
            page.on("console", lambda said: _note(said.type, said.text, wrong))
            page.on("request", lambda request: _check(request.url, base, wrong))
            return found

        yield opened


def _note(kind: str, text: str, wrong: list[str]) -> None:
    if kind in ("error", "warning") and "the server responded with a status of 404" not in text:
        wrong.append(f"{kind}: {text}")


def _check(url: str, base: str, wrong: list[str]) -> None:
    if not url.startswith((f"{base}/", "data:", "blob:")) and url != base:
        wrong.append(f"request: {url}")
