"""A training as ADR-004 describes it: a small transformer, a save every epoch, releases by hand."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast import Checkpoint, Run
from holdfast.registry.face.registry import Registry
from tests.systems.life import Mortal as Story

SEED, RUN, EPOCHS = 4, "bayesian_transformer", 13
#: Validation by epoch, from 1: each new best of either is a milestone, and every fifth epoch is.
ACCURACY = (0.50, 0.60, 0.58, 0.70, 0.69, 0.65, 0.72, 0.71, 0.70, 0.69, 0.68, 0.67, 0.66)
LOSS = (0.90, 0.80, 0.85, 0.60, 0.62, 0.70, 0.65, 0.66, 0.50, 0.69, 0.68, 0.70, 0.71)
MILESTONES = [1, 2, 4, 5, 7, 9, 10]
#: The epoch whose save processes die in.
DEADLY = 6
CARD = {
    "description": "Sentiment of reviews, with its uncertainty",
    "dataset": "IMDB",
    "training_date": "2025-10-25",
    "intended_use": "Sentiment classification",
    "performance": {"accuracy": 0.72, "loss": 0.65},
}


class Training:
    """One process of the training.

    Args:
        host: Name of the machine, which is in the state but does not change its id.
    """

    def __init__(self, host: str = "node-1") -> None:
        torch.manual_seed(SEED)
        self.host = host
        self.data = np.random.default_rng(SEED)
        self.embedding = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.model = nn.Sequential(self.embedding, layer, nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.epoch = self.global_step = 0
        self.history: list[dict[str, float]] = []

    def train(self) -> dict[str, float]:
        """Train for an epoch of two steps; return its validation."""
        for _ in range(2):
            words = torch.from_numpy(self.data.integers(0, 64, (4, 6)))
            loss = self.model(words).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.global_step += 1
        self.scheduler.step()
        self.epoch += 1
        metrics = {"accuracy": ACCURACY[self.epoch - 1], "loss": LOSS[self.epoch - 1]}
        self.history.append(metrics)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return everything under the document's names."""
        return {
            "version": "1.0.0",
            "timestamp": datetime.now().isoformat(),
            "git_commit": "0" * 40 if self.host == "node-1" else None,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "global_step": self.global_step,
            "best_metric": max((one["accuracy"] for one in self.history), default=0.0),
            "metrics_history": [dict(one) for one in self.history],
            "metrics": dict(self.history[-1]) if self.history else {},
            "config": {"d_model": 16, "n_heads": 2, "vocab_size": 64, "dropout": 0.0},
            "dataset": {"name": "imdb", "split": "train", "preprocessing": {"lower": True}},
            "rng": self.data.bit_generator.state,
            "metadata": {"device": "CPU", "hostname": self.host, "cuda_version": None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.scheduler.load_state_dict(state["scheduler_state_dict"])
        self.epoch, self.global_step = state["epoch"], state["global_step"]
        self.history = [dict(one) for one in state["metrics_history"]]
        self.data.bit_generator.state = state["rng"]


def resume(run: Run) -> Training:
    """Restore the run, as a new process."""
    training, restored = Training(), run.restore()
    if restored is not None:
        training.load_state_dict(restored.state)
    return training


def next_epoch(reg: Registry, until: int) -> Checkpoint | None:
    """Train to an epoch in a new process, and save each epoch on the way."""
    run = reg.run(RUN, create=True, preset="adr004", seed=SEED)
    training, saved = resume(run), None
    while training.epoch < until:
        metrics = training.train()
        saved = run.save(
            training,
            step=training.epoch,
            metrics=metrics,
            streams={"training_history": [{"step": training.epoch, **metrics}]},
        )
    return saved


def training(story: Story) -> None:
    """Train for 13 epochs; at the save of the sixth a process dies at each write."""
    with story.place.open() as reg:
        next_epoch(reg, DEADLY - 1)
    story.deaths += story.place.dies_at_each_write(lambda reg: next_epoch(reg, DEADLY))
    with story.place.open() as reg:
        next_epoch(reg, EPOCHS)


CHAPTERS = [training]
