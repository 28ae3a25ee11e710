"""What the S3 backend makes of answers that moto and radosgw do not give on demand.

A small server answers each request from a script, so that the SDK's own machinery (signing,
repeats, streams) is part of what is tested.
"""

from __future__ import annotations

import base64
import os
import re
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSHTTPConnection

from holdfast.backends import (
    AccessDenied,
    ByteRange,
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
    open_backend,
)
from holdfast.backends.patience import Patience
from holdfast.backends.s3.backend import S3Backend
from holdfast.backends.s3.body import SendBody, fill
from holdfast.backends.testing import keys_of
from holdfast.backends.waiting import Wait
from holdfast.backends.wrappers import Metered
from tests.servers.fixtures import S3Server


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """One answer of the scripted server.

    Attributes:
        status: HTTP status; 0 hangs up without an answer.
        code: Code of an S3 error body.
        body: Body, if it is no error.
        headers: Further headers; they override what the server would say of itself.
        extra: Further members of the error body.
        message: Its message.
    """

    status: int
    code: str = ""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    extra: str = ""
    message: str = "server's words"

    def payload(self) -> bytes:
        if not self.code:
            return self.body
        return (
            f"<?xml version='1.0'?><Error><Code>{self.code}</Code>"
            f"<Message>{self.message}</Message>{self.extra}</Error>"
        ).encode()

    def stamp(self, request: Request) -> dict[str, str]:
        """Return what a store says with an object, or a part of it that begins as was asked."""
        found = {"Content-Length": str(len(self.payload()))}
        if self.status not in (200, 206):
            return found
        found |= {"ETag": f'"{"0" * 32}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if self.status == 206:
            start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
            stop = start + int(self.headers.get("Content-Length", len(self.body)))
            found["Content-Range"] = f"bytes {start}-{stop - 1}/{stop}"
        return found


class Script:
    """A server that gives the answers of a script, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[Request] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a body would wait 40 ms for the receipt of its head

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                script.requests.append(request)
                given = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                if not given.status:
                    self.close_connection = True
                    return
                self.send_response(given.status)
                payload = given.payload()
                headers = given.stamp(request) | given.headers
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(payload)
                self.close_connection = "Content-Length" in given.headers

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


# One server and one client for the module: to make a client takes the SDK a tenth of a second.


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Script, S3Backend]]:
    script = Script()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "holdfast.backends.s3.backend.patience_of_environment",
            lambda: Patience(attempts=8, first_s=0),
        )
        S3Server(script.url, "key", "s3cr3t-k3y").set_environment(patch)
        patch.delenv("AWS_ENDPOINT_URL")
        opened = open_backend(f"s3://bucket/pre/fix?endpoint_url={script.url}")
        assert isinstance(opened, S3Backend)
        yield script, opened
        opened.close()
    script.stop()


@pytest.fixture
def script(served: tuple[Script, S3Backend]) -> Script:
    served[0].answers.clear()
    served[0].requests.clear()
    return served[0]


@pytest.fixture
def backend(served: tuple[Script, S3Backend]) -> S3Backend:
    return served[1]


CALLS: dict[str, Callable[[S3Backend], object]] = {
    "get": lambda b: b.get("a"),
    "put": lambda b: b.put("a", b"x"),
    "put_if_absent": lambda b: b.put_if_absent("a", b"x"),
    "list": keys_of,
    "delete": lambda b: b.delete("a"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (Answer(403, "AccessDenied"), AccessDenied, "s3:ListBucket"),
        (Answer(404, "NoSuchBucket"), InvalidLocation, "s3://bucket/.*no such bucket"),
        (Answer(400, "ExpiredToken"), AccessDenied, "expired.*log in again"),
        (Answer(403, "InvalidAccessKeyId"), AccessDenied, "access key is not known"),
        (Answer(403, "SignatureDoesNotMatch"), AccessDenied, "secret key"),
        (Answer(400, "KMS.DisabledException"), AccessDenied, "kms:Decrypt"),
        (Answer(503, "SlowDown"), StoreUnavailable, "SlowDown"),
        (Answer(500, "InternalError"), StoreUnavailable, "InternalError"),
        (Answer(502), StoreUnavailable, "502"),
        (Answer(429, "TooManyRequests"), StoreUnavailable, "429"),
        (Answer(0), StoreUnavailable, "ConnectionClosed|Connection was closed"),
        (Answer(507, "Odd"), StoreFull, "full"),
        (Answer(403, "QuotaExceeded"), StoreFull, "quota"),
        (Answer(400, "EntityTooLarge"), StoreFull, "too large"),
        (Answer(501, "NotImplemented"), StoreUnsuitable, "condition"),
        (Answer(418, "Odd"), StorageError, "Odd: server's words"),
        (Answer(301, "PermanentRedirect"), InvalidLocation, "another region or at another end"),
        (Answer(301), InvalidLocation, "another region or at another endpoint.*endpoint_url"),
    ],
    ids=lambda value: f"{value.status}-{value.code}" if isinstance(value, Answer) else "",
)
def test_error_of_the_server(
    backend: S3Backend,
    script: Script,
    call: Callable[[S3Backend], object],
    answer: Answer,
    kind: type[StorageError],
    said: str,
) -> None:
    script.answers = [answer]
    with pytest.raises(kind, match=said) as caught:
        call(backend)
    assert type(caught.value) is kind
    assert "s3://bucket/pre/fix/" in str(caught.value)
    assert len(script.requests) <= 8, "repeats are bounded"


# Absence


def test_only_404_means_absent(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(404, "NoSuchKey")]
    with pytest.raises(ObjectNotFound, match="s3://bucket/pre/fix/a"):
        backend.get("a")
    script.answers = [Answer(403)]
    with pytest.raises(AccessDenied, match="looks forbidden"):
        backend.stat("a")


def test_absence_after_head_is_proved_by_a_listing(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(404), Answer(404, "NoSuchBucket")]
    with pytest.raises(InvalidLocation, match="no such bucket"):
        backend.stat("a")
    script.requests.clear()
    script.answers = [Answer(404), page(["a.b"])]
    with pytest.raises(ObjectNotFound, match="s3://bucket/pre/fix/a"):
        backend.stat("a")
    head, listing = script.requests
    assert (head.method, listing.method) == ("HEAD", "GET")
    assert "prefix=pre%2Ffix%2Fa&" in f"{listing.path}&"
    script.answers = [Answer(404), page(["a"]), Answer(200)]
    assert backend.stat("a").size_bytes == 0, "what is listed is asked for again"
    script.answers = [Answer(404)]
    with pytest.raises(StoreUnavailable, match="something between"):
        backend.stat("a")


def test_head_refused_without_words_speaks_of_credentials(
    backend: S3Backend, script: Script
) -> None:
    script.answers = [Answer(400)]
    with pytest.raises(AccessDenied, match="expired"):
        backend.stat("a")


def test_delete_of_an_absent_object_is_no_error(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(404, "NoSuchKey")]
    backend.delete("a")


# Many deletions by one request


def deletions(*keys: str, **errors: str) -> Answer:
    """Return the store's answer: these keys are deleted, those have errors."""
    told = "".join(f"<Deleted><Key>pre/fix/{key}</Key></Deleted>" for key in keys)
    told += "".join(
        f"<Error><Key>pre/fix/{key}</Key><Code>{code}</Code></Error>"
        for key, code in errors.items()
    )
    return Answer(200, body=f"<DeleteResult>{told}</DeleteResult>".encode())


def keys_sent(request: Request) -> list[str]:
    return re.findall(r"<Key>pre/fix/(.*?)</Key>", request.body.decode())


def test_each_key_of_many_has_its_own_answer(backend: S3Backend, script: Script) -> None:
    """Busy ones are asked for again, refused ones told; what is absent is deleted."""
    script.answers = [
        deletions("a", b="SlowDown", c="AccessDenied", d="NoSuchKey", e="InternalError"),
        deletions("e", b="SlowDown"),
        deletions("b"),
    ]
    failed = backend.delete_many("abcde")
    assert {key: type(error) for key, error in failed.items()} == {"c": AccessDenied}
    assert "s3://bucket/pre/fix/c" in str(failed["c"])
    assert [keys_sent(request) for request in script.requests] == [[*"abcde"], [*"be"], ["b"]]
    assert {(r.method, r.path) for r in script.requests} == {("POST", "/bucket?delete")}


def test_request_names_a_thousand_keys_at_most(backend: S3Backend, script: Script) -> None:
    keys = [f"{n:04d}" for n in range(1002)]
    script.answers = [deletions(*keys[:1000]), deletions(*keys[1000:])]
    assert backend.delete_many(iter(keys)) == {}
    assert [len(keys_sent(request)) for request in script.requests] == [1000, 2]


@pytest.mark.parametrize(
    "answer",
    [
        deletions(),
        deletions("a"),
        deletions("a", "b", "c"),
        deletions("a", "a"),
        deletions("a", "b", b="AccessDenied"),
        deletions("a", b=""),
        Answer(200),
        Answer(204),
        Answer(200, body=b"<html><title>Log in</title></html>"),
        Answer(200, body=deletions("a", "b").body[:-5]),
        Answer(404, body=b"<html></html>"),
    ],
    ids=["none", "one", "more", "twice", "both", "no code", "empty", "204", "page", "cut", "404"],
)
def test_only_a_whole_answer_proves_many_deletions(
    backend: S3Backend, script: Script, answer: Answer
) -> None:
    script.answers = [answer]
    with pytest.raises(StoreUnavailable):
        backend.delete_many(["a", "b"])
    assert len(script.requests) > 1
    script.answers = [answer, deletions("a", "b")]
    assert backend.delete_many(["a", "b"]) == {}


@pytest.mark.parametrize(
    "refused", [Answer(400, "NotImplemented"), Answer(405, "MethodNotAllowed")], ids=str
)
def test_server_without_that_request_gets_one_for_each_key(
    script: Script, backend: S3Backend, refused: Answer
) -> None:
    asked = open_backend(backend.url)
    script.answers = [refused, Answer(204), Answer(403, "AccessDenied"), Answer(204)]
    assert {k: type(e) for k, e in asked.delete_many("ab").items()} == {"b": AccessDenied}
    assert asked.delete_many("cd") == {}
    methods = [request.method for request in script.requests]
    assert methods == ["POST", *["DELETE"] * 4], "it is not asked for again"
    asked.close()


# Exclusive create


def test_create_sends_the_condition_and_a_checksum(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(200)]
    big = os.urandom(300_000)
    assert backend.put_if_absent("a", [big[:1000], big[1000:]])
    (sent,) = script.requests
    assert sent.path == "/bucket/pre/fix/a"
    assert sent.headers["if-none-match"] == "*"
    assert sent.body == big
    checksum = base64.b64encode(zlib.crc32(big).to_bytes(4, "big")).decode()
    assert sent.headers["x-amz-checksum-crc32"] == checksum
    assert sent.headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD", "without TLS"
    assert "x-amz-trailer" not in sent.headers


@pytest.mark.parametrize(("size", "asked"), [(1, None), (65_536, None), (65_537, "100-continue")])
def test_only_a_large_body_waits_until_the_server_wants_it(
    backend: S3Backend, script: Script, size: int, asked: str | None
) -> None:
    script.answers = [Answer(200)]
    assert backend.put_if_absent("a", bytes(size))
    (sent,) = script.requests
    assert sent.headers.get("expect") == asked
    assert sent.body == bytes(size)
    assert sent.headers["content-length"] == str(size)


def test_refused_condition_means_exists(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(412, "PreconditionFailed")]
    assert backend.put_if_absent("a", b"x") is False
    assert len(script.requests) == 1


def test_conflict_is_tried_again_and_bounded(backend: S3Backend, script: Script) -> None:
    conflict = Answer(409, "ConditionalRequestConflict")
    script.answers = [conflict, conflict, Answer(200)]
    assert backend.put_if_absent("a", bytes(100_000)) is True
    assert [len(request.body) for request in script.requests] == [100_000] * 3
    script.answers = [conflict]
    with pytest.raises(StoreUnavailable, match="another write of the same key"):
        backend.put_if_absent("a", b"x")


def test_repeat_after_a_lost_answer_is_refused_by_ones_own_object(
    backend: S3Backend, script: Script
) -> None:
    script.answers = [Answer(0), Answer(412, "PreconditionFailed")]
    assert backend.put_if_absent("a", b"x") is False
    assert len(script.requests) == 2


def test_repeat_sends_the_whole_body_again(backend: S3Backend, script: Script) -> None:
    data = os.urandom(200_000)
    script.answers = [Answer(500, "InternalError"), Answer(0), Answer(200)]
    backend.put("a", [data[:70_000], data[70_000:]])
    assert [request.body for request in script.requests] == [data] * 3


# Bodies of answers


def test_body_that_breaks_off_is_unavailable(backend: S3Backend, script: Script) -> None:
    for status, byte_range, into in (
        (200, None, None),
        (206, ByteRange(0, 10), None),
        (206, ByteRange(0, 10), [memoryview(bytearray(10))]),
    ):
        script.answers = [Answer(status, body=b"1234", headers={"Content-Length": "10"})]
        with pytest.raises(StoreUnavailable):
            backend.get("a", byte_range, into=into)


def test_broken_read_is_tried_again(backend: S3Backend, script: Script) -> None:
    broken = Answer(206, body=b"1234", headers={"Content-Length": "10"})
    script.answers = [broken, broken, Answer(206, body=b"0123456789")]
    target = bytearray(10)
    backend.get("a", ByteRange(0, 10), into=[memoryview(target)])
    assert target == b"0123456789"


def test_short_and_long_answers_to_a_range(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(206, body=b"1234")]
    with pytest.raises(ObjectTruncated, match="found 7 bytes"):
        backend.get("a", ByteRange(3, 10))
    script.answers = [Answer(200, body=b"0123456789")]
    with pytest.raises(StoreUnavailable, match=r"HTTP 200.*to a request for a range"):
        backend.get("a", ByteRange(3, 5))
    script.answers = [Answer(416, "InvalidRange")]
    with pytest.raises(ObjectTruncated):
        backend.get("a", ByteRange(3, 5))


# Clocks, credentials, owners


@pytest.mark.parametrize(("ahead_s", "word"), [(7200, "ahead"), (-7200, "behind")])
def test_clock_skew_says_by_how_much(
    backend: S3Backend, script: Script, ahead_s: int, word: str
) -> None:
    theirs = datetime.now(UTC) - timedelta(seconds=ahead_s)
    server_time = f"<ServerTime>{theirs:%Y-%m-%dT%H:%M:%SZ}</ServerTime>"
    script.answers = [Answer(403, "RequestTimeTooSkewed", extra=server_time)]
    with pytest.raises(AccessDenied, match=rf"differ by 7[12]\d\d s; ours is {word}.*NTP"):
        backend.get("a")


def test_missing_credentials(
    backend: S3Backend, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.close()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="AWS_PROFILE"):
        backend.get("a")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    backend.close()
    with pytest.raises(AccessDenied, match="nobody"):
        backend.get("a")
    backend.close()
    assert script.requests == []


def test_expected_owner_goes_with_every_request(
    script: Script, backend: S3Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_S3_BUCKET_OWNER", "123456789012")
    owned = open_backend(backend.url)
    script.answers = [Answer(403, "AccessDenied")]
    for call in (*CALLS.values(), lambda b: b.stat("a"), lambda b: b.delete_many(["a"])):
        with pytest.raises(AccessDenied):
            call(owned)
    for request in script.requests:
        assert request.headers["x-amz-expected-bucket-owner"] == "123456789012"
    with pytest.raises(AccessDenied, match="must belong to 123456789012"):
        owned.get("a")
    owned.close()


def test_server_that_is_not_there(backend: S3Backend, script: Script) -> None:
    nowhere = open_backend("s3://bucket/x?endpoint_url=http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1.*Check the endpoint.*network"):
        nowhere.get("a")


@pytest.mark.parametrize("status", [403, 503, 418])
def test_secret_that_a_server_repeats_is_hidden(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A proxy may repeat headers; the SDK finds credentials that no option has named."""
    file = {"aws_access_key_id": "AKIA-of-a-file", "aws_secret_access_key": "the-secret-key"}
    profile = "\n".join(["[team]", *(f"{k}={v}" for k, v in file.items())])
    path = tmp_path / "credentials"
    path.write_text(f"{profile}\naws_session_token=session-token-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    options = {"endpoint_url": script.url, "profile": "team"}
    backend = open_backend("s3://bucket/x", options)
    said = "session-token-1 of AKIA-of-a-file; http://u:proxy-word@h/?X-Amz-Signature=5ea1ed"
    script.answers = [Answer(status, "Odd", message=said.replace("&", "&amp;"))]
    with pytest.raises(StorageError) as caught:
        backend.get("a")
    shown = "".join(traceback.format_exception(caught.value))
    for secret in ("session-token-1", "AKIA-of-a-file", "proxy-word", "5ea1ed"):
        assert secret not in shown


# Listing


def page(keys: list[str], token: str = "", said: str = "<Name>bucket</Name>") -> Answer:
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    entries = "".join(
        f"<Contents><Key>pre/fix/{key}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    truncated = "true" if token else "false"
    return Answer(
        200,
        body=f"<ListBucketResult>{said}<IsTruncated>{truncated}</IsTruncated>{more}{entries}"
        "</ListBucketResult>".encode(),
    )


def test_pages_that_repeat_or_are_empty(backend: S3Backend, script: Script) -> None:
    script.answers = [page(["", "a"], "1"), page(["a", "b"], "2"), page([], "3"), page(["c"])]
    assert keys_of(backend) == ["a", "b", "c"]
    assert "start-after" not in script.requests[0].path


def test_listing_that_turns_in_a_circle_is_refused(backend: S3Backend, script: Script) -> None:
    script.answers = [page(["a"], "1")]
    with pytest.raises(StoreUnavailable, match="cannot be continued"):
        keys_of(backend)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("<Prefix>pre/fix/</Prefix>", ""),
        ("<EncodingType>url</EncodingType><Prefix>pre%2Ffix%2F</Prefix>", ""),
        ("<Prefix>pre%2Ffix%2F</Prefix>", ""),
        ("<Name>bucket</Name><Delimiter/><StartAfter/>", ""),
        ("", "names no bucket"),
        ("<Name/>", "names no bucket"),
        ("<Name>bucke</Name><Prefix>pre/fix/</Prefix>", "another bucket, bucke"),
        ("<Name>bucket</Name><Prefix>pre/fixe/</Prefix>", "another prefix, pre/fixe/"),
        ("<Name>bucket</Name><Prefix/>", "another prefix, none"),
        ("<Name>bucket</Name><Delimiter>/</Delimiter>", "delimiter /"),
        ("<Name>bucket</Name><StartAfter>x</StartAfter>", "starts after x"),
        ("<Name>bucket</Name><Contents><Key>pre/fix/b</Key></Contents>", "entries that lack"),
        ("<Name>bucket</Name><CommonPrefixes/>", "folders that lack"),
    ],
)
def test_listing_says_what_it_lists(
    backend: S3Backend, script: Script, said: str, refused: str
) -> None:
    script.answers = [page(["a"], said=said)]
    if not refused:
        assert keys_of(backend) == ["a"]
        return
    with pytest.raises(StoreUnavailable, match=refused):
        keys_of(backend)
    assert len(script.requests) > 1


def test_answer_that_cannot_be_read_is_asked_for_again(backend: S3Backend, script: Script) -> None:
    script.answers = [page(["b"])]
    script.answers[0].body = script.answers[0].body.replace(b"<Size>1", b"<Size>one")
    script.answers.append(page(["a"]))
    assert keys_of(backend) == ["a"]
    script.answers = [Answer(200, headers={"Last-Modified": "yesterday"}), Answer(200)]
    assert backend.stat("a").size_bytes == 0
    assert len(script.requests) == 4


def test_put_with_the_checksum_of_other_bytes(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(200, headers={"x-amz-checksum-crc32": "AAAAAA=="})]
    with pytest.raises(StoreUnavailable, match="checksum of other bytes"):
        backend.put("a", b"x")


def test_listing_out_of_order_is_refused(backend: S3Backend, script: Script) -> None:
    script.answers = [page(["b", "a"])]
    with pytest.raises(StoreUnsuitable, match="in order"):
        keys_of(backend)


def test_limit_asks_for_no_more(backend: S3Backend, script: Script) -> None:
    script.answers = [page(["xa", "xb"], "1")]
    assert keys_of(backend, "x", start_after="w", limit=2) == ["xa", "xb"]
    assert len(script.requests) == 1
    assert "max-keys=2" in script.requests[0].path
    assert "prefix=pre%2Ffix%2Fx" in script.requests[0].path
    assert "start-after=pre%2Ffix%2Fw" in script.requests[0].path
    script.requests.clear()
    assert keys_of(backend, limit=0) == []
    assert script.requests == []


# Versions


VERSIONING = "<VersioningConfiguration>{}</VersioningConfiguration>"


@pytest.mark.parametrize(
    ("said", "kept"),
    [("", False), ("<Status>Enabled</Status>", True), ("<Status>Suspended</Status>", None)],
)
def test_versioning(backend: S3Backend, script: Script, said: str, kept: bool | None) -> None:
    script.answers = [Answer(200, body=VERSIONING.format(said).encode())]
    assert backend.keeps_versions() is kept
    (asked,) = script.requests
    assert (asked.method, asked.path) == ("GET", "/bucket?versioning")


@pytest.mark.parametrize("answer", [Answer(403, "AccessDenied"), Answer(501, "NotImplemented")])
def test_versioning_that_is_not_told(backend: S3Backend, script: Script, answer: Answer) -> None:
    script.answers = [answer]
    assert backend.keeps_versions() is None


def test_versioning_of_a_store_that_fails(backend: S3Backend, script: Script) -> None:
    script.answers = [Answer(503, "SlowDown")]
    with pytest.raises(StoreUnavailable):
        backend.keeps_versions()
    script.answers = [Answer(404, "NoSuchBucket")]
    with pytest.raises(InvalidLocation):
        backend.keeps_versions()


# Processes and connections


def test_forked_child_opens_connections_of_its_own(
    moto_url: Callable[[], str],
) -> None:
    backend = open_backend(moto_url())
    backend.put("a", b"x")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert backend._made is None  # type: ignore[attr-defined]
            code = 0 if backend.get("a") == b"x" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.get("a") == b"x"


def test_connections_are_used_again(
    backend: S3Backend, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.close()
    opened: list[object] = []
    connect = AWSHTTPConnection.connect
    monkeypatch.setattr(
        AWSHTTPConnection, "connect", lambda self: (opened.append(self), connect(self))[1]
    )
    target = bytearray(400_000)
    script.answers = [Answer(206, body=bytes(400_000))]
    for _ in range(3):
        backend.get("a", ByteRange(0, 400_000))
        script.answers.insert(0, Answer(200))
        backend.get("empty")
        backend.get("a", ByteRange(0, 400_000), into=[memoryview(target)])
    script.answers = [Answer(404, "NoSuchKey")]
    with pytest.raises(ObjectNotFound):
        backend.get("b")
    script.answers = [Answer(200)]
    backend.put("a", bytes(100_000))
    assert len(opened) == 1


def test_bytes_of_every_request_are_counted(
    backend: S3Backend, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that moves bytes is not given up: so all that move must be seen."""
    made: list[Wait] = []

    class Seen(Wait):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("holdfast.backends.s3.backend.Wait", Seen)
    script.answers = [Answer(206, body=bytes(400_000)), Answer(200, body=bytes(400_000))]
    backend.get("a", ByteRange(0, 400_000), into=[memoryview(bytearray(400_000))])
    backend.get("a")
    script.answers = [page([f"{n:04d}" for n in range(500)])]
    keys_of(backend)
    script.answers = [Answer(200)]
    backend.put("a", bytes(400_000))
    got, whole, listed, put = (wait.moved_bytes for wait in made)
    assert 400_000 < got < 401_000
    assert 400_000 < whole < 401_000
    assert 50_000 < listed < 60_000
    # Without TLS a body is read twice: what is signed is its hash.
    assert 800_000 < put < 801_000


def test_close_and_use_again(moto_url: Callable[[], str]) -> None:
    backend = Metered(open_backend(moto_url()))
    backend.put("a", b"x")
    backend.close()
    assert backend.get("a") == b"x"


# Buffers on their way


def test_send_body_hands_out_every_byte_once() -> None:
    data = os.urandom(700_000)
    cuts = [0, 5, 6, 300_000, 300_001, 300_100, 700_000]
    views = [memoryview(data)[a:b] for a, b in pairwise(cuts)]
    moved: list[int] = []
    body = SendBody(views, moved.append)
    for _ in range(2):
        assert b"".join(iter(lambda: body.read(16384), b"")) == data
        assert body.tell() == len(data) == body.seek(0, os.SEEK_END)
        assert body.seek(0) == 0
    assert sum(moved) == 2 * len(data)
    body.read(1)
    assert body.seek(body.tell()) == body.tell()
    with pytest.raises(OSError, match="start"):
        body.seek(3)


def test_large_buffers_are_not_copied() -> None:
    data = bytearray(1_000_000)
    body = SendBody([memoryview(data)], lambda _: None)
    pieces = list(iter(lambda: body.read(1), b""))
    assert all(isinstance(piece, memoryview) for piece in pieces)
    assert sum(map(len, pieces)) == len(data)


class Dribble:
    def __init__(self, data: bytes, most: int) -> None:
        self._left, self._most = data, most

    def read(self, amt: int | None = None, /) -> bytes:
        taken = self._left[: min(amt or self._most, self._most)]
        self._left = self._left[len(taken) :]
        return taken


@pytest.mark.parametrize("most", [1, 7, 1000, 10**6])
def test_fill_takes_what_comes(most: int) -> None:
    data = os.urandom(5000)
    target = bytearray(5000)
    fill(Dribble(data, most), [memoryview(target)[a : a + 13] for a in range(0, 5000, 13)])
    assert target == data
    with pytest.raises(EOFError, match="1 bytes before"):
        fill(Dribble(data[1:], most), [memoryview(target)])
