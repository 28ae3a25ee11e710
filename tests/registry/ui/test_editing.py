"""`holdfast ui --edit`: who may write, and what."""

from __future__ import annotations

import base64
import http.client
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import pytest

import holdfast
from holdfast import Registry, Retention
from holdfast.registry.history.actions import RemoveTag, SetLabels, SetNote, SetTag
from tests.registry.ui.conftest import Site, Watched, served
from tests.registry.ui.kinds import EVIL, state

pytestmark = pytest.mark.xdist_group("browser")

#: A picture of 3 x 2 pixels.
_DOT = (
    "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAAAAAC4HznGAAAADklEQVR4nGNo"
    "aGhgAGIADAgDAcWhuYYAAAAASUVORK5CYII="
)
BIDI = "\u202e\u2066"


@pytest.fixture(scope="module")
def reg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder: Path = tmp_path_factory.mktemp("edited") / "reg"
    with holdfast.init(folder, skip_race_probe=True) as found:
        run = found.create_run("night", labels=["first"], retention=Retention(last=1))
        for step in (1, 2):
            run.pins.tags.set("kept", run.save(state(step), step=step))
        stream = found.create_run("other").streams["samples"]
        stream.append({"step": 1, "image": base64.b64decode(_DOT)})
        yield found


@pytest.fixture(scope="module")
def edited(reg: Registry) -> Iterator[Site]:
    with served(reg.url, edits=True) as found:
        yield found


class Person:
    """Somebody whom the server has admitted."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.place = urlsplit(site.base)
        answer, _ = self.ask("GET", f"/?{urlsplit(site.url).query}")
        self._cookie = answer.headers["set-cookie"].partition(";")[0]

    _cookie = ""

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, str]:
        given = {"Cookie": self._cookie, **headers}
        connection = http.client.HTTPConnection(self.place.hostname or "", self.place.port)
        try:
            connection.request(method, path, body, {k: v for k, v in given.items() if v})
            answer = connection.getresponse()
            return answer, answer.read().decode()
        finally:
            connection.close()

    def fetch(self, path: str) -> tuple[bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(self.place.hostname or "", self.place.port)
        try:
            connection.request("GET", path, headers={"Cookie": self._cookie})
            answer = connection.getresponse()
            return answer.read(), answer.headers
        finally:
            connection.close()

    def token(self, run: str) -> str:
        _, page = self.ask("GET", f"/runs/{run}")
        return page.partition('name="token" value="')[2].partition('"')[0]

    def edit(self, act: str, run: str = "night", **form: str) -> tuple[int, str]:
        """Send a form as its page would; `origin` and `token` are those of other pages."""
        origin = form.pop("origin", self._site.base)
        token = form.pop("token") if "token" in form else self.token("night")
        headers = {"Origin": origin, "Content-Type": "application/x-www-form-urlencoded"}
        cookie = {"Cookie": form.pop("cookie")} if "cookie" in form else {}
        body = urlencode({"act": act, "token": token, **form}).encode()
        answer, text = self.ask("POST", f"/runs/{quote(run)}/edit", body, **headers, **cookie)
        return answer.status, text


@pytest.fixture
def person(edited: Site) -> Person:
    return Person(edited)


def test_a_form_writes_and_its_author_is_shown_as_claimed(reg: Registry, person: Person) -> None:
    assert person.edit("note", text="too early")[0] == 400  # nobody has said who writes
    assert "Your name" in person.ask("GET", "/runs/night")[1]
    assert person.edit("author", author="x\u202ey")[0] == 400
    assert person.edit("author", author=" Ana B ")[0] == 303
    hostile = f"it wins {EVIL}\r\nline two {BIDI}"
    assert person.edit("note", text=hostile) == (303, "")
    assert person.edit("note", text="the one", checkpoint="latest")[0] == 303
    assert person.edit("labels", labels="prod  sweep:3")[0] == 303
    assert person.edit("tag", name="paper", checkpoint="night/main/step2")[0] == 303
    assert person.edit("untag", name="kept")[0] == 303
    run = reg.run("night")
    written = {one.checkpoint: one for one in run.history.notes()}
    latest = run.latest()
    assert latest is not None
    assert written[None].text == hostile.replace("\r\n", "\n")
    assert written[latest.handle.n].text == "the one"
    assert {one.author.partition("@")[0] for one in written.values()} == {"Ana B"}
    assert run.manifest.labels_now == ("prod", "sweep:3")
    assert list(run.pins.tags.list()) == ["paper"]
    _, page = person.ask("GET", "/runs/night")
    assert "by Ana B@" in page
    assert "(claimed, not proven)" in page
    assert "<script>hacked" not in page
    shown = page.partition('id="notes"')[2].partition("<details")[0]
    assert "it wins &lt;img src=x" in shown
    assert r"line two \u202e\u2066" in shown
    assert "the one" in person.ask("GET", "/checkpoints/night/latest")[1]
    assert person.edit("note", text="")[0] == 303
    assert [one.text for one in run.history.notes()] == ["the one"]


def test_no_edit_drops_evicts_prunes_or_changes_retention(reg: Registry, person: Person) -> None:
    person.edit("author", author="ana")
    run = reg.run("night")
    before = (run.manifest.commits, run.manifest.spec, len(run.checkpoints()))
    for act in ("drop", "rm", "evict", "prune", "retention", "hold", "status", "", "note\0"):
        status, page = person.edit(act, text="x", name="paper", checkpoint="latest", last="1")
        assert status == 400, act
        assert "not an edit" in page
    edits = {"note": {"text": "n"}, "labels": {"labels": "l"}}
    edits |= {"tag": {"name": "t", "checkpoint": "latest"}, "untag": {"name": "t"}}
    for act, form in edits.items():
        assert person.edit(act, **form)[0] == 303
    run.refresh()
    assert (run.manifest.commits - 4, run.manifest.spec, len(run.checkpoints())) == before
    added = [action for one in list(run.history.commits())[before[0] :] for action in one.actions]
    assert [type(action) for action in added] == [SetNote, SetLabels, SetTag, RemoveTag]


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"origin": ""}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),  # SameSite would let another port's page in
        ({"origin": "http://localhost"}, 403),
        ({"token": ""}, 403),
        ({"token": "é"}, 403),
        ({"run": "other"}, 403),  # with the token of another page
        ({"cookie": ""}, 403),
        ({"text": "x" * 10_001}, 400),
        ({"text": "x" * 50_000}, 413),
        ({"checkpoint": "none"}, 400),
        ({"checkpoint": "../other/latest"}, 404),
    ],
)
def test_what_no_page_of_this_run_sends_is_refused(
    reg: Registry, person: Person, form: dict[str, str], status: int
) -> None:
    person.edit("author", author="ana")
    before = [reg.run(name).manifest.commits for name in ("night", "other")]
    assert person.edit("note", **{"text": "x", **form})[0] == status
    assert [reg.run(name).manifest.commits for name in ("night", "other")] == before
    assert person.ask("GET", "/runs/night/edit?act=note&text=x")[0].status in (404, 405)


def test_without_edit_no_page_has_a_form_that_writes(site: Callable[[str], Site]) -> None:
    found = Person(site("ordinary"))
    _, page = found.ask("GET", "/runs/night")
    assert 'method="post"' not in page
    assert found.edit("author", author="ana", token="")[0] in (404, 405)


def test_a_browser_sends_what_the_server_asks_for(
    reg: Registry, edited: Site, watched: Callable[[str], Watched]
) -> None:
    """With another policy for referrers it would send no origin."""
    watch = watched(edited.base)
    watch.page.goto(edited.url)
    watch.page.goto(f"{edited.base}/runs/other")
    if watch.page.get_by_label("Your name").count():
        watch.page.get_by_label("Your name").fill("bo")
        watch.page.get_by_role("button", name="Begin").click()
    watch.page.get_by_label("note on the run").fill("one\n<b>two</b>")
    watch.page.get_by_role("button", name="Write the note").click()
    watch.page.locator("#notes pre", has_text="<b>two</b>").wait_for()
    assert [one.text for one in reg.run("other").history.notes()] == ["one\n<b>two</b>"]
    image = watch.page.locator(".samples img")  # an attachment, of a policy without anything
    image.scroll_into_view_if_needed()
    assert image.evaluate("one => one.decode().then(() => one.naturalWidth)") == 3
    watch.check()
