from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import Registry
from tests.registry.saving.collective.rows import shard_rows


@pytest.fixture
def reg(tmp_path: Path) -> Registry:
    """A registry with an empty run."""
    made = holdfast.init(tmp_path / "reg")
    made.create_run("run")
    return made


@pytest.fixture
def rows_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Rows` stand for sharded tensors."""
    shard_rows(monkeypatch)
