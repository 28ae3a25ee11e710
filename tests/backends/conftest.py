"""Make failed assertions of the shipped contract show their values; listings in small pages."""

import pytest

from holdfast.backends.fsspec import store as fsspec_store
from holdfast.backends.s3 import backend as s3

pytest.register_assert_rewrite("holdfast.backends.testing")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask servers for ten keys at a time."""
    for module in (s3, fsspec_store):
        monkeypatch.setattr(module, "_PAGE", 10)
