from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

import holdfast
from tests.registry.cli.calling import Call
from tests.support.commands import invoke

#: A run is overdue a minute after its last save.
_FRESH_S = 20.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_REGISTRY", "HOLDFAST_RUN", "HOLDFAST_DEBUG", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """The registry that every test gets a copy of; another is made before its run is overdue."""
    kept: list[tuple[float, str]] = []

    def newest() -> str:
        if not kept or time.monotonic() - kept[-1][0] > _FRESH_S:
            kept.append((time.monotonic(), make_registry(tmp_path_factory.mktemp("made"))))
        return kept[-1][1]

    return newest


@pytest.fixture
def url(made: Callable[[], str], tmp_path: Path) -> str:
    """A registry with a run `demo` of two checkpoints, the second one best and tagged."""
    return str(shutil.copytree(made(), tmp_path / "reg"))


def make_registry(folder: Path) -> str:
    """Make the registry of the fixture `url` in a folder; return its path."""
    with holdfast.init(folder / "reg", skip_race_probe=True) as opened:
        run = opened.create_run(
            "demo",
            seed=42,
            monitor=holdfast.Monitor(metric="loss", mode="min"),
            config={"lr": 0.1},
        )
        weights = np.arange(600, dtype=np.float32)
        first = {"model": {"w": weights}, "epoch": 1}
        run.save(first, step=10, metrics={"loss": 0.5, "nan": float("nan")}, meta={"note": "hi"})
        second = {"model": {"w": weights + 1}, "epoch": 2}
        run.pins.tags.set("keeper", run.save(second, step=20, phase=2, metrics={"loss": 0.25}))
    return str(folder / "reg")


@pytest.fixture
def call(url: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command on that registry; fail unless it exits with `status`."""
    monkeypatch.setenv("HOLDFAST_REGISTRY", url)

    def call(*arguments: object, status: int = 0) -> Result:
        result = invoke(*arguments)
        assert result.exit_code == status, result.output
        return result

    return call


@pytest.fixture
def call_json(call: Call) -> Callable[..., Any]:
    """Run a command with `--json`; return what it prints."""

    def call_json(*arguments: object, status: int = 0) -> Any:
        def refuse(name: str) -> Any:
            raise AssertionError(f"not JSON: {name}")

        return json.loads(call(*arguments, "--json", status=status).stdout, parse_constant=refuse)

    return call_json


@pytest.fixture
def torch_file(tmp_path: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 1}, tmp_path / "model.pt")
    return tmp_path / "model.pt"
