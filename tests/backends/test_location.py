from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast.backends
from holdfast.backends import InvalidLocation, Location, open_backend, parse
from holdfast.backends.location import redact
from holdfast.backends.memory import MemoryBackend


def test_plain_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parse("a/../b").path == str(tmp_path / "b")
    assert parse(Path("b")).path == str(tmp_path / "b")
    assert parse("~/x").path == "/home/somebody/x"
    assert parse("/a?b#c@d").path == "/a?b#c@d"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///a/b%20c", Location("file", path="/a/b c")),
        ("file://localhost/a", Location("file", path="/a")),
        ("memory://x", Location("memory", "x")),
        ("s3://bucket", Location("s3", "bucket")),
        ("S3://bucket/", Location("s3", "bucket")),
        ("s3://bucket/a/b/", Location("s3", "bucket", "a/b")),
        (
            "s3://bucket/a?endpoint_url=http://127.0.0.1:9000&region=eu-1",
            Location("s3", "bucket", "a", "http://127.0.0.1:9000", "eu-1"),
        ),
    ],
)
def test_url_is_read_and_written(url: str, expected: Location) -> None:
    assert parse(url) == expected
    assert parse(expected.url) == expected


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "empty"),
        ("a\0b", "control"),
        ("nosuch://bucket/x", "s3://"),
        ("nosuch://host/x", "unknown scheme"),
        ("s3:/bucket", "neither a URL"),
        ("s3:bucket/x", "neither a URL"),
        ("gs:bucket/x", "neither a URL"),
        ("s3://", "no bucket"),
        ("s3://[bucket]/x", "brackets"),
        ("memory://a[b]", "brackets"),
        ("s3://bucket/x?endpoint_url=http://[x]", "brackets"),
        ("s3:///prefix", "no bucket"),
        ("s3://b", "not a bucket name"),
        ("s3://bucket:9000/x", "not a bucket name"),
        ("s3://bucket/a//b", "segment"),
        ("s3://bucket/../b", "segment"),
        ("s3://bucket/a#b", "'#'"),
        ("s3://bucket/a?profile=x", "endpoint_url and region"),
        ("s3://bucket/a?region=", "empty"),
        ("s3://bucket/a?region=a&region=b", "twice"),
        ("s3://bucket/a?endpoint_url=ftp://x", "address of a server"),
        ("file://host/a", "this machine"),
        ("file:///a?x=1", "no options"),
        ("file:///a%00b", "NUL"),
        ("memory://", "needs a name"),
        ("memory://a b", "legal key"),
    ],
)
def test_what_names_no_place_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidLocation, match=said.replace("?", r"\?")) as caught:
        open_backend(url)
    assert caught.value.exit_code == 3


def test_a_relative_path_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(InvalidLocation, match="current folder is gone"):
        parse("registry")
    assert parse("/registry") == Location("file", path="/registry")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:SECRET@bucket/x",
        "s3://SECRET@bucket/x",
        "s3://AKIAKEY:se/SECRET/cret@bucket/x",
        "file://user:SECRET@host/x",
        "https://user:SECRET@host/x",
        "s3://bucket/x?aws_secret_access_key=SECRET",
        "s3://bucket/x?endpoint_url=http://u:SECRET@host",
        "gs://u:SECRET@bucket/x",
        "s3:/AKIAKEY:SECRET@bucket",
        "s3:AKIAKEY:SECRET@bucket",
        " s3://AKIAKEY:SECRET@bucket",
        "\u200b's3:/AKIAKEY:SECRET@bucket",
        " sftp://user:SECRET@host/x",
        "az:/container:SECRET@account/x",
        "s3://bucket/x?endpoint_url=http%3A%2F%2Fu%3ASECRET%40host&more=1",
    ],
)
def test_secrets_are_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(InvalidLocation) as caught:
        open_backend(url)
    error = caught.value
    assert "SECRET" not in f"{error!s} {error!r} {error.where} {error.found} {error.__cause__}"
    assert "SECRET" not in redact(f"could not open {url}, sorry")


def test_redaction_shows_the_container_of_azure() -> None:
    url = "abfs://team-data@account.dfs.core.windows.net/x"
    assert redact(url) == url
    assert "SECRET" not in redact("abfs://team:SECRET@account/x")
    assert "team" not in redact("https://team-data@host/x")


def test_redaction_leaves_harmless_text_alone() -> None:
    text = "s3://bucket/a?region=x&endpoint_url=http://h:1 and me@example.org"
    assert redact(text) == text


def test_memory_stores_of_one_name_are_one() -> None:
    open_backend("memory://shared").put("a", b"x")
    assert open_backend("memory://shared").get("a") == b"x"
    assert list(open_backend("memory://other").list()) == []
    assert list(MemoryBackend().list()) == []


def test_import_is_light() -> None:
    code = (
        "import sys, holdfast.backends; "
        "print({'boto3', 'botocore', 'fsspec', 's3fs', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_missing_sdk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    for name in ("holdfast.backends.s3.backend", "holdfast.backends.s3.client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(holdfast.backends.StoreUnsuitable, match=r"boto3.*pip install .*\[s3\]"):
        open_backend("s3://bucket")


def test_exported_names_are_sorted_and_exist() -> None:
    assert holdfast.backends.__all__ == sorted(holdfast.backends.__all__)
    assert len(holdfast.backends.__all__) <= 20
    assert all(hasattr(holdfast.backends, name) for name in holdfast.backends.__all__)
