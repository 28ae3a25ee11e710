"""The door to every store: options, transports, file systems that are refused, and secrets."""

from __future__ import annotations

import functools
import http.server
import inspect
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import holdfast
from holdfast.backends import (
    AccessDenied,
    Backend,
    ByteRange,
    InvalidLocation,
    ObjectNotFound,
    ReadOnlyStore,
    StorageError,
    StoreUnavailable,
    StoreUnsuitable,
    open_backend,
)
from holdfast.backends.fsspec.file_systems import dialect_of
from holdfast.backends.fsspec.store import FsspecBackend
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.s3.backend import S3Backend
from holdfast.backends.s3.settings import take_options
from holdfast.backends.secrets import hidden
from tests.servers.fixtures import S3Server
from tests.servers.gateway import Gateway
from tests.support.faults import everything_said

SECRET = "SECRET-that-nobody-may-see"
TRANSPORTS = ("boto3", *(["obstore"] if find_spec("obstore") else []), "s3fs")


@pytest.fixture
def options(
    moto_server: S3Server, moto_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What leads to moto; the environment then does not."""
    monkeypatch.setenv("TEST_URL", moto_url())
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    return {"endpoint_url": moto_server.endpoint_url, "key": "test", "secret": SECRET}


@pytest.fixture
def url(options: dict[str, Any]) -> str:
    return os.environ["TEST_URL"]


# S3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_options_lead_to_the_store(url: str, options: dict[str, Any], transport: Any) -> None:
    pytest.importorskip("s3fs")
    written = open_backend(url, options, transport=transport)
    written.put("a", b"x")
    for other in TRANSPORTS:
        assert open_backend(url, options, transport=other).get("a") == b"x"  # type: ignore[arg-type]
    assert SECRET not in written.url + repr(written.__dict__.get("_settings"))


def test_bytes_go_by_boto3_unless_asked(url: str, options: dict[str, Any]) -> None:
    backend = open_backend(url, options)
    assert isinstance(backend, S3Backend)
    assert backend.url == f"{url}?endpoint_url={options['endpoint_url']}"


def test_file_system_object_gives_its_settings(url: str, options: dict[str, Any]) -> None:
    s3fs = pytest.importorskip("s3fs")
    nested = {"client_kwargs": {"region_name": "us-east-1"}, "use_listings_cache": True}
    endpoint_url, key, secret = options.values()
    fs = s3fs.S3FileSystem(False, endpoint_url, key, secret, **nested)
    backend = open_backend(url.removeprefix("s3://"), fs=fs)
    assert isinstance(backend, S3Backend)
    backend.put("a", b"x")
    by_s3fs = open_backend(url, fs=fs, transport="s3fs")
    assert by_s3fs.get("a") == b"x"
    assert by_s3fs._made is not fs  # type: ignore[attr-defined]
    with pytest.raises(InvalidLocation, match="beside a file system object; found key"):
        open_backend(url, {"key": "x"}, fs=fs)


def test_options_of_every_kind_reach_the_client(
    url: str, options: dict[str, Any], gateway: Gateway
) -> None:
    gateway.be_honest()
    gateway.requests.clear()
    given = {
        "username": "test",
        "password": SECRET,
        "token": "token-of-the-session",
        "anon": "false",
        "requester_pays": True,
        "client_kwargs": {"endpoint_url": gateway.url, "region_name": "us-east-1"},
        "config_kwargs": {
            "connect_timeout": 7,
            "user_agent_extra": "from-the-user",
            "s3": {"addressing_style": "path"},
        },
        "s3_additional_kwargs": {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "a-key",
            "StorageClass": "STANDARD_IA",
            "Tagging": "team=vision",
        },
        "use_listings_cache": False,
        "version_aware": False,
    }
    backend = open_backend(url, given)
    backend.put("a", b"x")
    assert backend.put_if_absent("packs/a", b"x")
    backend.get("a")
    backend.stat("a")
    list(backend.list())
    backend.delete("a")
    assert len(gateway.requests) == 6
    for request in gateway.requests:
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers["x-amz-request-payer"] == "requester"
        assert headers["x-amz-security-token"] == "token-of-the-session"
        assert "from-the-user" in headers["user-agent"]
        assert "us-east-1/s3" in headers["authorization"]
        kms = headers.get("x-amz-server-side-encryption-aws-kms-key-id")
        assert kms == ("a-key" if request.operation == "put" else None)
        told = headers.get("x-amz-storage-class"), headers.get("x-amz-tagging")
        is_pack = request is gateway.requests[1]
        assert told == (("STANDARD_IA", "team=vision") if is_pack else (None, None))
    assert backend._client().meta.config.connect_timeout == 7  # type: ignore[attr-defined]


def test_anonymous_requests_are_not_signed(
    url: str, options: dict[str, Any], gateway: Gateway
) -> None:
    gateway.be_honest()
    gateway.requests.clear()
    open_backend(url, {"anon": True, "endpoint_url": gateway.url}).put("a", b"x")
    assert "Authorization" not in gateway.requests[0].headers


def test_profile(
    url: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"
    path.write_text(f"[mine]\naws_access_key_id = test\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    endpoint_url = options["endpoint_url"]
    open_backend(url, {"profile": "mine", "endpoint_url": endpoint_url}).put("a", b"x")
    with pytest.raises(AccessDenied, match="nobody"):
        open_backend(url, {"profile": "nobody", "endpoint_url": endpoint_url}).put("a", b"x")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nonsense": SECRET}, "found nonsense"),
        ({"session": object()}, "found session.*transport='s3fs'"),
        ({"version_aware": True}, "found version_aware"),
        ({"client_kwargs": {"api_version": SECRET}}, r"found client_kwargs\.api_version"),
        ({"client_kwargs": SECRET}, "no mapping"),
        ({"config_kwargs": {"retries": {"max_attempts": 9}}}, r"retries.*HOLDFAST_S3_TIMEOUT"),
        ({"config_kwargs": {"s3": {"odd": SECRET}}}, r"config_kwargs\.s3\.odd"),
        ({"s3_additional_kwargs": {"SSECustomerKey": SECRET}}, "SSECustomerKey"),
        ({"s3_additional_kwargs": {"ExpectedBucketOwner": SECRET}}, "HOLDFAST_S3_BUCKET_OWNER"),
        ({"s3_additional_kwargs": {"StorageClass": "GLACIER"}}, r"StorageClass.*holdfast tier"),
        ({"s3_additional_kwargs": {"StorageClass": SECRET}}, r"found s3_additional_kwargs\.Stor"),
        ({"s3_additional_kwargs": {"Tagging": {"team": SECRET}}}, r"no text.*Tagging"),
        ({"anon": SECRET}, "neither true nor false"),
        ({"endpoint_url": f"http://u:{SECRET}@host"}, "address of a server"),
        (
            {"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}},
            "two values of endpoint_url",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidLocation, match=said) as caught:
        open_backend("s3://bucket/x", given)
    assert SECRET not in everything_said(caught.value)


def test_every_option_of_s3fs_is_known_or_refused() -> None:
    s3fs = pytest.importorskip("s3fs")
    names = set(inspect.signature(s3fs.S3FileSystem.__init__).parameters) - {"self", "kwargs"}
    refused = set()
    for name in names:
        value: object = {} if name.endswith("kwargs") else "true"
        try:
            take_options({name: value}, "s3://bucket")
        except InvalidLocation:
            refused.add(name)
    assert refused == {"session", "version_aware", "local_expiry_check"}


def test_url_and_options_must_agree() -> None:
    with pytest.raises(InvalidLocation, match="two values of region"):
        open_backend("s3://bucket/x?region=a", {"client_kwargs": {"region_name": "b"}})
    backend = open_backend("s3://bucket/x?region=a", {"endpoint_url": "http://host:9000"})
    assert backend.url == "s3://bucket/x?endpoint_url=http://host:9000&region=a"
    assert open_backend("s3a://bucket/x").url == "s3://bucket/x"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scret": SECRET}, r"Did you mean secret\?"),
        ({"client_kwargs": {"regionname": "x"}}, r"Did you mean client_kwargs\.region_name\?"),
        ({"odd": 1}, r"in Python.*transport='s3fs'"),
        ("key=1", "not a mapping; found a str"),
    ],
)
def test_mistyped_option_gets_its_name(given: Any, said: str) -> None:
    with pytest.raises(InvalidLocation, match=said):
        open_backend("s3://bucket/x", given)


def test_s3fs_takes_a_profile() -> None:
    pytest.importorskip("s3fs")
    open_backend("s3://bucket/x", {"profile": "work"}, transport="s3fs")


def test_configuration_of_fsspec_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", "http://host:9000")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://host:9000"})
    assert open_backend("s3://bucket/x").url == "s3://bucket/x?endpoint_url=http://host:9000"


# Stores of our own


def test_folders_and_memory_are_ours(tmp_path: Path) -> None:
    folder = open_backend(tmp_path / "a", fs=LocalFileSystem())
    assert isinstance(folder, LocalBackend)
    assert folder.url == f"file://{tmp_path}/a"
    assert isinstance(open_backend(f"local://{tmp_path}/a"), LocalBackend)
    memory = open_backend("/some/name", fs=MemoryFileSystem())
    assert isinstance(memory, MemoryBackend)
    memory.put("a", b"x")
    assert open_backend("memory://some/name").get("a") == b"x"


@pytest.mark.parametrize("place", ["memory://a", "/tmp/a"])
def test_our_own_stores_have_no_options(place: str) -> None:
    with pytest.raises(InvalidLocation, match="no options; found auto_mkdir"):
        open_backend(place, {"auto_mkdir": True})
    with pytest.raises(InvalidLocation, match="only S3 has a choice"):
        open_backend(place, transport="s3fs")
    with pytest.raises(InvalidLocation, match="boto3 or obstore or s3fs; found 'ftp'"):
        open_backend(place, transport="ftp")  # type: ignore[arg-type]


# Others


@pytest.fixture
def read_only(tmp_path: Path) -> Backend:
    ours = LocalBackend(tmp_path)
    for key in ("a/b", "a/c/d", "a.b", "e"):
        ours.put(key, key.encode())
    return open_backend("", fs=DirFileSystem(str(tmp_path), LocalFileSystem()))


def test_file_system_that_is_not_listed_is_only_read(read_only: Backend, tmp_path: Path) -> None:
    assert read_only.get("a/b") == b"a/b"
    assert read_only.get("a/b", ByteRange(1, 3)) == b"/b"
    assert read_only.stat("a/c/d").size_bytes == 5
    keys = ["a.b", "a/b", "a/c/d", "e"]
    assert [info.key for info in read_only.list() if ".tmp" not in info.key] == keys
    assert [info.key for info in read_only.list("a", limit=2)] == keys[:2]
    assert [info.key for info in read_only.list("a/", delimiter=True)] == ["a/b", "a/c/"]
    assert [info.key for info in read_only.list("a/", start_after="a/b")] == ["a/c/d"]
    assert list(read_only.list("../")) == []
    with pytest.raises(ObjectNotFound):
        read_only.get("a/x")
    for call in (read_only.put, read_only.put_if_absent, lambda key, _: read_only.delete(key)):
        with pytest.raises(ReadOnlyStore, match=r"DirFileSystem can only be read.*two writers win"):
            call("e", b"y")
    assert read_only.get("e") == b"e"


def test_subclass_of_a_listed_class_is_only_read() -> None:
    s3fs = pytest.importorskip("s3fs")

    class Mine(s3fs.S3FileSystem):  # type: ignore[misc]
        pass

    with pytest.raises(ReadOnlyStore, match="Mine can only be read"):
        open_backend("bucket/x", fs=Mine(anon=True)).put("a", b"x")


def test_driver_older_than_the_tested_ones_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr("holdfast.backends.fsspec.file_systems.version", lambda _: "2024.10.0")
    backend = open_backend("bucket/x", fs=s3fs.S3FileSystem(anon=True), transport="s3fs")
    with pytest.raises(ReadOnlyStore, match=r"s3fs is older than 2026\.3"):
        backend.put("a", b"x")


def test_caches_and_chains_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnsuitable, match=r"simplecache, which keeps.*hide new commits"):
        open_backend("zip://a::simplecache::s3://bucket/x")
    for chain in (f"dir::file://{tmp_path}", f"zip::{tmp_path}/x.zip", "zip://a::/b.zip"):
        with pytest.raises(StoreUnsuitable, match=r"open\(PATH, fs=fsspec") as caught:
            open_backend(chain)
        assert "commits" not in str(caught.value)
    holdfast.init(tmp_path / "r", skip_race_probe=True).close()
    archive = shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path, "r")
    fs = fsspec.filesystem("zip", fo=archive)
    assert open_backend("r", fs=fs).get("registry.json"), "the way that the message shows"
    fs = fsspec.filesystem("filecache", target_protocol="file", cache_storage=str(tmp_path))
    with pytest.raises(StoreUnsuitable, match="keeps copies"):
        open_backend("/x", fs=fs)


@pytest.mark.parametrize(
    ("place", "extra"),
    [
        ("az://c/x", "azure"),
        ("abfs://c@a.dfs/x", "azure"),
        ("gs://bucket/x", "gs"),
        ("gcs://bucket/x", "gs"),
        ("s3://bucket/x", "s3"),
    ],
)
def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch, place: str, extra: str) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"install a driver for {name}")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(StoreUnsuitable, match=rf"pip install .*\[{extra}\]'"):
        open_backend(place, transport="s3fs" if extra == "s3" else None)


@pytest.mark.parametrize(
    ("driver", "place", "transport"),
    [("s3fs", "s3://bucket/x", "s3fs"), ("adlfs", "az://c/x", None), ("gcsfs", "gs://b/x", None)],
)
def test_option_that_a_driver_would_ignore_is_refused(
    driver: str, place: str, transport: Any
) -> None:
    pytest.importorskip(driver)
    with pytest.raises(InvalidLocation, match=f"{driver} has no such option.*tokenn") as caught:
        open_backend(place, {"tokenn": SECRET, "asynchronous": False}, transport=transport)
    assert SECRET not in everything_said(caught.value)


def test_the_class_of_gcsfs_that_replaces_objects_is_not_used() -> None:
    gcsfs = pytest.importorskip("gcsfs")
    backend = open_backend("gs://bucket/x", {"token": "anon"})
    assert backend._class is gcsfs.core.GCSFileSystem  # type: ignore[attr-defined]


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=a;AccountKey={SECRET}")
    backend = open_backend("az://container/x", {"blocksize": 1000})
    text = f"refused: {SECRET}"
    with pytest.raises(StorageError) as caught, hidden(lambda: backend._secrets):  # type: ignore[attr-defined]
        raise StorageError(text)
    assert SECRET not in everything_said(caught.value)
    for said in (f"AccountKey={SECRET}", f"{SECRET};;", f"AccountName=a;AccountKey={SECRET};Blob"):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said)
        with pytest.raises(InvalidLocation, match="refuses the location") as refused:
            open_backend("az://container/x")
        assert SECRET not in everything_said(refused.value)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("az://container/x?sig=" + SECRET, r"a '\?' in a URL.*sas_token"),
        ("gs://bucket/x?token=" + SECRET, r"a '\?' in a URL"),
        ("abfs://c:" + SECRET + "@a.dfs/x", "AZURE_STORAGE_CONNECTION_STRING"),
        ("gs://me:" + SECRET + "@bucket/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("sftp://me:" + SECRET + "@host/x", "HOLDFAST_STORAGE_OPTIONS"),
        ("holdfast://run/best", "names files of checkpoints.*URL of the registry"),
    ],
)
def test_refused_url_says_what_to_do(place: str, said: str) -> None:
    with pytest.raises(InvalidLocation, match=said) as caught:
        open_backend(place)
    assert SECRET not in everything_said(caught.value)


def test_object_must_be_a_file_system_of_the_kind_of_the_url() -> None:
    with pytest.raises(InvalidLocation, match="no file system of fsspec; found a str"):
        holdfast.open("bucket/x", fs="s3")
    with pytest.raises(InvalidLocation, match=r"another kind.*expected file://"):
        open_backend("s3://bucket/x", fs=LocalFileSystem())


def test_driver_that_lacks_a_package_or_connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager(LocalFileSystem):
        raised: Exception = ModuleNotFoundError("No module named 'odd'")

        def __init__(self, **options: Any) -> None:
            raise self.raised

    monkeypatch.setattr("fsspec.get_filesystem_class", lambda _: Eager)
    with pytest.raises(StoreUnsuitable, match="not installed; found No module named 'odd'"):
        open_backend("odd://host/x")
    Eager.raised = ConnectionRefusedError("nobody there")
    with pytest.raises(StoreUnavailable, match=r"could not connect.*nobody there"):
        open_backend("odd://host/x")


def test_web_server_is_read(tmp_path: Path) -> None:
    """Its file system tells no sizes in listings, and its paths are URLs."""
    pytest.importorskip("aiohttp")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"xyz")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        backend = open_backend(f"http://127.0.0.1:{server.server_port}")
        assert backend.url == f"http://127.0.0.1:{server.server_port}"
        assert [(info.key, info.size_bytes) for info in backend.list("a/")] == [("a/b", 3)]
        assert backend.get("a/b") == b"xyz"
        server.shutdown()


def test_unknown_scheme_and_options() -> None:
    with pytest.raises(InvalidLocation, match="unknown scheme 'nosuch'"):
        open_backend("nosuch://x")
    with pytest.raises(StorageError, match="Options given: nonsense") as caught:
        open_backend("ftp://127.0.0.1:1/x", {"nonsense": SECRET})
    assert SECRET not in everything_said(caught.value)
    with pytest.raises(InvalidLocation, match="credentials in a URL") as caught:
        open_backend(f"ftp://me:{SECRET}@host/x")
    assert SECRET not in everything_said(caught.value)


def test_secrets_in_errors_of_a_driver_are_hidden(tmp_path: Path) -> None:
    class Telling(LocalFileSystem):
        protocol = "telling"

        def cat_file(self, path: str, **options: Any) -> bytes:
            raise RuntimeError(f"the server at {self.storage_options} refused")

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            raise PermissionError(f"no rights with AccountKey={SECRET}")

    fs = Telling(token=SECRET, nested={"connection": f"Name=x;AccountKey={SECRET};"})
    backend = FsspecBackend(fs, str(tmp_path), dialect_of(fs))
    for call in (backend.get, backend.stat):
        with pytest.raises(StorageError, match=r"\*\*\*") as caught:
            call("a")
        assert SECRET not in everything_said(caught.value)


def test_importing_loads_no_driver(tmp_path: Path) -> None:
    program = (
        "import sys, holdfast, holdfast.backends as b; b.open_backend('memory://x');"
        f"b.open_backend({str(tmp_path)!r});"
        "print([n for n in ('fsspec', 's3fs', 'boto3', 'botocore') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
