from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of an empty registry."""
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as opened:
        yield opened.create_run("run")
