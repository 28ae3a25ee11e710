"""A registry in a folder, for processes that open it themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast


@pytest.fixture
def place(tmp_path: Path) -> Path:
    holdfast.init(tmp_path / "reg", skip_race_probe=True).close()
    return tmp_path / "reg"
