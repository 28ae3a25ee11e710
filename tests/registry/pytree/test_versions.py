"""The version of torch in a state: a str of a class of its own, which comes back as what it was."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import holdfast
from holdfast.registry import formats, pytree
from holdfast.registry.errors import Malformed, UnsupportedValue
from holdfast.registry.pytree import decoding, libraries
from tests.support.states import same


def training_checkpoint() -> dict[str, Any]:
    """Return the sample of ADR-004, "Training Checkpoints", with its own expressions."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    config = {"d_model": 8, "n_heads": 2, "vocab_size": 40, "k_permutations": 4, "dropout": 0.1}
    device = torch.device("cpu")
    return {
        "version": "1.0.0",
        "timestamp": datetime.now().isoformat(),
        "git_commit": "0" * 40,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict() if scheduler else None,
        "epoch": 10,
        "global_step": 12345,
        "best_metric": 0.9234,
        "metrics_history": {"train_loss": [0.5, 0.4], "val_accuracy": [0.9, 0.92]},
        "config": {
            "d_model": config["d_model"],
            "n_heads": config["n_heads"],
            "vocab_size": config["vocab_size"],
            "k_permutations": config["k_permutations"],
            "dropout": config["dropout"],
        },
        "dataset": {"name": "imdb", "split": "train", "preprocessing": {"max_length": 512}},
        "metadata": {
            "device": str(device),
            "cuda_version": torch.version.cuda if torch.cuda.is_available() else None,
            "pytorch_version": torch.__version__,
            "training_time": 3600.5,
        },
    }


def test_the_sample_of_adr_004_is_saved_as_written(tmp_path: Path) -> None:
    state = training_checkpoint()
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as opened:
        saved = opened.create_run("run").save(state, step=10)
        found = opened.run("run").restore().state
        formats.write(tmp_path / "out.pt", saved)
    assert same(found, state)
    assert type(found["metadata"]["pytorch_version"]) is TorchVersion
    assert found["metadata"]["pytorch_version"] >= "2.0"
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert type(loaded["metadata"]["pytorch_version"]) is str
    assert loaded["metadata"]["pytorch_version"] == torch.__version__
    loaded["metadata"]["pytorch_version"] = torch.__version__
    assert same(loaded, state)


@pytest.mark.parametrize("payload", [1, None, ["2.0"], "2" * 1001, "\ud800"])
def test_bad_versions_are_malformed(payload: Any) -> None:
    with pytest.raises(Malformed):
        pytree.unflatten_component({"tver": payload}, ())


def test_a_reader_that_does_not_know_the_tag_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(decoding.ATOMS, "tver")
    monkeypatch.setattr(libraries, "_loaded", set(libraries._WRAPPERS))
    with pytest.raises(Malformed, match="unknown tag"):
        pytree.unflatten_component({"tver": "2.0"}, ())


class Text(str):
    """Another class of strings."""


@pytest.mark.parametrize("value", [Text("x"), type("Whole", (int,), {})(3)])
def test_other_subclasses_are_refused_with_the_adapter_in_the_hint(value: object) -> None:
    with pytest.raises(UnsupportedValue, match="register_adapter"):
        pytree.flatten({"a": value})
