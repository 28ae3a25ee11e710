"""What `keeps_versions` says of a bucket is what becomes of the objects that are deleted there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest

from holdfast.backends import Backend, open_backend
from holdfast.backends.s3.backend import S3Backend

_RADOSGW = pytest.param("radosgw", marks=pytest.mark.radosgw)


@pytest.fixture(params=["moto", _RADOSGW])
def backend(request: pytest.FixtureRequest) -> Backend:
    fresh_url: Callable[[], str] = request.getfixturevalue(f"{request.param}_url")
    return open_backend(fresh_url())


@pytest.fixture
def bucket(backend: S3Backend) -> Any:
    """The bucket itself, past the backend."""
    # A session of one's own: that of the module would keep the keys of another server.
    return boto3.session.Session().resource("s3").Bucket(backend._bucket)


def _kept_bytes(bucket: Any) -> int:
    """Return the bytes of what the bucket holds and no listing shows."""
    versions = bucket.object_versions.all()
    return sum(v.size for v in versions if not v.is_latest and v.size is not None)


def test_bucket_without_versions_frees_what_is_deleted(backend: Backend, bucket: Any) -> None:
    backend.put("a", b"12345")
    backend.put("a", b"123456")
    backend.delete("a")
    assert backend.keeps_versions() is False
    assert _kept_bytes(bucket) == 0


def test_bucket_with_versions_keeps_what_is_deleted(backend: Backend, bucket: Any) -> None:
    bucket.Versioning().enable()
    assert backend.keeps_versions() is True
    backend.put("a", b"12345")
    backend.put("a", b"123456")
    backend.delete("a")
    backend.delete("a")
    assert list(backend.list()) == []
    assert _kept_bytes(bucket) == 11


# moto deletes what was put before the suspension for good, S3 and radosgw do not.
@pytest.mark.parametrize("backend", [_RADOSGW], indirect=True)
def test_suspended_bucket_keeps_some_of_what_is_deleted(backend: Backend, bucket: Any) -> None:
    bucket.Versioning().enable()
    backend.put("before", b"12345")
    bucket.Versioning().suspend()
    backend.put("since", b"123456")
    assert backend.keeps_versions() is None
    for key in ("before", "since"):
        backend.delete(key)
    assert list(backend.list()) == []
    assert _kept_bytes(bucket) == 5


def test_nothing_stays_unfinished(backend: Backend, bucket: Any) -> None:
    """Why a bucket has nothing to clear."""
    backend.put("a", bytes(9 * 2**20))
    assert list(bucket.multipart_uploads.all()) == []
    assert backend.clear_unfinished(0.0) == 0
