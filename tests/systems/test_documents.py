"""Programs that do what the documents describe, run as they are: own ones, and the documents' code.

The documents are not part of the repository; without them the second half of these tests is
skipped. Classes of the programs that the documents belong to are stood in for by the few lines that
a user would write.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import formats
from holdfast.formats import thalia
from holdfast.formats.thalia import BrainCheckpoint
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.formats.thalia import container
from holdfast.registry.layouts import import_spec
from tests.support.sameness import assert_same
from tests.systems import own_samples

#: Environment variable: the folder with the documents; by default one beside the checkout.
VARIABLE = "HOLDFAST_DOCUMENTS"
_DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "seeds"


@pytest.fixture(params=["own", "document"])
def origin(request: pytest.FixtureRequest) -> str:
    """Where the code is from."""
    return str(request.param)


def code_of(name: str) -> list[str]:
    """Return the blocks of Python of a document; skip the test where it is missing."""
    path = Path(os.environ.get(VARIABLE, _DEFAULT)) / f"{name}.md"
    if not path.exists():
        pytest.skip(f"the document {name} is not here ({VARIABLE} names its folder)")
    return re.findall(r"```python\n(.*?)```", path.read_text(errors="replace"), re.DOTALL)


# ADR-004

CONFIG = {"d_model": 4, "dropout": 0.1}
ACCURACY = (0.5, 0.6, 0.55, 0.7, 0.65, 0.72, 0.71, 0.71)
CARD = {
    "description": "a test",
    "dataset": "IMDB",
    "training_date": "2025-10-25",
    "intended_use": "tests",
    "performance": {"accuracy": 0.72},
}


@pytest.fixture
def manager(origin: str) -> Any:
    """The class of `own_samples.py`, and the document's from its text."""
    if origin == "own":
        return own_samples.CheckpointManager
    (code,) = (block for block in code_of("adr004") if "class CheckpointManager" in block)
    names: dict[str, Any] = {
        **{name: getattr(typing, name) for name in ("Any", "Dict", "Optional")},
        "Path": Path,
        "nn": nn,
        "torch": torch,
        "datetime": datetime,
        "sys": sys,
        "socket": socket,
    }
    exec(code, names)
    return names["CheckpointManager"]


def train(manager: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Train as a user of the document's class does."""
    best = 0.0
    for epoch, accuracy in enumerate(ACCURACY, start=1):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        given = model, optimizer, scheduler, epoch
        metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
        manager.save_training_checkpoint(*given, 100 * epoch, metrics, CONFIG)
        if accuracy > best:
            best = accuracy
            manager.save_milestone_checkpoint(*given, metrics, CONFIG, "best_accuracy")
        if epoch % 5 == 0:
            manager.save_milestone_checkpoint(*given, metrics, CONFIG)
    for version in ("1.0.0", "1.0.1"):
        metrics = {"accuracy": best, "loss": 1 - best}
        manager.export_production_checkpoint(model, CONFIG, metrics, version, CARD)


def names(folder: Path) -> dict[str, str]:
    """Return the files of a folder, with the targets of links."""
    return {
        str(one.relative_to(folder)): str(one.readlink()) if one.is_symlink() else ""
        for one in folder.rglob("*")
        if (one.is_symlink() or one.is_file()) and ".holdfast" not in str(one)
    }


def test_the_class_of_adr004_and_its_files_come_and_go(manager: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    train(manager(tmp_path / "in"), model, optimizer, scheduler)
    with holdfast.init(str(tmp_path / "registry")) as reg:
        run = reg.create_run("imdb", preset=import_spec("adr004"))
        taken = run.exchange.import_tree(tmp_path / "in", layout="adr004")
        assert {one.outcome for one in taken} <= {"imported", "there already"}
        assert (run.best().step, run.latest().step) == (6, 8)
        assert run.best().metrics == {"accuracy": 0.72, "loss": 1 - 0.72}
        assert run.releases.latest().version == "1.0.1"
        run.exchange.checkout(tmp_path / "out", layout="adr004")
    assert names(tmp_path / "out") == names(tmp_path / "in")
    theirs = manager(tmp_path / "out")
    for name in names(tmp_path / "out"):
        if name.endswith(".pt"):
            found = theirs.load_checkpoint(tmp_path / "out" / name)
            assert_same(
                found["model_state_dict"],
                formats.read(tmp_path / "in" / name).state["model_state_dict"],
            )
    resumed = theirs.load_checkpoint(tmp_path / "out/training/latest.pt")
    fresh = nn.Linear(4, 4)
    fresh.load_state_dict(resumed["model_state_dict"])
    torch.optim.AdamW(fresh.parameters()).load_state_dict(resumed["optimizer_state_dict"])
    assert torch.equal(fresh.weight, model.weight)


def test_what_the_class_of_adr004_saves_can_be_saved_as_it_is(manager: Any, tmp_path: Path) -> None:
    """The same dict, given to `run.save` in place of `torch.save`."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    theirs = manager(tmp_path / "unused")
    with holdfast.init(str(tmp_path / "registry")) as reg:
        run = reg.create_run("imdb", preset="adr004")
        for epoch, accuracy in enumerate(ACCURACY, start=1):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            checkpoint = {
                "version": "1.0.0",
                "timestamp": datetime.now().isoformat(),
                "git_commit": theirs._get_git_commit(),
                "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
                "scheduler_state_dict": None,
                "epoch": epoch,
                "global_step": 100 * epoch,
                "metrics": {"accuracy": accuracy, "loss": 1 - accuracy},
                "config": CONFIG,
                "metadata": theirs._get_metadata(),
            }
            run.save(checkpoint, step=epoch)
        assert run.best().step == 6
        back = run.latest().load()
        assert_same(back, checkpoint)
        assert type(back["metadata"]["pytorch_version"]) is type(torch.__version__)
        run.exchange.checkout(tmp_path / "out", layout="adr004")
        assert sorted(names(tmp_path / "out")) == [
            *(
                f"milestones/best_{name}_epoch_{epoch:04d}.pt"
                for name, epoch in (
                    *(("accuracy_0.5000", 1), ("accuracy_0.6000", 2), ("accuracy_0.7000", 4)),
                    ("accuracy_0.7200", 6),
                    *(("loss_0.2800", 6), ("loss_0.3000", 4), ("loss_0.4000", 2)),
                    ("loss_0.5000", 1),
                )
            ),
            "milestones/epoch_0005.pt",
            *(f"training/epoch_{n:04d}_step_{100 * n:08d}.pt" for n in (6, 7, 8)),
            "training/latest.pt",
        ]
        for name in names(tmp_path / "out"):
            assert theirs.load_checkpoint(tmp_path / "out" / name)["version"] == "1.0.0"


# Thalia


class Brain:
    """A brain: what the document's program has, as far as its examples need it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.state: dict[str, Any] = {
            "regions": {
                name: {
                    "weights": {"feedforward": torch.randn(200, 300)},
                    "neuron_state": {"membrane": torch.randn(200)},
                    "learning_state": {"bcm_threshold": torch.rand(200)},
                }
                for name in ("cortex_l4", "striatum", "hippocampus")
            },
            "training_steps": 100,
            "metadata": {"growth_history": []},
        }

    def get_full_state(self) -> dict[str, Any]:
        return self.state

    def train(self, stage: int) -> None:
        self.state["regions"]["cortex_l4"]["weights"]["feedforward"][stage, :5] += 1.0
        self.state["training_steps"] += 100


@pytest.fixture
def thalias(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The names that the document's examples use, in a folder of their own."""
    module = types.ModuleType("thalia.io")
    vars(module).update(
        BrainCheckpoint=BrainCheckpoint,
        PRECISION_POLICIES=thalia.POLICIES,
        PrecisionPolicy=thalia.PrecisionPolicy,
    )
    monkeypatch.setitem(sys.modules, "thalia", types.ModuleType("thalia"))
    monkeypatch.setitem(sys.modules, "thalia.io", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    brain = Brain()
    return {
        "origin": origin,
        "brain": brain,
        "given": brain,
        "BrainCheckpoint": BrainCheckpoint,
        "train_stage": lambda brain, stage: brain.train(stage),
    }


def run_example(given: dict[str, Any], *words: str, until: str = "\0") -> None:
    """Run the last example that has some words, up to some others."""
    blocks = own_samples.BRAINS if given["origin"] == "own" else code_of("thalia")
    found = [one for one in blocks if all(word in one for word in words)]
    assert found, words
    exec(found[-1].split(until)[0], given)


def test_examples_of_compression(thalias: dict[str, Any], tmp_path: Path) -> None:
    run_example(thalias, "archive.thalia.zst", "training_checkpoint.thalia.lz4")
    BrainCheckpoint.save(thalias["brain"], "plain.thalia")
    for name in ("archive.thalia.zst", "training_checkpoint.thalia.lz4"):
        assert BrainCheckpoint.validate(name) == (True, [])
        assert_same(thalia.load(name).state["regions"], thalias["brain"].state["regions"])


def test_examples_of_mixed_precision(thalias: dict[str, Any]) -> None:
    run_example(thalias, "efficient.thalia.zst", "conductances='fp16'")
    BrainCheckpoint.save(thalias["brain"], "plain.thalia")
    assert Path("efficient.thalia").stat().st_size < 0.52 * Path("plain.thalia").stat().st_size
    weights = thalias["state"]["regions"]["striatum"]["weights"]["feedforward"]
    assert weights.dtype == torch.float32  # the example says: loads as FP32
    kept = formats.read("custom.thalia").state["regions"]["striatum"]["neuron_state"]["membrane"]
    assert kept.dtype == torch.float32
    run_example(thalias, "patterns=")
    stored = formats.read("checkpoint.thalia").state["regions"]["striatum"]
    assert stored["weights"]["feedforward"].dtype == torch.float16
    assert stored["neuron_state"]["membrane"].dtype == torch.float32
    assert thalias["brain"].regions["striatum"]["weights"]["feedforward"].dtype == torch.float32


def test_examples_of_deltas(thalias: dict[str, Any]) -> None:
    run_example(thalias, "stage3.delta.thalia.zst", "train_stage")
    whole = Path("checkpoints/stage0.thalia").stat().st_size
    assert Path("checkpoints/stage3.delta.thalia.zst").stat().st_size < 0.05 * whole  # "95-99 %"
    found = thalias["brain"]  # the example's last line has loaded it
    assert found["training_steps"] == 300


def test_examples_of_inspection(thalias: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    brain = thalias["brain"]
    event = {"step": 10_000, "region": "cortex_l4", "neurons_added": 100}
    brain.state["metadata"]["growth_history"].append(event)
    BrainCheckpoint.save(brain, "checkpoints/stage2.thalia")
    run_example(thalias, "BrainCheckpoint.info", "Growth events")
    assert capsys.readouterr().out.splitlines() == [
        "Neurons: 600",
        "Training steps: 100",
        "Growth events: 1",
        "  Step 10000: cortex_l4 +100",
    ]


def test_examples_of_single_regions(
    thalias: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = thalias["brain"].state["regions"]
    BrainCheckpoint.save(thalias["brain"], "checkpoints/large_brain.thalia")
    read: list[str] = []
    filled = container.filled

    def noted(value: Any, at: Any, tensor: Any) -> Any:
        read.append(str(at))
        return filled(value, at, tensor)

    monkeypatch.setattr(container, "filled", noted)
    run_example(thalias, "regions=['cortex_l4', 'striatum']", "lazy=True", until="prediction")
    lazy = thalias["brain"]
    assert read == ["regions/cortex_l4", "regions/striatum"]
    found = lazy.regions["hippocampus"]  # what follows in the example is the program's own
    assert_same(found, whole["hippocampus"])
    assert_same(dict(lazy.regions), whole)
    assert read == [f"regions/{name}" for name in whole]  # each once
    with pytest.raises(NotFound, match="hippocampus"):
        lazy.regions["hippocampu"]
    with holdfast.init("registry") as reg:  # it can be saved as it is
        saved = reg.create_run("lazy").save(lazy, step=1)
        assert_same(saved.load(only="regions")["regions"], whole)
    again = BrainCheckpoint.load("checkpoints/large_brain.thalia", lazy=True, device="meta")
    assert again.regions["striatum"]["weights"]["feedforward"].device.type == "meta"
    BrainCheckpoint.save(thalias["given"], "checkpoints/large_brain.thalia", {"other": 1})
    with pytest.raises(InvalidInput, match="changed"):
        again.regions["cortex_l4"]


def test_homeostatic_state_can_be_left_out(thalias: dict[str, Any]) -> None:
    brain = thalias["brain"]
    brain.state["regions"]["striatum"]["homeostatic_state"] = {"thresholds": torch.ones(200)}
    for includes in (True, False):
        BrainCheckpoint.save(brain, "a.thalia", include_homeostatic=includes)
        found = BrainCheckpoint.load("a.thalia").regions["striatum"]
        assert ("homeostatic_state" in found) == includes
        assert set(found) >= {"weights", "neuron_state", "learning_state"}
