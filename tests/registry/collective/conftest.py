from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Registry
from tests.registry.collective.fleet import Fleet
from tests.registry.collective.rows import shard_rows


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Processes that are ranks; started at their first use."""
    made = Fleet()
    yield made
    made.close()


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
