"""Registries that many processes share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A registry in a folder."""
    url = str(tmp_path / "registry")
    holdfast.init(url).close()
    return url


@pytest.fixture
def bucket(radosgw_url: Callable[[], str]) -> str:
    """A registry on a real S3 server."""
    url = radosgw_url()
    holdfast.init(url).close()
    return url
