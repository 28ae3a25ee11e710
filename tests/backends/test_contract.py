"""Every backend of ours under the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from holdfast.backends import Backend, open_backend
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.testing import BackendContract
from holdfast.backends.wrappers import Metered


class TestMemory(BackendContract):
    race_keys = 200

    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend()


class TestLocal(BackendContract):
    race_keys = 60
    clock_slack_s = 1.0

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return LocalBackend(tmp_path / "not" / "yet" / "there")


class TestWrapped(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return Metered(MemoryBackend())


# Where the real server is installed, the check asks that one, and the soak moto too.
@(pytest.mark.soak if which("radosgw") else pytest.mark.usefixtures())
class TestMoto(BackendContract):
    racy_create = "moto checks for the key and then writes it, in two steps"
    many = 25

    @pytest.fixture
    def backend(self, moto_url: Callable[[], str], small_pages: None) -> Backend:
        return open_backend(moto_url())


@pytest.mark.radosgw
class TestRadosgw(BackendContract):
    many = 25

    @pytest.fixture
    def backend(self, radosgw_url: Callable[[], str], small_pages: None) -> Backend:
        return open_backend(radosgw_url())


@pytest.mark.radosgw
class TestRadosgwByObstore(BackendContract):
    many = 25

    @pytest.fixture
    def backend(self, radosgw_url: Callable[[], str], small_pages: None) -> Iterator[Backend]:
        pytest.importorskip("obstore")
        backend: Any = open_backend(radosgw_url(), transport="obstore")
        assert list(backend.list()) == [], "boto3 finds the address of the bucket"
        yield backend
        assert not backend._rests_until_s, "an answer through obstore proved nothing"


@pytest.mark.soak
@pytest.mark.radosgw
class TestRadosgwInFullPages(BackendContract):
    @pytest.fixture
    def backend(self, radosgw_url: Callable[[], str]) -> Backend:
        return open_backend(radosgw_url())
