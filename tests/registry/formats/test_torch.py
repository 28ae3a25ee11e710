"""Files of torch: what goes in is what comes out, optimizers and odd element types included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput
from tests.support.states import same

Params = Any
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.01),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "lbfgs": torch.optim.LBFGS,
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
}


def round_trip(run: Run, folder: Path, state: dict[str, Any]) -> Any:
    torch.save(state, folder / "in.pt")
    found = formats.read(folder / "in.pt")
    assert found.format == "torch"
    saved = run.save(found.state, step=1)
    written = formats.write(folder / "out.pt", saved)
    assert written.size_bytes == (folder / "out.pt").stat().st_size
    return torch.load(folder / "out.pt", weights_only=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_optimizers(name: str, run: Run, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = OPTIMIZERS[name](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 5)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    assert same(state, round_trip(run, tmp_path, state))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool]
)
def test_element_types(dtype: torch.dtype, run: Run, tmp_path: Path) -> None:
    state = {
        "model": {
            "many": torch.arange(300).to(dtype),
            "scalar": torch.ones((), dtype=dtype),
            "empty": torch.empty((0, 3), dtype=dtype),
        }
    }
    assert same(state, round_trip(run, tmp_path, state))


def test_bare_state_dict_comes_back_bare_and_fits_into_safetensors(
    run: Run, tmp_path: Path
) -> None:
    state = nn.Linear(4, 4).state_dict()
    assert same(state, round_trip(run, tmp_path, state))
    formats.write(tmp_path / "out.safetensors", run.checkpoints()[0])
    back = run.exchange.push(formats.read(tmp_path / "out.safetensors").state, step=2).load()
    assert same(dict(sorted(state.items())), back["model"])


def test_equal_states_give_equal_files(run: Run, tmp_path: Path) -> None:
    saved = run.save({"model": {"w": torch.ones(100)}, "epoch": 1}, step=1)
    for name in ("a.pt", "other_name.pth"):
        formats.write(tmp_path / name, saved)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "other_name.pth").read_bytes()


def test_a_value_that_no_torch_file_can_hold_is_named_with_its_path(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(2)}, "data": {"order": [1, np.arange(3)]}}
    with pytest.raises(IncompatibleState, match=r"data/order/1: .*an array of NumPy.*\.zarr"):
        formats.write(tmp_path / "a.pt", state)


def test_a_file_that_only_code_could_load_is_not_written(run: Run, tmp_path: Path) -> None:
    saved = run.save({"model": {"w": torch.ones(3)}, "where": Path("/x")}, step=1)
    with pytest.raises(IncompatibleState, match=r"pathlib.*`only`"):
        formats.write(tmp_path / "out.pt", saved)
    assert [path.name for path in tmp_path.iterdir()] == ["registry"]
    formats.write(tmp_path / "out.pt", saved, only=["model"])


def test_not_a_dict(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "x.pt")
    with pytest.raises(InvalidInput, match="does not hold a dict"):
        formats.read(tmp_path / "x.pt")
