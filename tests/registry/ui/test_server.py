"""Who may ask the server, and what its answers forbid."""

from __future__ import annotations

import gc
import http.client
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from holdfast.registry.cli.ui import until_interrupted
from holdfast.registry.ui import serving
from tests.registry.ui.conftest import Site, served
from tests.registry.ui.kinds import make
from tests.support.crowd import crowd

pytestmark = pytest.mark.xdist_group("browser")


def ask(
    site: Site, path: str, *, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    """Return the answer to a request, and its text."""
    place = urlsplit(site.base)
    connection = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=300)
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


def test_a_token_works_once_and_is_not_what_the_cookie_says(ordinary: Site) -> None:
    token = urlsplit(ordinary.url).query
    first, _ = ask(ordinary, f"/?{token}")
    assert first.status == 303
    again, text = ask(ordinary, f"/?{token}")
    assert (again.status, again.headers["set-cookie"]) == (403, None)
    assert "night" not in text
    cookie = first.headers["set-cookie"].partition(";")[0]
    said = cookie.partition("=")[2]
    assert said not in token
    assert ask(ordinary, f"/?token={said}")[0].status == 403
    assert ask(ordinary, "/", Cookie=f"{_cookie_name(ordinary)}={token[6:]}")[0].status == 403
    # The browser that it admitted may follow the same link again; another one gets the next token.
    assert ask(ordinary, f"/?{token}", Cookie=cookie)[0].status == 303
    assert ask(ordinary, f"/?{urlsplit(ordinary.url).query}")[0].status == 303


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
    del site
    gc.collect()  # uvicorn leaves that connection to the collector, which warns


def test_headers_that_never_come_do_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving, "_REQUEST_WITHIN_S", 0.2)
    with served(make("empty", tmp_path / "empty")) as site:
        place = urlsplit(site.base)
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection((place.hostname, place.port), 300) as idle:
                idle.sendall(sent)
                assert idle.recv(1) == b""


def test_ui_serves_until_it_is_interrupted_whoever_connects(tmp_path: Path) -> None:
    """With 128 open files. A stranger opens more idle connections; the owner comes later."""
    command = f"ulimit -n 128; exec {sys.executable} -m holdfast.registry.cli ui --no-browser"
    with (
        subprocess.Popen(
            ["/bin/sh", "-c", f"{command} {make('empty', tmp_path / 'empty')}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        ) as process,
        ExitStack() as strangers,
    ):
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            place = urlsplit(url)
            for _ in range(200):
                there = socket.create_connection((place.hostname, place.port), 300)
                strangers.enter_context(there)
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(url, timeout=300) as answer:
                assert "No runs yet" in answer.read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 0
            assert "stopped" in process.stdout.read()
        finally:
            process.kill()


def test_a_crowd_of_strangers_locks_no_browser_out(ordinary: Site, cookie: str) -> None:
    """Each stranger gets one answer, to the first of its many requests."""
    place = urlsplit(ordinary.base)
    with crowd(place.port or 0, "GET /"):
        assert ask(ordinary, "/static/style.css", Cookie=cookie)[0].status == 200
    assert ask(ordinary, "/", Host="elsewhere")[0].headers["connection"] == "close"


def test_an_interrupt_that_python_swallows_stops_the_server() -> None:
    before, stopped = signal.getsignal(signal.SIGINT), []
    with until_interrupted(lambda: stopped.append(1)):
        with suppress(KeyboardInterrupt):  # as a callback in an import does
            signal.raise_signal(signal.SIGINT)
        assert stopped == [1]
        signal.raise_signal(signal.SIGINT)
        stopped.append(3)
    assert (stopped, signal.getsignal(signal.SIGINT)) == ([1, 1], before)


def test_the_token_is_in_no_process_list(tmp_path: Path) -> None:
    """A browser is given a file that nobody else can read, and that leads to the page."""
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments.new\n'
        f"mv {tmp_path}/arguments.new {tmp_path}/arguments\nread end < {tmp_path}/end\nexit 0\n"
    )
    browser.chmod(0o700)
    os.mkfifo(tmp_path / "end")
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.registry.cli", "ui", make("empty", tmp_path / "empty")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "BROWSER": f"{browser} %s", "DISPLAY": ":0"},
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            (tmp_path / "end").write_text("")  # opens when the browser reads it
            given = (tmp_path / "arguments").read_text().strip()
            assert urlsplit(url).query.partition("=")[2] not in given
            file = Path(unquote(urlsplit(given).path))
            assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (
                0o600,
                0o700,
            )
            assert url in file.read_text()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 0
            assert not file.parent.exists()
        finally:
            process.kill()
