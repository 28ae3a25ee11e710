"""Errors of stores: the hint to install an extra is right before a release and after it."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

from holdfast.backends.errors import install_extra


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "'holdfast-registry[ui]'"),
        ({"url": "file:///a", "dir_info": {}}, "'holdfast-registry[ui] @ file:///a'"),
        ({"url": "file:///a.whl", "archive_info": {}}, "'holdfast-registry[ui] @ file:///a.whl'"),
        ({"url": "file:///a", "dir_info": {"editable": True}}, "-e 'file:///a[ui]'"),
        (
            {"url": "https://x/y.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "'holdfast-registry[ui] @ git+https://x/y.git@12ab'",
        ),
    ],
)
def test_an_extra_comes_from_where_holdfast_came(
    monkeypatch: pytest.MonkeyPatch, origin: Any, command: str
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin and json.dumps(origin)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Distribution())
    assert install_extra("ui") == f"Install the extra: pip install {command}."


def test_a_checkout_on_the_path_gets_the_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert install_extra("s3") == "Install the extra: pip install 'holdfast-registry[s3]'."
