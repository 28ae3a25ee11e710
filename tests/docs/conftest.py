"""What a newcomer has: a fresh folder, and the command on the PATH."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a fresh folder, and put signals back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("RANK", "WORLD_SIZE", "HOLDFAST_REGISTRY", "HOLDFAST_RUN"):
        # Set first, so that what a page exports goes away with the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)
