"""A small training whose every number depends on all that came before it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import holdfast


class Training:
    """A model with dropout, AdamW, a schedule, and three generators of random numbers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.data = np.random.default_rng(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.25),
            torch.nn.Linear(32, 4),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)

    def step(self) -> None:
        batch = torch.from_numpy(self.data.standard_normal((8, 16)).astype(np.float32))
        loss = (self.model(batch) * random.random()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": self.data.bit_generator.state,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        self.data.bit_generator.state = state["rng"]["numpy"]


def train(url: str, run_id: str, seed: int, stop: int) -> None:
    """Train to a step, from wherever the run stands; save at the end only."""
    # One thread: the order of sums must not depend on who else is on the machine.
    torch.set_num_threads(1)
    with holdfast.open(url) as reg:
        run = reg.run(run_id, create=True, seed=seed)
        training = Training(seed)
        done = 0
        restored = run.restore()
        if restored is not None:
            training.load_state_dict(restored.state)
            done = restored.checkpoint.step
        for _ in range(done, stop):
            training.step()
        run.save(training, step=stop)
