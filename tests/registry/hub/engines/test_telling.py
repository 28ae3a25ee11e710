"""Which URLs are asked, what is taken as an answer, and the keys."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidInput, RegistryError
from holdfast.registry.hub.engines import FollowedVersion, key_of, telling
from holdfast.registry.hub.engines.telling import Engine, engines_at

VERSION = FollowedVersion(
    folder="/models/1", run="llm", ref="llm/main/step1", id="ab" * 32, phase="main", step=1, n=1
)


def at(url: str, notify: str = "sglang", key: str | None = None) -> Engine:
    (engine,) = engines_at(notify, [url], key, "wait", 0.5)
    return engine


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://127.0.0.1/x", "not the URL of an engine"),
        ("file:///etc/passwd", "not the URL of an engine"),
        ("127.0.0.1:30000", "not the URL of an engine"),
        ("http://", "not the URL of an engine"),
        ("http://127.0.0.1:99999", "not the URL of an engine"),
        ("http://127.0.0.1:1/?next=x", "not the URL of an engine"),
        ("http://127.0.0.1:1/#x", "not the URL of an engine"),
        ("http://127.0.0.1:1/a b", "not the URL of an engine"),
        ("http://a..b:1", "not the URL of an engine"),
        (f"http://{'a' * 64}.example", "not the URL of an engine"),
        ("http://127.0.0.1:1/\r\nHost: x", "not the URL of an engine"),
        ("http://me:s3cret@127.0.0.1:1", "a user or password in it"),
        ("http://169.254.169.254", "a link-local address"),
        ("http://[fe80::1]:80", "a link-local address"),
        ("http://[::ffff:169.254.169.254]", "a link-local address"),
        ("http://2852039166", "a link-local address"),  # 169.254.169.254 as one number
    ],
)
def test_these_urls_are_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        at(url)
    assert "s3cret" not in str(caught.value)


def test_vllm_is_told_only_on_private_networks() -> None:
    with pytest.raises(InvalidInput, match="its requests can run anything"):
        at("http://8.8.8.8:8000", "vllm")
    assert at("http://8.8.8.8:8000").name == "http://8.8.8.8:8000"
    assert at("http://10.1.2.3:8000", "vllm").name == "http://10.1.2.3:8000"
    with pytest.raises(InvalidInput, match="no such engine"):
        at("http://127.0.0.1", "tgi")


def test_a_name_that_leads_to_a_link_local_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(InvalidInput, match="a link-local address"):
        at("http://engine.example")


Answering = Callable[[Callable[[Any], object]], str]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts a server that answers every request by a call."""
    servers = []

    def start(answer: Callable[[Any], object]) -> str:
        class Handler(BaseHTTPRequestHandler):
            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answer_with(status: int, body: bytes, **headers: str) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.rfile.read(int(handler.headers.get("content-length", 0)))
        handler.send_response(status)
        for name, text in headers.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_name_that_leads_elsewhere_later_is_asked_nothing(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    engine = at(answering(lambda handler: asked.append(handler.path)))
    monkeypatch.setattr(telling, "ip_address", lambda text: IPv4Address("169.254.169.254"))
    with pytest.raises(InvalidInput, match="a link-local address"):
        engine.tell(VERSION)
    assert asked == []


@pytest.mark.parametrize("at_byte", [0, 80])  # of the head, and of the body
def test_an_answer_that_drips_is_given_up(answering: Answering, at_byte: int) -> None:
    """It is right and ends some time; no pause in it is as long as the time for all of it."""
    body = b'{"weight_version": "1"}'
    whole = b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%s"
    data, gone = whole % (len(body), body), threading.Event()

    def answer(handler: Any) -> None:
        with suppress(OSError):
            handler.wfile.write(data[:at_byte])
            for at in range(at_byte, len(data)):
                handler.wfile.write(data[at : at + 1])
                gone.wait(0.1)

    with pytest.raises(RegistryError, match=r"no whole answer within 0\.5 s"):
        at(answering(answer)).tell(VERSION)
    gone.set()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (307, b"", r"status 307\. Redirects are not followed"),
        (200, b"<html>", "status 200"),
        (200, b'{"success": "yes"}', "status 200"),
        (200, b"[" * 10_000, "status 200"),
        (
            400,
            b'{"success": false, "message": "no\\u001b[31m key s3cret"}',
            r"no\\x1b\[31m key \*\*\*",
        ),
        (200, b" " * (2**20 + 1), "the answer is too long"),
    ],
)
def test_these_answers_confirm_nothing(
    answering: Answering, status: int, body: bytes, said: str
) -> None:
    asked: list[str] = []

    def answer(handler: Any) -> None:
        asked.append(handler.path)
        answer_with(status, body, location="/elsewhere")(handler)

    with pytest.raises(RegistryError, match=said) as caught:
        at(answering(answer), key="s3cret").tell(VERSION)
    assert asked == ["/update_weights_from_disk"]
    assert "s3cret" not in str(caught.value)


def test_a_key_that_comes_back_as_a_status_is_not_repeated(answering: Answering) -> None:
    def echo(handler: Any) -> None:
        handler.wfile.write(f"HTTP/1.1 {handler.headers['Authorization']}\r\n\r\n".encode())

    with pytest.raises(RegistryError, match=r"BadStatusLine.*Bearer \*\*\*"):
        at(answering(echo), key="s3cret").loaded()


def test_silence_ends(answering: Answering) -> None:
    over = threading.Event()
    engine = at(answering(lambda handler: over.wait(60)))
    try:
        with pytest.raises(RegistryError, match="the engine does not answer"):
            engine.tell(VERSION)
    finally:
        over.set()


def test_a_vllm_without_its_developer_mode_says_so(answering: Answering) -> None:
    with pytest.raises(RegistryError, match="VLLM_SERVER_DEV_MODE=1"):
        at(answering(answer_with(404, b"")), "vllm").tell(VERSION)


def test_an_engine_that_cannot_say_its_version_is_not_asked_twice(answering: Answering) -> None:
    assert at(answering(answer_with(404, b""))).loaded() is None
    assert at(answering(answer_with(404, b"")), "vllm").loaded() is None


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_ENGINE_KEY", raising=False)
    assert key_of(None) is None
    monkeypatch.setenv("HOLDFAST_ENGINE_KEY", "from there")
    assert key_of(None) == "from there"
    (tmp_path / "key").write_text("from a file\nanother line\n")
    assert key_of(tmp_path / "key") == "from a file"
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidInput, match="no key"):
        key_of(tmp_path / "empty")
    with pytest.raises(InvalidInput, match="the key cannot be read"):
        key_of(tmp_path / "absent")
    with pytest.raises(InvalidInput, match="no header can hold") as caught:
        at("http://127.0.0.1:1", key="s3\ncret")
    assert "cret" not in str(caught.value)
