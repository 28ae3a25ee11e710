"""The page that is written to a file, and the commands `ui` and `page`."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import holdfast
from holdfast.backends import open_backend
from holdfast.backends.s3.backend import S3Backend
from holdfast.backends.testing import keys_of
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
    page.get_by_label("log y axis").first.check()
    assert "log=1" in page.url
    assert page.evaluate("() => typeof hacked") == "undefined"
    if kind == "hostile":
        assert page.get_by_text(EVIL, exact=True).count() >= 2
    watch.check()


def test_links_of_a_page_lead_to_its_own_parts(tmp_path: Path) -> None:
    make("ordinary", tmp_path / "reg")
    file = tmp_path / "page.html"
    assert invoke("page", "night*", "-r", tmp_path / "reg", "--to", file).exit_code == 0
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


def report(tmp_path: Path, *arguments: object, kind: str = "ordinary") -> Path:
    """Write a report about two runs, and return its file."""
    make(kind, tmp_path / "reg")
    file = tmp_path / "report.html"
    runs = ("night", "night-wide")
    done = invoke("page", *runs, "-r", tmp_path / "reg", "--to", file, *arguments)
    assert done.exit_code == 0, done.output
    assert "whoever can read it sees names, configurations, metrics and notes" in done.stderr
    return file


class _Outline(HTMLParser):
    """Attributes: the parts of a report, each with whether it is open; links of its contents."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[tuple[str, bool]] = []
        self.contents: list[str] = []
        self._within = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "details" and given.get("class") == "part":
            self.parts.append((given["id"] or "", "open" in given))
        self._within |= tag == "nav" and given.get("class") == "contents"
        if tag == "a" and self._within:
            self.contents.append(given["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._within &= tag != "nav"


@pytest.mark.parametrize("kind", ["ordinary", "damaged"])
def test_a_report_has_the_runs_side_by_side_first_and_names_no_path_of_the_author(
    tmp_path: Path, kind: str
) -> None:
    text = report(tmp_path, kind=kind).read_text()
    outline = _Outline(text)
    assert outline.parts[0] == ("side_by_side", True)
    assert [name for name, is_open in outline.parts if is_open] == ["side_by_side"]
    anchors = [f"#{name}" for name, _ in outline.parts]
    assert list(dict.fromkeys(outline.contents)) == anchors
    assert "diff-1" in dict(outline.parts)  # the best and the latest of a run
    assert str(tmp_path) not in text
    assert "holdfast.open(&#39;reg&#39;)" in text


def test_a_report_compares_what_was_asked(tmp_path: Path) -> None:
    asked = ("--compare", "night/best", "night-wide/latest")
    text = report(tmp_path, *asked, "--title", "Wide <b>wins</b>").read_text()
    assert [name for name, _ in _Outline(text).parts if "diff" in name] == ["diff"]
    assert "<h1>Wide &lt;b&gt;wins&lt;/b&gt;</h1>" in text
    assert "night/main/step00000070 and night-wide/main/step00000090" in text
    file = tmp_path / "none.html"
    options = ("-r", tmp_path / "reg", "--to", file)
    assert invoke("page", "night", *options, "--compare", "night/best", "gone").exit_code == 4
    assert not file.exists()


def test_a_note_is_markdown_without_html_pictures_and_other_links(tmp_path: Path) -> None:
    note = tmp_path / "note.md"
    note.write_text(
        f"# Why\n\nIt *wins*: [paper](https://example.org/x). {EVIL}\n\n"
        "[a](javascript:hacked=1) [b](data:text/html,x) [c](file:///etc/passwd) [d](//example.org)"
        "\n\n![plot](https://example.org/x.png) ![p](data:image/png;base64,AA==)\n\n"
        "<https://example.org/y> <mailto:a@example.org>\n\nraw \u202e, entity &#x2066;, "
        "`code \u2067`, [z\u202d](https://example.org/z 'title &#8237;')\n"
    )
    title = "Title \u2068"
    text = report(tmp_path, "--note", note, "--title", title).read_text()
    said = re.search(r'<div class="prose">(.*?)</div>', text, re.DOTALL)
    assert said is not None
    assert "<h2>Why</h2>" in said[1]
    assert "<em>wins</em>" in said[1]
    assert set(re.findall(r"<(\w+)", said[1])) == {"h2", "p", "em", "a", "code"}
    links = re.findall(r'href="([^"]*)"', said[1])
    assert links == [f"https://example.org/{end}" for end in ("x", "x.png", "y", "z")]
    assert not re.findall("[\u202a-\u202e\u2066-\u2069]", text)
    assert "<h1>Title \\u2068</h1>" in text
    for shown in (r"raw \u202e", r"entity \u2066", r"code \u2067", r"z\u202d", r"title \u202d"):
        assert shown in said[1]
    note.write_bytes(b"\xff")
    options = ("-r", tmp_path / "reg", "--to", tmp_path / "x.html", "--note", note)
    assert invoke("page", "night", *options).exit_code == 3
    note.write_text("x" * (2**20 + 1))
    assert invoke("page", "night", *options).exit_code == 3
    assert not (tmp_path / "x.html").exists()


def test_a_link_of_the_contents_opens_its_part(
    watched: Callable[[str], Watched], tmp_path: Path
) -> None:
    note = tmp_path / "note.md"
    note.write_text(f"{EVIL} ![x](https://example.org/x.png)")
    file = report(tmp_path, "--note", note)
    watch = watched(file.as_uri())
    watch.page.goto(file.as_uri())
    page = watch.ready()
    heading = page.get_by_text("Get it").first
    assert not heading.is_visible()
    page.locator(".contents a", has_text="Checkpoint").first.click()
    heading.wait_for(state="visible")
    assert page.evaluate("() => typeof hacked") == "undefined"
    page.wait_for_selector("#checkpoint-1-treemap .main-svg")
    watch.check()


def test_a_site_opens_from_the_disk_and_its_scripts_are_pinned(
    watched: Callable[[str], Watched], tmp_path: Path
) -> None:
    make("ordinary", tmp_path / "reg")
    site = tmp_path / "deep" / "site"
    for _ in range(2):  # the second one renews the pages of the first
        done = invoke("page", "-r", tmp_path / "reg", "--site", site, "--title", "Team")
        assert done.exit_code == 0, done.output
    names = {"index.html", *(f"run-{name}.html" for name in ("night", "night-wide", "soup"))}
    assert {one.name for one in site.iterdir()} == names
    for file in site.iterdir():
        page = file.read_text()
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
        assert policy is not None
        rules = dict(rule.split(maxsplit=1) for rule in unescape(policy[1]).split("; "))
        assert rules["default-src"] == "'none'"
        sources = {f"'sha256-{_sha256(one)}'" for one in re.findall(_SCRIPT, page, re.DOTALL)}
        assert set(rules["script-src"].split()) == sources
        assert len(sources) == 2
        assert str(tmp_path) not in page
    index = (site / "index.html").as_uri()
    watch = watched(site.as_uri())
    watch.page.goto(index)
    page = watch.ready()
    page.locator("#side_by_side th a", has_text="night-wide").click()
    watch.ready()
    assert page.url == (site / "run-night-wide.html").as_uri()
    page.get_by_role("link", name="all runs").click()
    assert page.url == index
    watch.check()


_SCRIPT = r"<script>(.*?)</script>"


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_a_site_is_never_written_into_a_registry_or_over_another_one(tmp_path: Path) -> None:
    reg = make("ordinary", tmp_path / "reg")
    (tmp_path / "link").symlink_to(reg / "runs")
    before = sorted(reg.rglob("*"))
    for place in (reg, reg / "site", reg / "runs" / "x", tmp_path / "link" / "site"):
        done = invoke("page", "-r", reg, "--site", place)
        assert done.exit_code == 3
        assert "a registry is there" in done.output
    assert sorted(reg.rglob("*")) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.html").write_text("mine")
    assert invoke("page", "night", "-r", reg, "--site", other).exit_code == 5
    assert [one.read_text() for one in other.iterdir()] == ["mine"]
    assert invoke("page", "night", "-r", reg, "--site", other, "--force").exit_code == 0
    assert invoke("page", "night", "-r", reg, "--site", "memory://x").exit_code == 3
    assert invoke("page", "night", "-r", reg).exit_code == 3
    assert invoke("page", "-r", reg, "--to", tmp_path / "x.html").exit_code == 3


def test_a_site_in_a_bucket_is_shown_as_pages(tmp_path: Path, moto_url: Callable[[], str]) -> None:
    make("ordinary", tmp_path / "reg")
    url = moto_url()
    done = invoke("page", "night", "-r", tmp_path / "reg", "--site", f"{url}/site")
    assert done.exit_code == 0, done.output
    backend = open_backend(f"{url}/site")
    assert isinstance(backend, S3Backend)
    assert keys_of(backend) == ["index.html", "run-night.html"]
    head = backend._client().head_object(**backend._object("index.html"))
    assert head["ContentType"] == "text/html; charset=utf-8"
    holdfast.init(f"{url}/registry")
    done = invoke("page", "night", "-r", tmp_path / "reg", "--site", f"{url}/registry/a/site")
    assert done.exit_code == 3
    assert f"{url}/registry: a registry is there" in done.output
