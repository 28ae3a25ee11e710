"""Train the digits network, with a checkpoint every few steps.

The same command starts a run and, after a crash or a requeue, continues it: where it stopped comes
from the registry. What it continues to is bit for bit what it would have come to without a stop,
because everything that the next step depends on is in the state.

    python train.py --registry FOLDER_OR_BUCKET --run NAME
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from types import FrameType
from typing import Any

import numpy as np
import torch
from task import Net, load_data, make_deterministic, score
from torch.nn import functional

import registry
from registry import Monitor

BATCH = 64
LEARNING_RATE = 2e-3
MONITOR = Monitor(metric="validation_loss", mode="min")


class Training:
    """Everything that changes from step to step, and the step itself."""

    def __init__(self, seed: int, steps: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        self.shifts = np.random.default_rng(seed)
        self.step = 0
        self.data = load_data()
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def state(self) -> dict[str, object]:
        """Return what has to survive. Objects with `state_dict()` are stored by it."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": {
                "python": random.getstate(),
                "torch": torch.get_rng_state(),
                "shifts": self.shifts.bit_generator.state,
            },
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        random.setstate(state["rng"]["python"])
        torch.set_rng_state(state["rng"]["torch"])
        self.shifts.bit_generator.state = state["rng"]["shifts"]
        self.step = state["step"]

    def advance(self) -> float:
        """Take one step; return its loss. Batch, shift and dropout all come from the generators."""
        chosen = torch.randint(len(self.data.train.labels), (BATCH,))
        down, right = self.shifts.integers(-1, 2, size=2).tolist()
        images = self.data.train.images[chosen].roll((down, right), (2, 3))
        loss = functional.cross_entropy(self.model(images), self.data.train.labels[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def metrics(self) -> dict[str, float]:
        """Return the scores on the validation data."""
        found = score(self.model, self.data.validation)
        return {f"validation_{name}": value for name, value in found.items()}


def train(reg: registry.Registry, run_id: str | None, seed: int, steps: int, every: int) -> None:
    """Bring a run to `steps`, from wherever it is."""
    training = Training(seed, steps)
    config = {"steps": steps, "every": every, "batch": BATCH, "learning_rate": LEARNING_RATE}
    run = reg.run(run_id, create=True, config=config, seed=seed, monitor=MONITOR)
    if run.status == "completed":
        print(f"{run.id}: completed already")
        return
    restored = run.restore()
    if restored is not None:
        training.load(restored.state)
        print(f"{run.id}: resumed at step {training.step} from {restored.checkpoint.digest.short}")
        for attempt in restored.report:
            print(f"{run.id}: passed over {attempt.ref}: {attempt.reason}")
    with run:
        while training.step < steps:
            loss = training.advance()
            if training.step % every == 0:
                metrics = {"loss": loss, **training.metrics()}
                ck = run.save(training.state(), step=training.step, metrics=metrics)
                shown = f"validation loss {metrics['validation_loss']:.4f}"
                print(f"{run.id}: step {ck.step:4}  {shown}  {ck.digest.short}")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--registry", default=os.environ.get("HOLDFAST_REGISTRY"))
    parser.add_argument("--run", help="the run's name; HOLDFAST_RUN without it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--every", type=int, default=40)
    chosen = parser.parse_args()
    if chosen.registry is None:
        parser.error("name a registry by --registry or HOLDFAST_REGISTRY")
    # A scheduler says goodbye by SIGTERM: leave by the door, so that the run reads `interrupted`.
    signal.signal(signal.SIGTERM, _leave)
    make_deterministic()
    with registry.open(chosen.registry) as reg:
        train(reg, chosen.run, chosen.seed, chosen.steps, chosen.every)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
