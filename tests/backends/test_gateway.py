"""No answer that somebody else gave is believed: a lying gateway before each operation of S3.

A folder and the memory of a process have nothing in between, so there is nothing to try there.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from holdfast.backends import (
    Backend,
    ByteRange,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
    parse,
)
from holdfast.backends.patience import Patience
from holdfast.backends.s3.backend import S3Backend
from tests.servers.gateway import PAGE, Answer, Gateway, Lie, Request

PATIENCE = Patience(attempts=2, first_s=0.001)
BODY = b"0123456789"
HTML = {"Content-Type": "text/html"}
# What a web server says with a page of its own.
WEB_SERVER = HTML | {
    "ETag": '"65a5b0c4-4e"',
    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    "Accept-Ranges": "bytes",
}


@pytest.fixture
def url(moto_url: Callable[[], str], gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> str:
    made = moto_url()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    return made


@pytest.fixture(params=["boto3", "obstore"])
def backend(
    url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Backend]:
    made = S3Backend
    if request.param == "obstore":
        small = pytest.importorskip("holdfast.backends.s3.small", exc_type=ImportError)
        monkeypatch.setattr(small, "_REST_S", 0.0)
        made = small.SmallObjectsBackend
    backend = made(parse(url), PATIENCE)
    backend.put("a", BODY)
    backend.put("dir/b", b"another 10")
    yield backend
    backend.close()


def fixed(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> Lie:
    return lambda request, ask: Answer(status, dict(headers or {}), body)


def cut_short(request: Request, ask: Callable[[Request], Answer]) -> Answer:
    """Give the first half of what the store says, as if that were all."""
    said = ask(request)
    headers = {n: v for n, v in said.headers.items() if n.lower() != "content-length"}
    return Answer(said.status, headers, said.body[: len(said.body) // 2])


def of_another_prefix(request: Request, ask: Callable[[Request], Answer]) -> Answer:
    found = request.path.replace("some%2Fprefix", "none%2Fprefix")
    assert found != request.path
    return ask(replace(request, path=found))


def of_another_bucket(request: Request, ask: Callable[[Request], Answer]) -> Answer:
    said = ask(request)
    return Answer(said.status, {}, said.body.replace(b"<Name>test-", b"<Name>other-"))


def of_another_range(request: Request, ask: Callable[[Request], Answer]) -> Answer:
    return ask(replace(request, headers=rangeless(request) | {"Range": "bytes=0-3"}))


def without_the_range(request: Request, ask: Callable[[Request], Answer]) -> Answer:
    return ask(replace(request, headers=rangeless(request)))


def rangeless(request: Request) -> dict[str, str]:
    return {n: v for n, v in request.headers.items() if n.lower() != "range"}


def compressed(request: Request, ask: Callable[[Request], Answer]) -> Answer:
    said = ask(request)
    headers = {n: v for n, v in said.headers.items() if n.lower() != "content-length"}
    return Answer(
        said.status, headers | {"Content-Encoding": "gzip"}, gzip.compress(said.body, mtime=0)
    )


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()


_LISTED = (
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key><Size>1</Size>"
    b"<LastModified>TIME</LastModified></Contents></ListBucketResult>"
)
LIES: dict[str, Lie] = {
    "200 page": fixed(200, PAGE, HTML),
    "200 page of a web server": fixed(200, PAGE, WEB_SERVER),
    "206 page of a web server": fixed(206, PAGE, WEB_SERVER | {"Content-Range": "bytes 0-77/78"}),
    "200 empty": fixed(200),
    "200 empty of a web server": fixed(200, b"", WEB_SERVER),
    "200 truncated listing": fixed(200, b"<ListBucketResult><Name>test-"),
    "200 error": fixed(200, error("NoSuchKey")),
    "204": fixed(204),
    "404 empty": fixed(404),
    "404 page": fixed(404, PAGE, HTML),
    "404 truncated": fixed(404, error("NoSuchKey")[:30]),
    "403 page": fixed(403, PAGE, HTML),
    "401 page": fixed(401, PAGE, HTML),
    "302 page": fixed(302, PAGE, HTML | {"Location": "http://login.example/?user=me"}),
    "301 page": fixed(301, PAGE, HTML | {"Location": "http://login.example/"}),
    "307 empty": fixed(307, b"", {"Location": "http://127.0.0.1:1/"}),
    "412 empty": fixed(412),
    "412 page": fixed(412, PAGE, HTML),
    "409 empty": fixed(409),
    "413 page": fixed(413, PAGE, HTML),
    "416 empty": fixed(416),
    "502 page": fixed(502, PAGE, HTML),
    "503 page": fixed(503, PAGE, HTML),
    # The parsers of the SDK fail at these.
    "403 error in parts": fixed(403, error("a<b/>c")),
    "400 error that nests too deeply": fixed(400, error("<a>" * 10_000 + "</a>" * 10_000)),
    "200 listing of no time": fixed(200, _LISTED.replace(b"TIME", b"inf")),
    "200 listing of a time too large": fixed(200, _LISTED.replace(b"TIME", b"9" * 400)),
}
CALLS: dict[str, tuple[str, Callable[[Backend], object]]] = {
    "get": ("get", lambda b: b.get("a")),
    "get of what is absent": ("get", lambda b: b.get("no")),
    "get range": ("get", lambda b: b.get("a", ByteRange(3, 7))),
    "get into": ("get", lambda b: b.get("a", ByteRange(3, 7), into=[memoryview(bytearray(4))])),
    "put": ("put", lambda b: b.put("new", b"x")),
    "put large": ("put", lambda b: b.put("new", bytes(70_000))),
    "put_if_absent": ("put", lambda b: b.put_if_absent("new", b"x")),
    "put_if_absent large": ("put", lambda b: b.put_if_absent("new", bytes(70_000))),
    "stat": ("head", lambda b: b.stat("a")),
    "list": ("list", lambda b: list(b.list())),
    "list folders": ("list", lambda b: list(b.list(delimiter=True))),
    "list none": ("list", lambda b: list(b.list("no"))),
    "delete": ("delete", lambda b: b.delete("a")),
    "versioning": ("versioning", lambda b: b.keeps_versions()),
}
# What obstore tries once, before boto3 makes its attempts.
SMALL = {"get", "get of what is absent", "get range", "get into", "put", "put_if_absent"}
# An empty 204 is the whole answer to a delete: nothing more could prove it.
BELIEVED = {("delete", "204")}


def by_obstore(request: Request) -> bool:
    """Return whether obstore sent a request: it is the library below it that says so."""
    said = {name.lower(): value for name, value in request.headers.items()}
    return said["user-agent"].startswith("object_store/")


@pytest.mark.parametrize("name", CALLS)
def test_answer_in_the_place_of_the_store(gateway: Gateway, backend: S3Backend, name: str) -> None:
    operation, call = CALLS[name]
    for said, lie in LIES.items():
        if (operation, said) in BELIEVED:
            continue
        gateway.requests.clear()
        gateway.lie(lambda request: request.operation == operation, lie)
        with pytest.raises(StorageError) as caught:
            call(backend)
        assert not isinstance(caught.value, ObjectNotFound | EOFError), (said, caught.value)
        if isinstance(caught.value, StoreUnavailable):
            asked = [by_obstore(r) for r in gateway.requests if r.operation == operation]
            first = [True] if type(backend) is not S3Backend and name in SMALL else []
            assert asked == [*first, False, False], said
    gateway.be_honest()
    assert [info.key for info in backend.list()] == ["a", "dir/b"]


@pytest.mark.parametrize("name", ["put", "put_if_absent", "get", "list", "delete"])
def test_page_is_told_in_plain_words(gateway: Gateway, backend: S3Backend, name: str) -> None:
    operation, call = CALLS[name]
    gateway.lie(lambda request: request.operation == operation, LIES["200 page"])
    with pytest.raises(StoreUnavailable) as caught:
        call(backend)
    told = str(caught.value)
    assert "something between here and the store answered the request" in told
    assert "text/html" in told
    # The body of a get is not read unless it is the object's.
    assert name == "get" or "Please log in" in told
    # Only a write leaves a doubt about what was done.
    assert ("whether the write was done" in told) == (operation in ("put", "delete"))


def test_page_cannot_speak_to_the_terminal(gateway: Gateway, backend: S3Backend) -> None:
    nasty = b"<html><title>\x1b[2Jgone\xe2\x80\xae\x00</title></html>"
    gateway.lie(lambda _: True, fixed(404, nasty, {"Content-Type": "text/\x1b[2Jhtml"}))
    with pytest.raises(StoreUnavailable, match="gone") as caught:
        backend.get("a")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("lie", "name"),
    [
        (cut_short, "get range"),
        (cut_short, "list"),
        (cut_short, "list none"),
        (cut_short, "versioning"),
        (of_another_prefix, "list"),
        (of_another_prefix, "list folders"),
        (of_another_bucket, "list"),
        (of_another_bucket, "list none"),
        (of_another_range, "get range"),
        (of_another_range, "get into"),
        (without_the_range, "get range"),
        (compressed, "get"),
        (compressed, "get range"),
        (compressed, "list"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_answer_to_another_question(
    gateway: Gateway, backend: S3Backend, lie: Lie, name: str
) -> None:
    operation, call = CALLS[name]
    gateway.lie(lambda request: request.operation == operation, lie)
    with pytest.raises(StoreUnavailable, match="something between"):
        call(backend)


def test_create_that_proved_nothing_is_read_back(gateway: Gateway, backend: S3Backend) -> None:
    for said in ("200 page", "412 empty", "404 page"):
        # The request goes through, and its answer is lost.
        gateway.lie(
            lambda request: request.operation == "put",
            lambda request, ask, said=said: (ask(request), LIES[said](request, ask))[1],  # type: ignore[misc]
        )
        assert backend.put_if_absent(f"new-{said[:3]}", b"x") is False
        gateway.be_honest()
        assert backend.get(f"new-{said[:3]}") == b"x"


def test_create_that_was_not_passed_on_is_sent_again(gateway: Gateway, backend: S3Backend) -> None:
    left = [LIES["412 empty"]]
    gateway.lie(
        lambda request: request.operation == "put" and bool(left), lambda r, a: left.pop()(r, a)
    )
    assert backend.put_if_absent("new", b"x") is True
    assert backend.get("new") == b"x"
    assert backend.put_if_absent("new", b"y") is False


@pytest.mark.parametrize("said", ["404 empty", "200 page"])
def test_lie_that_ends_is_outlasted(gateway: Gateway, backend: S3Backend, said: str) -> None:
    for name, (operation, call) in CALLS.items():
        backend.delete("new")
        gateway.requests.clear()
        left = [LIES[said]]
        gateway.lie(
            lambda request, operation=operation, left=left: (  # type: ignore[misc]
                request.operation == operation and bool(left)
            ),
            lambda r, a, left=left: left.pop()(r, a),  # type: ignore[misc]
        )
        with suppress(ObjectNotFound):
            call(backend)
        asked = [request for request in gateway.requests if request.operation == operation]
        assert len(asked) == 2, name
        gateway.be_honest()
    assert [info.key for info in backend.list()] == ["dir/b"]


def test_body_of_another_object_has_the_right_length(gateway: Gateway, backend: S3Backend) -> None:
    """Nothing in an answer tells this; a hash does, which every reader above checks."""
    gateway.lie(
        lambda request: request.operation == "get",
        lambda request, ask: ask(replace(request, path=request.path.replace("/a", "/dir/b"))),
    )
    assert backend.get("a") == b"another 10"


def test_bucket_that_a_page_denies(gateway: Gateway, backend: S3Backend) -> None:
    gateway.lie(lambda _: True, fixed(404, PAGE, HTML))
    for call in (lambda: backend.stat("a"), lambda: list(backend.list()), lambda: backend.get("a")):
        with pytest.raises(StoreUnavailable):
            call()
