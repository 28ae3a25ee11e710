"""Files of safetensors, against the library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, NotFound
from tests.support.states import same

TENSORS = {
    "a.weight": torch.randn(3, 4, dtype=torch.bfloat16),
    "b": torch.arange(12).view(3, 4).to(torch.float8_e4m3fn),
    "c": torch.arange(5).to(torch.float8_e5m2),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty((0, 7)),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.tensor([1, -2], dtype=torch.int64),
}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two dicts hold the same tensors, in whichever order."""
    return same(dict(sorted(a.items())), dict(sorted(b.items())))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"b": "é", "a": "1", "c": "\n"}])
def test_round_trip(metadata: dict[str, str] | None, run: Run, tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "in.safetensors", metadata=metadata)
    found = formats.read(tmp_path / "in.safetensors")
    assert found.format == "safetensors"
    assert set(found.state) == ({"model", "metadata"} if metadata else {"model"})
    formats.write(tmp_path / "out.safetensors", run.save(found.state, step=1))
    assert equal(safetensors.torch.load_file(tmp_path / "out.safetensors"), TENSORS)
    assert formats.read(tmp_path / "out.safetensors").state.get("metadata") == metadata


def test_output_is_that_of_the_library_and_does_not_vary(run: Run, tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3, 3), "a": torch.zeros(2)}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    saved = run.save(formats.read(tmp_path / "in.safetensors").state, step=1)
    for name in ("a.safetensors", "b.safetensors"):
        formats.write(tmp_path / name, saved)
        assert (tmp_path / name).read_bytes() == (tmp_path / "in.safetensors").read_bytes()


def test_numpy_arrays_fit(run: Run, tmp_path: Path) -> None:
    saved = run.save({"model": {"w": np.arange(6.0).reshape(2, 3)}}, step=1)
    formats.write(tmp_path / "x.safetensors", saved)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("state", "only", "message"),
    [
        ({"model": {"w": torch.ones(1)}, "optimizer": {"lr": 1}}, None, "--only model"),
        ({"model": {"w": torch.ones(1), "lr": 0.1}}, None, "model/lr"),
        ({"model": {"inner": {"w": torch.ones(1)}}}, None, "model/inner"),
        ({"model": [torch.ones(1)]}, None, "not a dict of tensors"),
        (
            {"model": {"w": torch.ones(1, dtype=torch.complex128)}},
            None,
            "no element type for complex128",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_path(
    state: dict[str, Any], only: list[str] | None, message: str, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleState, match=message):
        formats.write(tmp_path / "x.safetensors", run.save(state, step=1), only=only)
    assert not (tmp_path / "x.safetensors").exists()


def test_one_component_of_several(run: Run, tmp_path: Path) -> None:
    saved = run.save({"model": {"w": torch.ones(1)}, "epoch": 1}, step=1)
    formats.write(tmp_path / "x.safetensors", saved, only=["model"])
    with pytest.raises(NotFound, match="'model'"):
        formats.write(tmp_path / "y.safetensors", saved, only=["modell"])
