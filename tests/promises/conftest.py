"""The stores on which a promise is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.backends import Backend, open_backend
from holdfast.backends.local.backend import LocalBackend
from holdfast.registry.store.store import create_config
from tests.support.stores import Scratch


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A store with an empty registry: in a folder, in memory, in a bucket of an emulator."""
    if request.param == "folder":
        backend: Backend = LocalBackend(tmp_path / "registry")
    elif request.param == "memory":
        backend = Scratch()
    else:
        url: Callable[[], str] = request.getfixturevalue("moto_url")
        backend = open_backend(url())
    create_config(backend, "skipped")
    return backend
