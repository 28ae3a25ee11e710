"""The store behind file systems of fsspec: the contract, proofs, forks and secrets."""

from __future__ import annotations

import base64
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from shutil import which
from typing import Any

import fsspec
import pytest

from holdfast.backends import (
    AccessDenied,
    Backend,
    ByteRange,
    InvalidLocation,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
    open_backend,
    waiting,
)
from holdfast.backends.fsspec.file_systems import dialect_of
from holdfast.backends.fsspec.store import FsspecBackend
from holdfast.backends.patience import Patience
from holdfast.backends.testing import BackendContract
from tests.backends.test_gateway import BELIEVED, CALLS, LIES, fixed
from tests.servers.azurite import KEY, Azurite
from tests.servers.gateway import Gateway
from tests.servers.gcs import FakeGcs
from tests.support.faults import everything_said

s3fs = pytest.importorskip("s3fs")

PATIENCE = Patience(attempts=2, first_s=0.001)
# The same requests as others, and here nothing else.
ALIKE = ("get into", "put large", "put_if_absent large", "list none")
# One of each kind; gcsfs follows redirects, and looks for the other host for long.
TOLD = (
    *("200 page", "200 empty of a web server", "206 page of a web server", "404 empty"),
    *("404 page", "403 page", "412 page", "416 empty", "503 page"),
)


def by_s3fs(url: str) -> Backend:
    return open_backend(url, transport="s3fs")


# Where the real server is installed, the check asks that one, and the soak moto too.
@(pytest.mark.soak if which("radosgw") else pytest.mark.usefixtures())
class TestS3fsOnMoto(BackendContract):
    racy_create = "moto checks for the key and then writes it, in two steps"
    many = 25

    @pytest.fixture
    def backend(self, moto_url: Callable[[], str], small_pages: None) -> Backend:
        return by_s3fs(moto_url())


@pytest.mark.radosgw
class TestS3fsOnRadosgw(BackendContract):
    many, race_keys = 25, 15

    @pytest.fixture
    def backend(self, radosgw_url: Callable[[], str], small_pages: None) -> Backend:
        return by_s3fs(radosgw_url())


class TestAdlfsOnAzurite(BackendContract):
    many, race_keys = 25, 6

    @pytest.fixture
    def backend(self, azure_url: str, small_pages: None) -> Backend:
        return open_backend(azure_url)


class TestGcsfsOnFakeGcs(BackendContract):
    many, race_keys = 110, 15  # it deletes 100 at once

    @pytest.fixture
    def backend(self, gs_url: str, small_pages: None) -> Backend:
        return open_backend(gs_url)


# Who answered


@pytest.fixture
def behind(
    moto_url: Callable[[], str], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:
    url = moto_url()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    with filled(s3fs.S3FileSystem(skip_instance_cache=True), url) as backend:
        yield backend


@pytest.fixture
def behind_azure(azurite: Azurite, azure_url: str) -> Iterator[tuple[Gateway, Backend]]:
    with Gateway(azurite.endpoint_url) as between:
        host = azurite.endpoint_url.split("/")[2]
        said = azurite.connection_string.replace(host, between.url.split("/")[2])
        fs = fsspec.filesystem("az", connection_string=said, skip_instance_cache=True)
        with filled(fs, azure_url) as backend:
            yield between, backend


@pytest.fixture
def behind_google(fake_gcs: FakeGcs, gs_url: str) -> Iterator[tuple[Gateway, Backend]]:
    with Gateway(fake_gcs.endpoint_url) as between:
        fs = fsspec.filesystem("gs", endpoint_url=between.url, token="anon")
        with filled(fs, gs_url) as backend:
            yield between, backend


@contextmanager
def filled(fs: Any, url: str) -> Iterator[Backend]:
    backend = FsspecBackend(fs, url, dialect_of(fs), PATIENCE)
    backend.put("a", b"0123456789")
    backend.put("dir/b", b"another 10")
    yield backend
    backend.close()


@pytest.mark.parametrize("store", ["azure", "google"])
def test_answer_in_the_place_of_another_store(store: str, request: pytest.FixtureRequest) -> None:
    between, backend = request.getfixturevalue(f"behind_{store}")
    believed = []
    for name, (operation, call) in CALLS.items():
        # Google's stat is a listing. Nobody asks Azure for versions.
        asked = "list" if (store, operation) == ("google", "head") else operation
        if (store, operation) == ("azure", "versioning") or name in ALIKE:
            continue
        for said in TOLD:
            lie = LIES[said]
            between.lie(lambda request, asked=asked: request.operation == asked, lie)
            try:
                call(backend)
            except StorageError as error:
                if isinstance(error, ObjectNotFound) and name == "get of what is absent":
                    continue  # that is true, and a listing of Google confirmed it
                if isinstance(error, ObjectNotFound | EOFError):
                    believed.append((name, said, type(error).__name__))
            else:
                believed.append((name, said, "done"))
    between.be_honest()
    assert not believed, "\n".join(map(str, believed))
    assert [info.key for info in backend.list()] == ["a", "dir/b"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak) if n in ALIKE else n for n in CALLS]
)
def test_answer_in_the_place_of_the_store(gateway: Gateway, behind: Backend, name: str) -> None:
    operation, call = CALLS[name]
    for said, lie in LIES.items():
        if (operation, said) in BELIEVED:
            continue
        gateway.lie(lambda request: request.operation == operation, lie)
        with pytest.raises(StorageError) as caught:
            call(behind)
        assert not isinstance(caught.value, ObjectNotFound | EOFError), (said, caught.value)
    gateway.be_honest()
    assert [info.key for info in behind.list()] == ["a", "dir/b"]


def test_put_that_was_not_passed_on_is_found_out(gateway: Gateway, behind: Backend) -> None:
    """The answer looks like one of S3: only the object's size gives it away."""
    lie = fixed(200, b"", {"ETag": f'"{"0" * 32}"'})
    gateway.lie(lambda request: request.operation == "put", lie)
    for call in (behind.put, behind.put_if_absent):
        with pytest.raises(StoreUnavailable, match=r"acknowledged.*absent.*is not known"):
            call("new", b"x")  # type: ignore[operator]
    with pytest.raises(StoreUnavailable, match=r"1 bytes was acknowledged.*had 10 bytes"):
        behind.put("a", b"x")


def test_create_whose_answer_was_lost_is_not_made_twice(gateway: Gateway, behind: Backend) -> None:
    gateway.lie(
        lambda request: request.operation == "put",
        lambda request, ask: (ask(request), LIES["200 page"](request, ask))[1],
    )
    assert behind.put_if_absent("new", b"x") is False
    gateway.be_honest()
    assert behind.get("new") == b"x"


def test_create_sends_the_condition_and_one_put(gateway: Gateway, behind: Backend) -> None:
    gateway.requests.clear()
    assert behind.put_if_absent("new", b"x" * 100_000)
    (put,) = (request for request in gateway.requests if request.operation == "put")
    assert put.headers["If-None-Match"] == "*"
    assert len(put.body) >= 100_000


def test_checksum_goes_in_a_header(
    moto_url: Callable[[], str], gateway: Gateway, behind: Backend
) -> None:
    """The SDK's own one would follow the body over TLS, without a length, which radosgw refuses."""
    gateway.requests.clear()
    options = {
        "endpoint_url": gateway.url,
        "config_kwargs": {"request_checksum_calculation": "when_required"},
    }
    store = open_backend(behind.url, options, transport="s3fs")
    store.put("new", b"123456789")
    (put,) = (request for request in gateway.requests if request.operation == "put")
    assert {n.lower(): v for n, v in put.headers.items()}["x-amz-checksum-crc32"] == "y/Q5Jg=="


def test_listing_asks_only_for_what_is_wanted(gateway: Gateway, behind: Backend) -> None:
    gateway.requests.clear()
    assert [info.key for info in behind.list(start_after="a", limit=1)] == ["dir/b"]
    (asked,) = gateway.requests
    assert asked.query["max-keys"] == ["1"]
    assert asked.query["start-after"] == ["some/prefix/a"]


def test_expected_owner_goes_with_every_request(
    gateway: Gateway, behind: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_S3_BUCKET_OWNER", "123456789012")
    behind.close()
    gateway.requests.clear()
    behind.put("a", b"x")
    behind.get("a")
    behind.stat("a")
    list(behind.list())
    behind.delete("a")
    assert len(gateway.requests) == 6
    for request in gateway.requests:
        assert request.headers["x-amz-expected-bucket-owner"] == "123456789012"


# Processes and instances


@pytest.fixture(params=["s3fs", "adlfs", "gcsfs"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "adlfs":
        return open_backend(request.getfixturevalue("azure_url"))
    if request.param == "gcsfs":
        return open_backend(request.getfixturevalue("gs_url"))
    return by_s3fs(request.getfixturevalue("moto_url")())


def test_forked_child_has_an_instance_of_its_own(backend: Backend) -> None:
    backend.put("a", b"x")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert backend._made is None  # type: ignore[attr-defined]
            made = backend.put_if_absent("b", b"y")
            code = 0 if made and backend.get("a") == b"x" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.get("b") == b"y"


EXITING = """
import atexit, os, sys
first = os.getpid()
atexit.register(lambda: os.getpid() == first and backend.put("b", backend.get("a")))
from holdfast.backends import open_backend
backend = open_backend(sys.argv[1], transport=sys.argv[2] or None)
backend.put("a", b"x")
if os.fork() == 0:
    sys.exit(0 if backend.get("a") == b"x" else 2)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_forked_child_can_end_and_the_store_answers_at_the_end_of_a_process(
    backend: Backend,
) -> None:
    """adlfs waits at exit for an event loop, which a child does not have.

    At the end of a process a run gets its last status; by then drivers have closed their sessions,
    and Python its pools.
    """
    transport = "s3fs" if backend.url.startswith("s3") else ""
    program = [sys.executable, "-W", "ignore", "-c", EXITING, backend.url, transport]
    done = subprocess.run(program, timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert backend.get("b") == b"x"


def test_url_opens_the_same_store(backend: Backend) -> None:
    backend.put("a", b"x")
    assert backend.url.startswith(("s3://test-", "az://test-", "gs://test-"))
    assert open_backend(backend.url).get("a") == b"x"


def test_close_and_use_again(backend: Backend) -> None:
    backend.put("a", b"x")
    backend.close()
    assert backend.get("a") == b"x"


def test_listing_does_not_come_from_a_cache(backend: Backend) -> None:
    other = copy_of(backend)
    backend.put("a/1", b"x")
    for fresh in (False, True):
        keys = [[info.key for info in other.list("a/", delimiter=fresh)] for _ in range(2)]
        assert keys == [["a/1"], ["a/1"]]
    backend.put("a/2", b"xy")
    assert [info.key for info in other.list("a/", delimiter=True)] == ["a/1", "a/2"]
    backend.put("a/1", b"xyz")
    assert other.stat("a/1").size_bytes == 3
    backend.delete("a/1")
    with pytest.raises(ObjectNotFound):
        other.stat("a/1")


def copy_of(backend: Backend) -> Backend:
    assert isinstance(backend, FsspecBackend)
    fs = backend._class(*backend._args, **backend._given)
    return FsspecBackend(fs, backend.url, dialect_of(fs))


def test_whole_object_beyond_the_limit_is_not_read(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 6000
    backend.put("a", data)
    assert backend.get("a") == data
    monkeypatch.setenv("HOLDFAST_MAX_RECORD_BYTES", "1200000")
    with pytest.raises(StorageError, match="too long to be read as a whole"):
        backend.get("a")


# Errors


@pytest.mark.parametrize("store", ["boto3", "s3fs", "azure", "google"])
def test_absent_bucket_and_container(store: str, request: pytest.FixtureRequest) -> None:
    if store in ("boto3", "s3fs"):
        request.getfixturevalue("moto_url")()
        places = [("s3://none-such/x", store)]
    else:
        request.getfixturevalue("azure_url" if store == "azure" else "gs_url")
        places = [("az://none-such/x" if store == "azure" else "gs://none-such/x", None)]
    for url, transport in places:
        backend = open_backend(url, transport=transport)  # type: ignore[arg-type]
        calls = (
            lambda b=backend: b.get("a"),
            lambda b=backend: b.put("a", b"x"),
            lambda b=backend: b.put_if_absent("a", b"x"),
            lambda b=backend: list(b.list()),
        )
        for call in calls:
            with pytest.raises(InvalidLocation, match=r"none-such.*no such"):
                call()  # type: ignore[no-untyped-call]


@pytest.mark.radosgw
def test_wrong_credentials_on_radosgw(radosgw_url: Callable[[], str]) -> None:
    url, secret = radosgw_url(), "SECRET-that-nobody-may-see"
    for transport in ("boto3", "s3fs", *(["obstore"] if find_spec("obstore") else [])):
        backend = open_backend(url, {"key": "nobody", "secret": secret}, transport=transport)  # type: ignore[arg-type]
        for call in (backend.get, lambda key, b=backend: b.put(key, b"x"), backend.stat):
            with pytest.raises(AccessDenied) as caught:
                call("a")
            assert secret not in everything_said(caught.value)


def test_wrong_credentials_on_azurite(azurite: Azurite, azure_url: str) -> None:
    wrong = base64.b64encode(b"SECRET-that-nobody-may-see").decode()
    said = azurite.connection_string.replace(KEY, wrong)
    backend = open_backend(azure_url, {"connection_string": said})
    for call in (backend.get, lambda key: backend.put(key, b"x"), backend.stat):
        with pytest.raises(AccessDenied) as caught:
            call("a")
        assert wrong not in everything_said(caught.value)


def test_wrong_credentials_at_google(behind_google: tuple[Gateway, Backend]) -> None:
    """The emulator asks for none, so the answers are those that Google documents."""
    between, backend = behind_google
    for code in (401, 403):
        said = {"error": {"code": code, "message": "Invalid Credentials", "errors": []}}
        between.lie(lambda _: True, fixed(code, json.dumps(said).encode()))
        for call in (backend.get, lambda key: backend.put(key, b"x"), backend.stat):
            with pytest.raises(AccessDenied, match="GOOGLE_APPLICATION_CREDENTIALS"):
                call("a")


def test_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.backends.fsspec.store.patience_of_environment", lambda: PATIENCE)
    options = {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "secret"}
    backend = open_backend("s3://bucket/x", options, transport="s3fs")
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/x/a.*127\.0\.0\.1:1.*network"):
        backend.get("a")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def at_silent(store: str, silent: str) -> Backend:
    """Return a store there, whose driver itself would wait for a minute and more."""
    if store == "http":
        return open_backend(f"http://{silent}/x")
    if store in ("s3fs", "boto3"):
        client = {"config_kwargs": {"read_timeout": 60}, "key": "k", "secret": "secret"}
        options = {"endpoint_url": f"http://{silent}", **client}
        return open_backend("s3://bucket/x", options, transport=store)  # type: ignore[arg-type]
    if store == "google":
        pytest.importorskip("gcsfs")
        return open_backend("gs://bucket/x", {"endpoint_url": f"http://{silent}", "token": "anon"})
    pytest.importorskip("adlfs")
    said = f"AccountName=a;AccountKey={KEY};BlobEndpoint=http://{silent}/a;"
    return open_backend("az://container/x", {"connection_string": said, "read_timeout": 60})


WRITES = ("put", "put_if_absent", "delete")


@pytest.mark.parametrize("store", ["boto3", "s3fs", "azure", "google", "http"])
def test_server_that_says_nothing_is_given_up(
    store: str, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until the first answer a sixth of it counts.
    monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "0.6")
    backend = at_silent(store, silent)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: backend.get("a"),
        "range": lambda: backend.get("a", ByteRange(0, 10)),
        "list": lambda: list(backend.list()),
        "stat": lambda: backend.stat("a"),
        "put": lambda: backend.put("a", b"x"),
        "put_if_absent": lambda: backend.put_if_absent("a", b"x"),
        "delete": lambda: backend.delete("a"),
    }
    for name, call in calls.items():
        if store == "http" and name in WRITES:
            continue
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert time.monotonic() - began_s < 15, "a driver's own time limit counted"
        assert backend.url.partition("?")[0] in str(caught.value)
        assert (name in WRITES) == ("the write was done" in str(caught.value))
    backend.close()


@pytest.mark.parametrize("store", ["s3fs", "azure", "google"])
def test_line_says_what_is_waited_for(
    store: str, silent: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "1.5")
    monkeypatch.setattr(waiting, "TELL_AFTER_S", 0.01)
    monkeypatch.setattr(waiting, "_watchdog", waiting._Watchdog())
    backend = at_silent(store, silent)
    with caplog.at_level(logging.WARNING, "holdfast"), pytest.raises(StoreUnavailable):
        backend.get("registry.json")
    told = [one.getMessage() for one in caplog.records if one.name == "holdfast"]
    assert len(told) == 1
    assert "/x/registry.json: waiting for the store (get)" in told[0]
    assert "HOLDFAST_S3_TIMEOUT" in told[0]
