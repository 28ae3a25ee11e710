"""The store behind file systems of fsspec: the contract, refusals, forks and secrets."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

import pytest

from holdfast.backends import Backend
from holdfast.backends.fsspec_door import open_file_system
from holdfast.backends.testing import BackendContract
from tests.servers.azurite import Azurite

s3fs = pytest.importorskip("s3fs")


def by_s3fs(url: str) -> Backend:
    options = {"client_kwargs": {"region_name": os.environ["AWS_DEFAULT_REGION"]}}
    fs = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], **options)
    return open_file_system(fs, url)


class TestS3fsOnMoto(BackendContract):
    racy_create = "moto checks for the key and then writes it, in two steps"

    @pytest.fixture
    def backend(self, moto_url: Callable[[], str]) -> Backend:
        return by_s3fs(moto_url())


@pytest.mark.radosgw
class TestS3fsOnRadosgw(BackendContract):
    @pytest.fixture
    def backend(self, radosgw_url: Callable[[], str]) -> Backend:
        return by_s3fs(radosgw_url())


class TestAdlfsOnAzurite(BackendContract):
    @pytest.fixture
    def backend(self, azurite: Azurite) -> Backend:
        adlfs = pytest.importorskip("adlfs")
        fs = adlfs.AzureBlobFileSystem(connection_string=azurite.connection_string)
        container = f"test-{secrets.token_hex(6)}"
        fs.mkdir(container)
        return open_file_system(fs, f"az://{container}/some/prefix")
