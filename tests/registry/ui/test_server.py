"""Who may ask the server, and what its answers forbid."""

from __future__ import annotations

import gc
import http.client
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.registry.ui.conftest import Site, served
from tests.registry.ui.kinds import make

pytestmark = pytest.mark.xdist_group("browser")


def ask(
    site: Site, path: str, *, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    """Return the answer to a request, and its text."""
    place = urlsplit(site.base)
    connection = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def ordinary(site: Callable[[str], Site]) -> Site:
    return site("ordinary")


@pytest.fixture
def cookie(ordinary: Site) -> str:
    """The cookie that the token is exchanged for."""
    answer, _ = ask(ordinary, f"/runs/night?{urlsplit(ordinary.url).query}&log=1")
    assert (answer.status, answer.headers["location"]) == (303, "/runs/night?log=1")
    given = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(given.split("; "))
    return given.partition(";")[0]


def test_the_token_is_exchanged_for_a_cookie_that_no_script_reads(
    ordinary: Site, cookie: str
) -> None:
    answer, text = ask(ordinary, "/", Cookie=cookie)
    assert answer.status == 200
    assert "night-wide" in text
    assert cookie.partition("=")[2] not in text


@pytest.mark.parametrize(
    "path", ["/", "/runs/night", "/changes.json?run=night@1", "/static/app.js"]
)
def test_a_stranger_gets_nothing(ordinary: Site, path: str) -> None:
    for url in (path, f"{path}{'&' if '?' in path else '?'}token=wrong"):
        answer, text = ask(ordinary, url)
        assert answer.status == 403
        assert "night" not in text
    assert ask(ordinary, path, Cookie=f"{_cookie_name(ordinary)}=wrong")[0].status == 403


def _cookie_name(site: Site) -> str:
    return f"holdfast_{urlsplit(site.base).port}"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1"])
def test_another_name_of_the_host_is_refused(ordinary: Site, cookie: str, host: str) -> None:
    answer, text = ask(ordinary, "/", Cookie=cookie, Host=host)
    assert answer.status == 421
    assert "night" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_reading_is_allowed(ordinary: Site, cookie: str, method: str) -> None:
    assert ask(ordinary, "/", method=method, Cookie=cookie)[0].status == 405


@pytest.mark.parametrize("path", ["/", "/none", "/changes.json", "/static/app.js"])
def test_every_answer_keeps_the_pages_apart_from_other_sites(
    ordinary: Site, cookie: str, path: str
) -> None:
    headers = ask(ordinary, path, Cookie=cookie)[0].headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_a_redirect_never_leads_to_another_server(ordinary: Site) -> None:
    token = urlsplit(ordinary.url).query
    answer, _ = ask(ordinary, f"//evil.example/x?{token}")
    assert answer.headers["location"] == "/evil.example/x"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/runs/none", 404), ("/runs/..%2f..", 404), ("/?count=-1", 400), ("/none", 404),
     ("/static/../server.py", 404), ("/static/%2e%2e/server.py", 404),
     ("/runs/none/lineage", 404)],
)  # fmt: skip
def test_what_is_wrong_is_said_on_a_page(
    ordinary: Site, cookie: str, path: str, status: int
) -> None:
    answer, text = ask(ordinary, path, Cookie=cookie)
    assert answer.status == status
    assert "import " not in text


def test_changes_say_whether_a_run_has_grown(ordinary: Site, cookie: str) -> None:
    for known, changed in (("night@1", "true"), ("none@1", "true")):
        _, text = ask(ordinary, f"/changes.json?run={known}", Cookie=cookie)
        assert text == f'{{"changed":{changed}}}'
    _, page = ask(ordinary, "/runs/night", Cookie=cookie)
    known = page.partition("{&#34;night&#34;: ")[2].partition("}")[0]
    _, text = ask(ordinary, f"/changes.json?run=night@{known}", Cookie=cookie)
    assert text == '{"changed":false}'


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_browser_that_stops_to_read_does_not_keep_the_server(tmp_path: Path) -> None:
    with socket.socket() as browser, served(make("ordinary", tmp_path / "ordinary")) as site:
        place = urlsplit(site.base)
        answer, _ = ask(site, f"/?{urlsplit(site.url).query}")
        cookie = answer.headers["set-cookie"].partition(";")[0]
        browser.connect((place.hostname, place.port))
        path = "/static/plotly.min.js"  # more than a connection holds
        browser.sendall(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n".encode())
        browser.sendall(f"Cookie: {cookie}\r\n\r\n".encode())
        assert browser.recv(12) == b"HTTP/1.1 200"
        # `served` asserts that the server ends, here beside an answer that nobody reads.
    gc.collect()  # uvicorn leaves that connection to the collector, which warns
