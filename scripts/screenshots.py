"""Screenshots of every view of `holdfast ui` on one registry: the work of scripts/screenshots."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

from holdfast.registry.store.address import Address
from holdfast.registry.ui import Server, Source
from holdfast.registry.ui.pages import VIEWS
from holdfast.registry.ui.server import link

ROOT = Path(__file__).parents[1]
#: Width and colour scheme.
WINDOWS = tuple((width, scheme) for width in (1440, 1280, 390) for scheme in ("light", "dark"))
#: The picture of the README.
PICTURE = ROOT / "docs" / "images" / "run.png"


def paths(source: Source) -> Iterator[tuple[str, str]]:
    """Yield every view that can be shown, with a path of it."""
    runs = [name for name in source.names() if source.run(name).latest() is not None]
    refs = [one.ref for one in source.run(runs[0]).checkpoints()[-2:]]
    yield "diff", link("diff", before=refs[0], after=refs[-1], values="1") or ""
    for view in VIEWS:
        parts = list(view.parts(source, runs[:4]))
        if parts:
            yield view.name, link(view.name, **parts[0].path, **parts[0].query) or ""
        elif "{" not in view.path and view.name != "diff":
            yield view.name, view.path


def opened(page: Page, url: str) -> None:
    """Open a view and let it draw everything."""
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_function("() => !document.body.dataset.following.includes('\"partial\": true')")
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.plot')].every(one => one.querySelector('.main-svg'))"
    )


def take(browser: Browser, server: Server, source: Source, folder: Path) -> None:
    """Take all of them."""
    base = f"http://{urlsplit(server.url).netloc}"
    wanted = list(paths(source))
    for width, scheme in WINDOWS:
        size = {"width": width, "height": 860}
        context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        page = context.new_page()
        page.goto(server.url)
        for name, path in wanted:
            opened(page, base + path)
            file = folder / f"{name}-{width}-{scheme}.png"
            page.screenshot(path=file, full_page=True)
            print(file)
            if (name, width, scheme) == ("run", 1280, "light"):
                take_picture(page)
        context.close()


def take_picture(page: Page) -> None:
    """Take the picture of the README; it names no folder of this machine."""
    page.evaluate("() => document.querySelector('.place').textContent = 'holdfast-demo/registry'")
    PICTURE.parent.mkdir(exist_ok=True)
    page.set_viewport_size({"width": 1280, "height": 1180})
    page.screenshot(path=PICTURE)
    page.set_viewport_size({"width": 1280, "height": 860})


def main() -> None:
    """Serve the registry, and take the screenshots."""
    given = sys.argv[1:]
    place = Path(given[0]) if given else ROOT / "holdfast-demo" / "registry"
    folder = Path(given[1]) if given[1:] else ROOT / "holdfast-demo" / "screenshots"
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium is not installed (Debian package chromium)")
    folder.mkdir(parents=True, exist_ok=True)
    source = Source.open(Address(place))
    server = Server(source)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
            take(browser, server, source, folder)
    finally:
        server.stop()
        thread.join()
        source.close()


if __name__ == "__main__":
    main()
