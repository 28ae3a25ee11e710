"""The site is built strictly, and opens without a server and without a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest
import yaml

from tests.support.pages import ROOT, blocks

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_SCRIPT = ROOT / "scripts" / "build_site.py"

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the script that builds it for people."""
    for module in ("zensical", "mkdocstrings", "markdown_svgbob"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'holdfast-registry[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder / "site"


class Page(HTMLParser):
    """A page of the site: its anchors, what it links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe") and "src" in given:
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given["href"])


class Pages:
    """All pages of a site but that of a server's error."""

    def __init__(self, site: Path) -> None:
        self.site = site

    @cached_property
    def all(self) -> dict[Path, Page]:
        found = (path for path in sorted(self.site.rglob("*.html")) if path.name != "404.html")
        return {path: Page(path) for path in found}

    def dead(self) -> Iterator[str]:
        """Yield each link and load that leads nowhere."""
        for page in self.all.values():
            for address in [*page.links, *page.loads]:
                if "://" not in address and not self._leads(page, address):
                    yield f"{page.path.relative_to(self.site)}: {address}"

    def _leads(self, page: Page, address: str) -> bool:
        path, _, anchor = unquote(address).partition("#")
        target = (page.path.parent / path.partition("?")[0]).resolve() if path else page.path
        if target in self.all:
            return not anchor or anchor in self.all[target].anchors
        return target.is_file()


def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Also in the texts of docstrings, which the generator does not look at."""
    pages = Pages(site)
    assert list(pages.dead()) == []
    assert {load for page in pages.all.values() for load in page.loads if "//" in load} == set()
    assert len(pages.all) > 90


def test_the_diagrams_of_the_concepts_are_drawn_from_their_text(site: Path) -> None:
    page = site / "docs" / "concepts.html"
    drawings = [load for load in Page(page).loads if load.endswith(".svg")]
    texts = [block.text for block in blocks(ROOT / "docs" / "concepts.md")]
    assert len(drawings) == len(texts) == 2
    for drawing, text in zip(drawings, texts, strict=True):
        drawn = ET.parse(page.parent / drawing)
        words = "".join(one.text or "" for one in drawn.iter("{http://www.w3.org/2000/svg}text"))
        kept = r"[^\w/()\".:;,]"  # letters; what is left are lines and arrows
        assert Counter(re.sub(kept, "", words)) == Counter(re.sub(kept, "", text))


def test_a_dead_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text('<a href="two.html#here"><a href="#no"><img src="no.png">')
    (tmp_path / "two.html").write_text('<p id="here"><a href="one.html"><a href="three.html">')
    dead = ["one.html: #no", "one.html: no.png", "two.html: three.html"]
    assert list(Pages(tmp_path).dead()) == dead


def test_every_page_has_a_place_in_the_navigation() -> None:
    spec = importlib.util.spec_from_file_location("build_site", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = {str(page.relative_to(ROOT)) for page in module.Pages(ROOT, Path()).own()}
    settings = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())
    listed = list(_leaves(settings["nav"]))
    assert sorted(listed) == sorted(own), "docs/site/mkdocs.yml lists each page once, under `nav`"


def _leaves(entry: object) -> Iterator[str]:
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, list):
        for one in entry:
            yield from _leaves(one)
    else:
        yield str(entry)


def test_it_opens_from_the_disk_and_its_search_works(site: Path, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    try:
        page.goto((site / "index.html").as_uri())
        assert page.locator("h1").inner_text().startswith("Holdfast")
        page.get_by_role("link", name="Researcher", exact=True).first.click()
        assert "For researchers" in page.locator("h1").inner_text()
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="Search").first.click()
        box = page.get_by_role("combobox", name="Search")
        box.press_sequentially("OpponentPool")
        assert box.input_value() == "OpponentPool"
        page.get_by_role("option", name="OpponentPool").first.click()
        page.wait_for_url("**/docs/reference/results.html*")
        assert (
            page.locator("[id='holdfast.registry.curation.pool.league.OpponentPool.draw']").count()
            == 1
        )
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
        assert wrong == []
    finally:
        page.close()


@pytest.mark.parametrize(("page", "absent"), [("run", "Run"), ("results", "Releases")])
def test_the_reference_shows_no_constructor_that_nobody_may_call(
    site: Path, page: str, absent: str
) -> None:
    shown = (site / f"docs/reference/{page}.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", shown)
    assert not re.search(rf"\b{absent}\s*\(\s*\w+:", text)
    rules = re.sub(r"<[^>]+>", "", (site / "docs/reference/rules.html").read_text(encoding="utf-8"))
    assert re.search(r"\bMonitor\s*\(\s*\*", rules) or re.search(r"\bMonitor\s*\(", rules)
