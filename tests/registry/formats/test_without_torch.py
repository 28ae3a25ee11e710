"""Files of safetensors and Zarr are stored and written without torch; the ids are those with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.registry import formats

#: Pushes files and pulls checkpoints in a process that has neither torch nor safetensors.
PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["safetensors"] = None
import holdfast
from holdfast.registry import formats

registry, source, target = sys.argv[1:]
with holdfast.open(registry) as opened:
    run = opened.run("run")
    formats.write(target, run.exchange.push(formats.read(source, portable=True).state, step=2))
    print(run.latest().digest.hex())
"""


def pushed_without_torch(registry: Path, source: Path, target: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, registry, source, target],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def test_safetensors(registry: Path, tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(300, 40, dtype=torch.bfloat16),
        "a": torch.arange(7),
        "tiny": torch.zeros(3, 0).to(torch.float8_e4m3fn),
    }
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    safetensors.torch.save_file(tensors, source, metadata={"format": "pt"})
    with holdfast.init(registry, skip_race_probe=True) as opened:
        state = {
            "model": safetensors.torch.load_file(source),
            "metadata": {"format": "pt"},
        }
        state["model"] = dict(sorted(state["model"].items()))
        expected = opened.create_run("run").exchange.push(state, step=1).digest
    assert pushed_without_torch(registry, source, target) == expected.hex()
    assert target.read_bytes() == source.read_bytes()


def test_zarr(registry: Path, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    state = {
        "model": {"w": torch.randn(30, 4, dtype=torch.bfloat16), "step": torch.tensor(3)},
        "ids": np.arange(9),
    }
    with holdfast.init(registry, skip_race_probe=True) as opened:
        checkpoint = opened.create_run("run").exchange.push(state, step=1)
        formats.write(tmp_path / "in.zarr", checkpoint)
    found = pushed_without_torch(registry, tmp_path / "in.zarr", tmp_path / "out.zarr")
    assert found == checkpoint.digest.hex()


def test_zarr_with_sparse_tensors_still_comes_back(registry: Path, tmp_path: Path) -> None:
    state = {"model": {"s": torch.eye(4).to_sparse(), "w": torch.ones(3)}}
    with holdfast.init(registry, skip_race_probe=True) as opened:
        run = opened.create_run("run")
        checkpoint = run.exchange.push(state, step=1)
        formats.write(tmp_path / "x.zarr", checkpoint)
        found = run.exchange.push(formats.read(tmp_path / "x.zarr").state, step=2)
    assert found.digest == checkpoint.digest
