"""Two programs of one training: with Holdfast, and with the class of ADR-004 and its files.

`native` trains a run to an epoch. `foreign` goes on from `latest.pt`, finds no Holdfast, and waits
for a word after each epoch.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.systems.own_samples import CheckpointManager

RUN, SEED = "bayesian", 4
#: By epoch, from 1: the bests are 1, 2, 4 and 6 by accuracy, and 1, 3 and 7 by loss.
ACCURACY = (0.50, 0.60, 0.58, 0.70, 0.69, 0.72, 0.71, 0.70, 0.69, 0.68)
LOSS = (0.90, 0.95, 0.80, 0.85, 0.81, 0.82, 0.70, 0.75, 0.76, 0.77)
CARD = {
    "description": "Sentiment of reviews",
    "dataset": "IMDB",
    "training_date": "2025-10-25",
    "intended_use": "Sentiment classification",
    "performance": {"accuracy": 0.72},
}


class Training:
    """A small model; the data of an epoch depend on its number alone."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.epoch = 0

    def train(self) -> dict[str, float]:
        """Train for an epoch; return its metrics."""
        self.epoch += 1
        data = torch.Generator().manual_seed(self.epoch)
        for _ in range(3):
            loss = self.model(torch.randn(4, 6, generator=data)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.scheduler.step()
        return {"accuracy": ACCURACY[self.epoch - 1], "loss": LOSS[self.epoch - 1]}

    @property
    def global_step(self) -> int:
        return 3 * self.epoch

    def state(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return what `save_training_checkpoint` of the document saves."""
        return {
            "version": "1.0.0",
            "timestamp": f"2025-10-25T12:00:{self.epoch:02d}",
            "git_commit": None,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "global_step": self.global_step,
            "metrics": metrics,
            "config": {"d_model": 8},
            "metadata": {"device": "CPU", "cuda_version": None},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self.model.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.scheduler.load_state_dict(state["scheduler_state_dict"])
        self.epoch = state["epoch"]


def native(url: str, until: int) -> None:
    """Train a run to an epoch, from its newest checkpoint on."""
    import holdfast

    torch.set_num_threads(1)  # the order of sums must not depend on who else is on the machine
    with holdfast.open(url) as reg:
        run = reg.run(RUN, create=True, preset="adr004", seed=SEED)
        training, restored = Training(), run.restore()
        if restored is not None:
            training.load(restored.state)
        while training.epoch < until:
            metrics = training.train()
            entry = {"step": training.epoch, **metrics}
            run.save(
                training.state(metrics),
                step=training.epoch,
                meta={"by": "native"},
                streams={"training_history": [entry]},
            )


def foreign(folder: Path, until: int, watcher: Connection) -> None:
    """Go on in a folder as a user of the document's class does."""
    torch.set_num_threads(1)
    manager, training = CheckpointManager(folder), Training()
    training.load(manager.load_checkpoint(folder / "training/latest.pt"))
    history, best = folder / "metadata/training_history.json", dict[str, float]()
    for entry in json.loads(history.read_text()):
        best = {"accuracy": max(entry["accuracy"], best.get("accuracy", 0.0)),
                "loss": min(entry["loss"], best.get("loss", 9.0))}  # fmt: skip
    while training.epoch < until:
        metrics = training.train()
        epoch, config = training.epoch, {"d_model": 8}
        given = training.model, training.optimizer, training.scheduler, epoch
        manager.save_training_checkpoint(*given, training.global_step, metrics, config)
        if metrics["accuracy"] > best["accuracy"]:
            manager.save_milestone_checkpoint(*given, metrics, config, "best_accuracy")
        if metrics["loss"] < best["loss"]:
            manager.save_milestone_checkpoint(*given, metrics, config, "best_loss")
        if epoch % 5 == 0:
            manager.save_milestone_checkpoint(*given, metrics, config)
        best = {"accuracy": max(best["accuracy"], metrics["accuracy"]),
                "loss": min(best["loss"], metrics["loss"])}  # fmt: skip
        entries = json.loads(history.read_text())
        history.write_text(json.dumps([*entries, {"step": epoch, **metrics}], indent=2))
        watcher.send(epoch)
        watcher.recv()
    manager.export_production_checkpoint(training.model, {"d_model": 8}, metrics, "1.1.0", CARD)
