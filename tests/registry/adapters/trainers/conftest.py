"""The fixtures of the tests of integrations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.registry.adapters.trainers.children import Children, Ranks, running


@pytest.fixture(scope="session")
def children() -> Iterator[Children]:
    """Run functions in processes of their own."""
    yield from running()


@pytest.fixture
def reg(tmp_path: Path) -> Iterator[holdfast.Registry]:
    """A registry in a folder, which children open by its path."""
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as opened:
        yield opened


@pytest.fixture
def ranks(reg: holdfast.Registry, children: Children) -> Ranks:
    """Run functions in processes that train together."""
    return Ranks(reg.url, children)
