"""No request waits for ever: servers that trickle, or say nothing, are given up and told of.

Nothing here depends on how fast a machine is: a server that never ends is always too slow, and the
deadlines are short. What is asserted is the error, and that the server saw the connection end.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from holdfast.backends import ByteRange, InvalidLocation, StoreUnavailable, parse, waiting
from holdfast.backends.patience import Patience, patience_of_environment
from holdfast.backends.s3.backend import S3Backend
from holdfast.backends.waiting import Wait
from tests.servers.fixtures import S3Server

# A sixth of the deadline while nothing was ever answered, and a third of that for each attempt.
PATIENCE = Patience(attempts=2, deadline_s=1.8, first_s=0.001)
OBJECT = (
    b"HTTP/1.1 206 Partial Content\r\n"
    b'ETag: "0123456789abcdef0123456789abcdef"\r\nContent-Length: 1000000\r\n'
    b"Content-Range: bytes 0-999999/1000000\r\n\r\n"
)
LISTING = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n<ListBucketResult>"

Serve = Callable[[socket.socket, "Trickler"], None]


class Trickler:
    """A server that takes every connection to one function, and counts those that ended."""

    def __init__(self, serve: Serve, tls: ssl.SSLContext | None = None) -> None:
        self.stopped = threading.Event()
        self.ended = threading.Semaphore(0)
        self._serve = serve
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if self._tls is None:
                self._serve(connection, self)
            else:
                with self._tls.wrap_socket(connection, server_side=True) as covered:
                    self._serve(covered, self)
        self.ended.release()

    def trickle(self, connection: socket.socket) -> None:
        """Send a byte now and then until the other side is gone."""
        while True:
            connection.sendall(b"a")
            time.sleep(0.01)

    def stop(self) -> None:
        self.stopped.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def silent(connection: socket.socket, _: Trickler) -> None:
    while connection.recv(65536):
        pass


def no_headers(connection: socket.socket, server: Trickler) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    server.trickle(connection)


def slow_body(connection: socket.socket, server: Trickler) -> None:
    asked = connection.recv(65536)
    connection.sendall(LISTING if b"list-type" in asked else OBJECT)
    server.trickle(connection)


def slow_upload(connection: socket.socket, server: Trickler) -> None:
    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while connection.recv(1):
        if server.stopped.wait(0.01):
            # It sees the end only behind what the kernel still holds.
            silent(connection, server)
            return


def slow_continue(connection: socket.socket, server: Trickler) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 100 Continue\r\nX-Long: ")
    server.trickle(connection)


def broken_continue(connection: socket.socket, _: Trickler) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 100 Continue\r\nX-Cut: ")


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Serve], tuple[Trickler, S3Backend]]]:
    made: list[tuple[Trickler, S3Backend]] = []

    def make(how: Serve) -> tuple[Trickler, S3Backend]:
        server = Trickler(how)
        S3Server(server.url, "key", "secret").set_environment(monkeypatch)
        backend = S3Backend(parse("s3://bucket/x"), PATIENCE)
        backend._client()  # or making it may take the time that the server is given
        made.append((server, backend))
        return made[-1]

    yield make
    for server, backend in made:
        backend.close()
        server.stop()


def get_into(backend: S3Backend) -> None:
    backend.get("a", ByteRange(0, 1_000_000), into=[memoryview(bytearray(1_000_000))])


CALLS: dict[str, Callable[[S3Backend], object]] = {
    "get": lambda b: b.get("a", ByteRange(0, 1_000_000)),
    "get into": get_into,
    "list": lambda b: list(b.list()),
    "stat": lambda b: b.stat("a"),
    "put": lambda b: b.put("a", b"x"),
    # More than the kernel takes off our hands.
    "put large": lambda b: b.put("a", bytes(20_000_000)),
    "delete": lambda b: b.delete("a"),
}


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *((silent, name) for name in CALLS),
        *((no_headers, name) for name in ("get", "put", "list", "stat")),
        *((slow_body, name) for name in ("get", "get into", "list")),
        (slow_upload, "put large"),
        (slow_continue, "put large"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_slow_server_is_given_up(
    serve: Callable[[Serve], tuple[Trickler, S3Backend]], how: Serve, name: str
) -> None:
    server, backend = serve(how)
    with pytest.raises(StoreUnavailable) as caught:
        CALLS[name](backend)
    told = str(caught.value)
    assert "s3://bucket/x/" in told
    # A socket's own timeout may come first where nothing comes at all.
    assert "does not answer, or answers too slowly" in told or (how is silent and "imeout" in told)
    assert ("write was done" in told) == ("put" in name or name == "delete")
    server.stopped.set()
    assert server.ended.acquire(timeout=300), "the server sees the end of the connection"


def test_slow_server_behind_tls_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    server = Trickler(slow_body, certified(tmp_path))
    S3Server(server.url, "key", "secret").set_environment(monkeypatch)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "pem"))
    backend = S3Backend(parse("s3://bucket/x"), PATIENCE)
    try:
        for name in ("get", "get into", "list"):
            with pytest.raises(StoreUnavailable, match="does not answer, or answers too slowly"):
                CALLS[name](backend)
            assert server.ended.acquire(timeout=300)
    finally:
        backend.close()
        server.stop()


def certified(folder: Path) -> ssl.SSLContext:
    """Return the server side of TLS for this machine; its certificate is in `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ip_address("127.0.0.1"))
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pem")
    return context


def test_answer_that_ends_within_continue_is_no_endless_loop(
    serve: Callable[[Serve], tuple[Trickler, S3Backend]],
) -> None:
    _, backend = serve(broken_continue)
    with pytest.raises(StoreUnavailable):
        backend.put("a", bytes(100_000))


def test_one_line_says_what_is_waited_for(
    serve: Callable[[Serve], tuple[Trickler, S3Backend]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(waiting, "TELL_AFTER_S", 0.01)
    monkeypatch.setattr(waiting._watchdog, "_silent_until_s", 0.0)
    _, backend = serve(silent)

    def ask(_: int) -> None:
        with suppress(StoreUnavailable):
            backend.get("registry.json")

    with caplog.at_level(logging.WARNING, "holdfast"):
        asking = [threading.Thread(target=ask, args=(n,)) for n in range(5)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("holdfast", logging.WARNING)
    assert record.getMessage().startswith(
        "s3://bucket/x/registry.json: waiting for the store (get)"
    )
    assert "HOLDFAST_S3_TIMEOUT" in record.getMessage()


class Line:
    """A connection that only counts how often it was cut."""

    cuts = 0

    def cut(self, wait: Wait) -> None:
        self.cuts += 1


def test_bytes_that_flow_are_waited_for() -> None:
    patience = Patience(deadline_s=30, least_bytes_per_s=100)
    wait = Wait("get", "s3://b/a", patience, limit="X", size_bytes=100_000)
    line = Line()
    with wait.attempt():
        wait.hold(line)
        now_s = wait._began_s
        for _ in range(60):
            now_s += 10
            wait.moved(1_050)
            assert wait.check(now_s + 0.01) == (pytest.approx(now_s, abs=11), "")
        assert line.cuts == 0, "twenty times the deadline, and enough bytes in each third of it"
        due_s, told = wait.check(now_s + 11)
        assert "this request is stopped after 1030 s (X)" in told
        assert (line.cuts, due_s < now_s + 12) == (1, True)
        assert wait.check(now_s + 12)[1] == "", "told once"
        assert line.cuts == 2, "cut again until it has ended"
    with wait.attempt():
        wait.hold(line)
        wait.moved(10**9)
        wait.check(wait._began_s + 1031)
    assert line.cuts == 3, "no rate outlives the deadline of the whole"
    assert math.isinf(wait.check(now_s)[0]), "between attempts there is nothing to cut"


def test_connection_of_another_call_is_not_cut(
    serve: Callable[[Serve], tuple[Trickler, S3Backend]],
) -> None:
    server, backend = serve(silent)
    session = backend._client()._endpoint.http_session  # type: ignore[attr-defined]
    pool = session._manager.connection_from_url(server.url)
    connection = pool.ConnectionCls("127.0.0.1", int(server.url.rpartition(":")[2]))
    connection.connect()
    connection.cut(Wait("get", "s3://b/a", Patience(), limit="X"))
    connection.sock.sendall(b"x")
    connection.close()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
@pytest.mark.parametrize("name", ["HOLDFAST_S3_TIMEOUT", "HOLDFAST_S3_LEAST_RATE"])
def test_environment_is_checked(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidLocation, match=name):
        patience_of_environment()


def test_environment_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "7.5")
    monkeypatch.setenv("HOLDFAST_S3_LEAST_RATE", "1000")
    found = patience_of_environment()
    assert (found.deadline_s, found.least_bytes_per_s) == (7.5, 1000)
    assert (found.opening().deadline_s, found.try_s) == (1.25, 2.5)
