"""The page that is written to a file, and the commands `ui` and `page`."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.registry.ui.conftest import Watched
from tests.registry.ui.kinds import EVIL, make
from tests.support.commands import invoke

pytestmark = pytest.mark.xdist_group("browser")


class _Ids(HTMLParser):
    """Attributes: `ids` and `links` of a page, and the scripts that browsers run."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"] or "")
        if tag == "a":
            self.links.append(given.get("href") or "")
        self.scripts += tag == "script" and "type" not in given


@pytest.mark.parametrize(
    "kind", ["ordinary", "hostile", pytest.param("damaged", marks=pytest.mark.soak)]
)
def test_a_page_opens_offline_and_asks_for_nothing(
    watched: Callable[[str], Watched], tmp_path: Path, kind: str
) -> None:
    make(kind, tmp_path / "reg")
    file = tmp_path / "page.html"
    done = invoke("page", "night", "night-wide", "-r", tmp_path / "reg", "--to", file)
    assert done.exit_code == 0, done.output
    watch = watched(file.as_uri())
    watch.page.goto(file.as_uri())
    page = watch.ready()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_label("log scale").first.check()
    assert "log=1" in page.url
    assert page.evaluate("() => typeof hacked") == "undefined"
    if kind == "hostile":
        assert page.get_by_text(EVIL, exact=True).count() >= 2
    watch.check()


def test_links_of_a_page_lead_to_its_own_parts(tmp_path: Path) -> None:
    make("ordinary", tmp_path / "reg")
    file = tmp_path / "page.html"
    assert (
        invoke("page", "night", "night-wide", "-r", tmp_path / "reg", "--to", file).exit_code == 0
    )
    parts = _Ids()
    parts.feed(file.read_text())
    assert len(parts.ids) == len(set(parts.ids))
    assert {link for link in parts.links if link != "#"} <= {f"#{one}" for one in parts.ids}
    assert parts.scripts == 2  # Plotly's once, and ours
    assert not re.search(r">\d+ (s|min|h|d)</time>", file.read_text())  # an age would soon be wrong


def test_a_file_is_replaced_only_by_force_and_a_missing_run_writes_none(tmp_path: Path) -> None:
    make("ordinary", tmp_path / "reg")
    file = tmp_path / "page.html"
    assert invoke("page", "none", "-r", tmp_path / "reg", "--to", file).exit_code == 4
    assert not file.exists()
    file.write_text("mine")
    assert invoke("page", "night", "-r", tmp_path / "reg", "--to", file).exit_code == 3
    assert file.read_text() == "mine"
    forced = invoke("page", "night", "-r", tmp_path / "reg", "--to", file, "--force")
    assert forced.exit_code == 0
    assert "night" in file.read_text()
