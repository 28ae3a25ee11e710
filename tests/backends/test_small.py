"""Small objects by obstore: what it is asked, and that boto3 has the last word.

The contract and the lying gateway are in `test_contract` and `test_gateway`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.backends import (
    ByteRange,
    InvalidLocation,
    ObjectNotFound,
    StoreUnsuitable,
    open_backend,
)
from tests.servers.gateway import Answer, Gateway, Lie, Request

small = pytest.importorskip("holdfast.backends.s3.small", exc_type=ImportError)


@pytest.fixture(autouse=True)
def certificates_are_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def backend(
    moto_url: Callable[[], str], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    url = moto_url()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    backend = open_backend(url, transport="obstore")
    backend.put("a", b"0123456789")
    gateway.requests.clear()
    yield backend
    backend.close()


def agent(request: Request) -> str:
    said = {name.lower(): value for name, value in request.headers.items()}
    return "obstore" if said["user-agent"].startswith("object_store/") else "boto3"


def header(request: Request, name: str) -> str:
    return {name.lower(): value for name, value in request.headers.items()}.get(name, "")


def asked(gateway: Gateway) -> list[str]:
    """Return who sent the requests since the last call."""
    found = [f"{agent(request)} {request.operation}" for request in gateway.requests]
    gateway.requests.clear()
    return found


def when(operation: str, lie: Lie, gateway: Gateway) -> None:
    """Lie to obstore alone."""
    gateway.lie(lambda one: agent(one) == "obstore" and one.operation == operation, lie)


def test_small_objects_go_by_obstore_and_all_else_by_boto3(backend: Any, gateway: Gateway) -> None:
    large = bytes(300_000)
    into = bytearray(4)
    assert backend.get("a", ByteRange(3, 7)) == b"3456"
    backend.get("a", ByteRange(3, 7), into=[memoryview(into)[:1], memoryview(into)[1:]])
    assert (backend.get("a"), bytes(into)) == (b"0123456789", b"3456")
    backend.put("b", [b"x", b"", b"y"])
    assert backend.put_if_absent("c", b"x")
    assert not backend.put_if_absent("c", b"y")
    with pytest.raises(ObjectNotFound, match="no such object"):
        backend.get("no")
    gets, puts = ["obstore get"] * 3, ["obstore put"] * 3
    assert asked(gateway) == [*gets, *puts, "obstore get"], "refusals are proved by themselves"
    backend.put("large", large)
    backend.put("page.html", b"x")
    assert backend.get("large", ByteRange(0, 299_999)) == large[1:]
    backend.stat("a")
    backend.delete("b")
    assert [info.key for info in backend.list()] == ["a", "c", "large", "page.html"]
    assert {said.partition(" ")[0] for said in asked(gateway)} == {"boto3"}
    assert backend.get("large") == large
    with pytest.raises(EOFError):
        backend.get("a", ByteRange(8, 12))
    assert asked(gateway) == ["obstore get", "boto3 get"] * 2, "its length is only told then"


def test_answer_that_was_lost_is_asked_for_once_more_by_boto3(
    backend: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore repeats nothing: a repeated create would be refused by its own object."""
    monkeypatch.setattr(small, "_REST_S", 0.0)

    def lost(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        ask(request)
        raise ConnectionAbortedError

    busy = Answer(503, {}, b"<Error><Code>SlowDown</Code><Message>no</Message></Error>")
    for number, lie in enumerate([lost, lambda request, ask: busy]):
        when("put", lie, gateway)
        made = backend.put_if_absent(f"new-{number}", b"x")
        assert made == bool(number), "False: it may be the caller's own object"
        assert asked(gateway) == ["obstore put", "boto3 put"]
        assert backend.get(f"new-{number}") == b"x"
        when("get", lie, gateway)
        assert backend.get("a") == b"0123456789"
        assert asked(gateway)[-2:] == ["obstore get", "boto3 get"]


def test_boto3_works_alone_after_an_answer_without_proof(
    backend: Any,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the keys of KMS an ETag is no MD5, so it proves nothing of a put."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(small, "time", clock)

    def encrypted(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        said = ask(request)
        return replace(said, headers=said.headers | {"ETag": f'"{"0" * 32}"'})

    when("put", encrypted, gateway)
    backend.put("b", b"x")
    assert asked(gateway) == ["obstore put", "boto3 put"]
    assert "no proof through obstore (NotProven)" in caplog.text
    clock.monotonic = lambda: 129.0
    backend.put("b", b"y")
    assert backend.get("b") == b"y"
    assert asked(gateway) == ["boto3 put", "boto3 get"]
    clock.monotonic = lambda: 131.0
    assert backend.get("b") == b"y"
    assert asked(gateway) == ["obstore get"]


def test_obstore_has_little_time(
    backend: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "timedelta", lambda seconds: timedelta(seconds=seconds / 50))

    def late(request: Request, ask: Callable[[Request], Answer]) -> Answer:
        time.sleep(0.5)
        return ask(request)

    when("get", late, gateway)
    assert backend.get("a") == b"0123456789"
    assert backend._rests_until_s


def test_forked_child_asks_boto3(backend: Any, gateway: Gateway) -> None:
    assert backend.get("a") == b"0123456789"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a call of obstore would not return
            backend.get("a")
            code = 0 if backend.get("a") == b"0123456789" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.get("a") == b"0123456789"
    assert asked(gateway) == ["obstore get", "boto3 get", "boto3 get", "obstore get"]


# Credentials and options


def test_credentials_are_those_of_boto3_and_renewed_by_it(
    moto_url: Callable[[], str], gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, given = moto_url(), tmp_path / "given"
    given.write_text("AKIA-1")
    soon = '"Version": 1, "SecretAccessKey": "s", "Expiration": "2099-01-01T00:00:00Z"'
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\nread key <{given}\necho '{{{soon}, \"AccessKeyId\": \"'$key'\"}}'"
    )
    program.chmod(0o700)
    (tmp_path / "config").write_text(f"[profile team]\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {"profile": "team", "endpoint_url": gateway.url}
    backend: Any = open_backend(url, options, transport="obstore")
    backend.put("a", b"x")
    backend.get("a")
    given.write_text("AKIA-2")
    backend._keys._expiry_time = backend._keys._time_fetcher()  # they have just expired
    time.sleep(0.2)  # obstore asks for credentials ten times a second at most
    backend.get("a")
    signed = [header(request, "authorization") for request in gateway.requests]
    keys = [said.partition("Credential=")[2].partition("/")[0] for said in signed]
    assert keys == ["AKIA-1", "AKIA-1", "AKIA-2"]
    assert asked(gateway) == ["boto3 put", "obstore get", "obstore get"]


def test_request_is_anonymous_and_paid_for_as_asked(
    moto_url: Callable[[], str], gateway: Gateway
) -> None:
    """The store of the tests refuses requests without a signature."""
    url, options = moto_url(), {"endpoint_url": gateway.url}
    stamp = {"ETag": f'"{hashlib.md5(b"x").hexdigest()}"'}
    gateway.lie(lambda _: True, lambda one, _: Answer(200, stamp, b"x" * (one.method == "GET")))
    for given, name, said in (
        ({"anon": True}, "authorization", ""),
        ({"requester_pays": True}, "x-amz-request-payer", "requester"),
    ):
        backend = open_backend(url, options | given, transport="obstore")
        gateway.requests.clear()
        for key in ("a", "b"):
            backend.put(key, b"x")
        assert backend.get("a") == b"x"
        assert [header(request, name) for request in gateway.requests] == [said] * 3
        assert asked(gateway) == ["boto3 put", "obstore put", "obstore get"]


def test_options_of_puts_leave_them_to_boto3(moto_url: Callable[[], str], gateway: Gateway) -> None:
    url, put = moto_url(), {"StorageClass": "STANDARD_IA"}
    options = {"endpoint_url": gateway.url, "s3_additional_kwargs": put}
    backend = open_backend(url, options, transport="obstore")
    gateway.requests.clear()
    for key in ("a", "b", "packs/a"):
        backend.put(key, b"x")
    assert asked(gateway) == ["boto3 put", "obstore put", "boto3 put"]
    put |= {"ACL": "private"}
    backend = open_backend(url, options, transport="obstore")
    for key in ("a", "b"):
        backend.put(key, b"x")
    assert asked(gateway) == ["boto3 put", "boto3 put"]


@pytest.mark.parametrize(
    ("bucket", "options", "address", "region"),
    [
        ("bucket?region=eu-west-1", {}, "https://bucket.s3.eu-west-1.amazonaws.com", "eu-west-1"),
        ("a.bucket", {}, "https://s3.amazonaws.com/a.bucket", "us-east-1"),
        ("host", {"endpoint_url": "https://host.x:9"}, "https://host.x:9/host", "us-east-1"),
        ("bucket", {"anon": True}, "https://bucket.s3.amazonaws.com", ""),
    ],
)
def test_address_and_region_are_those_that_boto3_found(
    monkeypatch: pytest.MonkeyPatch, bucket: str, options: Any, address: str, region: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name, _, query = bucket.partition("?")
    backend: Any = open_backend(f"s3://{name}/x?{query}".rstrip("?"), options, transport="obstore")

    def stop(**_: object) -> None:
        raise KeyError("nothing is sent")

    backend._client().meta.events.register_last("before-send.s3", stop)
    for call in (backend.list, backend.get):
        backend._place = ("", "")
        with pytest.raises(KeyError, match="nothing is sent"):
            list(call("a"))
        assert backend._place == (address, region)


def test_address_that_can_be_read_in_two_ways_is_left_to_boto3() -> None:
    backend: Any = open_backend("s3://bucket/bucket", {"anon": True}, transport="obstore")
    for said in ("https://bucket.x/bucket/a", "https://x/a"):
        backend._note(SimpleNamespace(url=said, headers={}))
        assert backend._place == ("", "")


@pytest.mark.parametrize(
    ("variable", "options", "found"),
    [
        (None, {"config_kwargs": {"proxies": {"http": "http://x"}, "read_timeout": 9}}, "proxies"),
        (None, {"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ("HOLDFAST_S3_BUCKET_OWNER", {}, "HOLDFAST_S3_BUCKET_OWNER"),
        ("AWS_SERVER_SIDE_ENCRYPTION", {}, "AWS_SERVER_SIDE_ENCRYPTION"),
        ("AWS_CA_BUNDLE", {}, "certificates of x"),
        (None, {"client_kwargs": {"verify": "y"}}, "certificates of y"),
    ],
)
def test_option_that_obstore_cannot_keep_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, options: Any, found: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, "x")
    url = "s3://bucket/x?endpoint_url=https://host"
    with pytest.raises(InvalidLocation, match=rf"found {found}\. Leave out transport='obstore'"):
        open_backend(url, options, transport="obstore")
    open_backend(url.replace("https", "http"), {"client_kwargs": {"verify": False}})


def test_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, small.__name__)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreUnsuitable, match=r"obstore is not .*pip install .*\[fast\]"):
        open_backend("s3://bucket/x", transport="obstore")
