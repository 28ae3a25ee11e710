"""Train the digits network in two phases, with a checkpoint every few steps.

digits.toml says what such a run is: its phases, what is kept of each, the gate between them and
what the second phase takes over from it. The same command starts a run and, after a crash or a
requeue, continues it: where it stopped comes from the registry. What it continues to is bit for bit
what it would have come to without a stop, because everything that the next step depends on is in
the state.

    python train.py --registry FOLDER_OR_BUCKET --run NAME
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from task import Net, load_data, make_deterministic, score
from torch.nn import functional

import holdfast

BATCH = 64
LEARNING_RATES = {"plain": 2e-3, "shifted": 1e-3}
PRESET = Path(__file__).with_name("digits.toml")
GATE = "plain_best"


class Training:
    """Everything that changes from step to step, and the step itself."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.data = load_data()
        self.begin("plain", np.random.SeedSequence(0))

    def begin(self, phase: str, seeds: np.random.SeedSequence) -> None:
        """Stand at the beginning of a phase, with a network that has learnt nothing."""
        seed = int(seeds.generate_state(1)[0])
        random.seed(seed)
        torch.manual_seed(seed)
        self.shifts = np.random.default_rng(seeds)
        self.phase = phase
        self.step = 0 if phase == "plain" else self.steps // 2
        self.losses: list[dict[str, float]] = []
        self.model = Net()
        rate = LEARNING_RATES[phase]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        half = self.steps - self.steps // 2
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, half)

    @property
    def end(self) -> int:
        """The step at which the phase is over."""
        return self.steps // 2 if self.phase == "plain" else self.steps

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
        images = self.data.train.images[chosen]
        if self.phase == "shifted":
            down, right = self.shifts.integers(-1, 2, size=2).tolist()
            images = images.roll((down, right), (2, 3))
        loss = functional.cross_entropy(self.model(images), self.data.train.labels[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.losses.append({"step": self.step, "loss": loss.item()})
        return loss.item()

    def metrics(self) -> dict[str, float]:
        """Return the scores on the validation data."""
        found = score(self.model, self.data.validation)
        return {f"validation_{name}": value for name, value in found.items()}


def train(reg: holdfast.Registry, run_id: str | None, seed: int, steps: int) -> None:
    """Bring a run to `steps`, from wherever it is."""
    config = {"steps": steps, "batch": BATCH, "learning_rates": LEARNING_RATES}
    run = reg.run(run_id, create=True, preset=PRESET, config=config, seed=seed)
    if run.status == "completed":
        print(f"{run.id}: completed already")
        return
    training = Training(steps)
    training.begin("plain", run.phases.seed_sequence(0, "plain"))
    restored = run.restore()
    if restored is not None:
        training.begin(str(restored.checkpoint.phase), run.phases.seed_sequence(0, "plain"))
        training.load(restored.state)
        print(f"{run.id}: resumed at step {training.step} from {restored.checkpoint.digest.short}")
        for attempt in restored.report:
            print(f"{run.id}: passed over {attempt.ref}: {attempt.reason}")
    with run:
        if training.phase == "plain":
            finish_phase(run, training)
            gate = run.pins.gates.set(GATE)
            began = run.phases.transition("shifted", targets={"model": training.model})
            training.begin("shifted", began.seeds["rng"])
            training.model.load_state_dict(began.state["model"])
            print(f"{run.id}: phase shifted begins with {gate.ref}")
        finish_phase(run, training)


def finish_phase(run: holdfast.Run, training: Training) -> None:
    """Train to the end of a phase, and save whenever its cadence asks for it."""
    while training.step < training.end:
        loss = training.advance()
        if run.phases.is_due(training.step, training.phase):
            metrics = {"loss": loss, **training.metrics()}
            losses, training.losses = training.losses, []
            ck = run.save(
                training.state(),
                step=training.step,
                phase=training.phase,
                metrics=metrics,
                streams={"loss": losses},
            )
            shown = f"validation loss {metrics['validation_loss']:.4f}"
            print(f"{run.id}: {ck.phase} step {ck.step:4}  {shown}  {ck.digest.short}")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--registry", default=os.environ.get("HOLDFAST_REGISTRY"))
    parser.add_argument("--run", help="the run's name; HOLDFAST_RUN without it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=480)
    chosen = parser.parse_args()
    if chosen.registry is None:
        parser.error("name a registry by --registry or HOLDFAST_REGISTRY")
    # A scheduler says goodbye by SIGTERM: leave by the door, so that the run reads `interrupted`.
    signal.signal(signal.SIGTERM, _leave)
    make_deterministic()
    with holdfast.open(chosen.registry) as reg:
        train(reg, chosen.run, chosen.seed, chosen.steps)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
