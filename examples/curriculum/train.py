"""A curriculum: a small spiking brain learns more and more words, and grows on the way.

    holdfast init REGISTRY
    python train.py --registry REGISTRY --run NAME

Each stage is a phase of the run, saved every few steps and at its end. The same command starts the
curriculum and continues it: after a crash, after SIGTERM, or to the end if `--until` had named an
earlier stage. What it continues to is bit for bit what it would have come to without a stop.
`--back-to STAGE` goes back to the end of a stage; the next save supersedes what came after it.

The state has the keys of the preset `thalia`, so the run is also a folder of `.thalia` files:

    holdfast pull NAME --to brains --layout preset -r REGISTRY  to go on with another program there
    holdfast push brains NAME -r REGISTRY --layout thalia        to take in what it has written

Start from here: put your own brain in place of `Brain`. `CurriculumTrainer` needs its
`get_full_state`, `load_full_state`, `growth_history`, `steps`, `train` and `grow_for`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import holdfast

INPUTS, NEURONS, ACTIVE = 64, 96, 0.1


@dataclass
class RegionState:
    """What a region is doing now: spikes, membrane potentials, eligibility traces."""

    spikes: torch.Tensor
    membrane: torch.Tensor
    traces: torch.Tensor


# A checkpoint names no code: the program says what its names mean. Programs of Thalia look for a
# name `module.Class` when they read a `.thalia` file.
holdfast.register_adapter(
    "curriculum.RegionState", RegionState, to_plain=vars, from_plain=lambda d: RegionState(**d)
)


@dataclass(frozen=True)
class StageConfig:
    """One stage of a curriculum."""

    name: str  # the phase of its checkpoints
    words: int  # number of patterns to tell apart
    difficulty: float  # standard deviation of the noise in a pattern
    steps: int


class Brain:
    """A cortex that spikes at patterns, and a striatum that learns which word a pattern is."""

    def __init__(self, seed: int) -> None:
        self.noise = np.random.default_rng(seed)
        self.steps = 0
        self.growth_history: list[dict[str, Any]] = []
        self.regions: dict[str, Any] = {
            "cortex_l4": self._region(NEURONS, INPUTS),
            "striatum": self._region(0, NEURONS),
        }

    def _region(self, rows: int, columns: int) -> dict[str, Any]:
        quiet = RegionState(torch.zeros(rows, dtype=torch.bool), *torch.zeros(2, rows))
        return {
            "weights": {"feedforward": self._draw(rows, columns) / columns**0.5},
            "neuron_state": quiet,
            "homeostatic_state": {"thresholds": torch.full((rows,), 0.5)},
        }

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.noise.standard_normal(shape).astype(np.float32))

    def grow_for(self, stage: StageConfig) -> None:
        """Grow the striatum to a neuron for each word, and note it."""
        region = self.regions["striatum"]
        new = stage.words - len(region["weights"]["feedforward"])
        if new <= 0:
            return
        more = self._region(new, NEURONS)
        for kind in ("weights", "homeostatic_state"):
            region[kind] = {
                key: torch.cat([one, more[kind][key]]) for key, one in region[kind].items()
            }
        old, added = vars(region["neuron_state"]), vars(more["neuron_state"])
        region["neuron_state"] = RegionState(*(torch.cat([old[key], added[key]]) for key in old))
        event = {"step": self.steps, "region": "striatum", "type": "growth", "neurons_added": new}
        self.growth_history.append({**event, "reason": f"{stage.words} words"})

    def train(self, stage: StageConfig) -> dict[str, float]:
        """Hear one word with noise, answer, and learn from the reward; return the metrics."""
        self.steps += 1
        word = int(self.noise.integers(stage.words))
        clean = np.random.default_rng(word).standard_normal(INPUTS).astype(np.float32)
        heard = torch.from_numpy(clean) + stage.difficulty * self._draw(INPUTS)
        cortex, striatum = self.regions["cortex_l4"], self.regions["striatum"]
        answer = self._fire(striatum, self._fire(cortex, heard).float())
        thresholds = cortex["homeostatic_state"]["thresholds"]
        thresholds += 0.05 * (cortex["neuron_state"].spikes.float() - ACTIVE)
        dopamine = -torch.softmax(answer, 0)  # reward that came, less the reward that was expected
        dopamine[word] += 1.0
        weights = striatum["weights"]["feedforward"]
        weights += 0.1 * torch.outer(dopamine, cortex["neuron_state"].traces)
        loss = -torch.log_softmax(answer, 0)[word]
        right = float(int(answer.argmax()) == word)
        return {"loss": loss.item(), "accuracy": right, "neurons": float(NEURONS + len(weights))}

    def _fire(self, region: dict[str, Any], drive: torch.Tensor) -> torch.Tensor:
        """Move a region by one step; return spikes of the cortex, potentials of the striatum."""
        state = region["neuron_state"]
        state.membrane = region["weights"]["feedforward"] @ drive
        state.spikes = state.membrane > region["homeostatic_state"]["thresholds"]
        state.traces = 0.5 * state.traces * state.spikes + state.spikes
        return state.membrane if region is self.regions["striatum"] else state.spikes

    def get_full_state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "regions": self.regions,
            "pathways": {},
            "config": {"inputs": INPUTS, "neurons": NEURONS},
            "trial_state": {"noise": self.noise.bit_generator.state},
            "training_steps": self.steps,
        }

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Continue from a state, of any size."""
        self.regions, self.steps = state["regions"], state["training_steps"]
        self.noise.bit_generator.state = state["trial_state"]["noise"]


class CurriculumTrainer:
    """Trains stage after stage in a run, and saves each by its cadence and at its end."""

    def __init__(self, run: holdfast.Run, brain: Brain, save_every: int) -> None:
        self.run, self.brain, self.save_every = run, brain, save_every

    def resume(self, at: holdfast.Checkpoint | None = None) -> None:
        """Continue from a checkpoint, or from the newest one if the run has any."""
        restored = self.run.restore(at=at)
        if restored is not None:
            self.brain.load_full_state(restored.state)
            self.brain.growth_history = list(restored.checkpoint.meta["growth_history"])
            print(f"{self.run.id}: resumed from {restored.checkpoint.ref}")

    def load_checkpoint(self, stage: str) -> None:
        """Go back to the end of a stage."""
        self.resume(self.run.latest(phase=stage))

    def train_stage(self, stage: StageConfig, end: int) -> None:
        """Train a stage up to the step at which it ends, from wherever the brain is."""
        if self.brain.steps >= end:
            return
        brain, scores = self.brain, []
        brain.grow_for(stage)
        with self.run.checkpointer(every_steps=self.save_every, phase=stage.name) as saver:
            while brain.steps < end:
                metrics = brain.train(stage)
                scores.append(metrics["accuracy"])
                told = {"curriculum_stage": stage.name, "difficulty": stage.difficulty}
                meta = {"growth_history": brain.growth_history, "training_info": told}
                saver.step(brain.steps, brain.get_full_state, metrics, meta=meta)
        share = sum(scores) / len(scores)
        print(
            f"{self.run.id}: {stage.name} ends at step {end}, {share:.0%} of its words were right"
        )


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--registry", default=os.environ.get("HOLDFAST_REGISTRY"))
    parser.add_argument("--run", default="curriculum")
    parser.add_argument("--steps", type=int, default=600, help="of each stage")
    parser.add_argument("--until", help="the last stage to train")
    parser.add_argument("--back-to", help="the stage to go back to the end of")
    chosen = parser.parse_args(arguments)
    if chosen.registry is None:
        parser.error("name a registry by --registry or HOLDFAST_REGISTRY")
    stages = [
        StageConfig("sounds", words=4, difficulty=0.1, steps=chosen.steps),
        StageConfig("words", words=12, difficulty=0.3, steps=chosen.steps),
        StageConfig("noisy-words", words=12, difficulty=0.8, steps=chosen.steps),
    ]
    torch.set_num_threads(1)  # the order of sums must not depend on who else is on the machine
    with holdfast.open(chosen.registry) as reg:
        run = reg.run(chosen.run, create=True, preset="thalia", seed=1)
        trainer = CurriculumTrainer(run, Brain(seed=1), save_every=max(1, chosen.steps // 4))
        trainer.load_checkpoint(chosen.back_to) if chosen.back_to else trainer.resume()
        end = 0
        for stage in stages:
            end += stage.steps
            trainer.train_stage(stage, end)
            if stage.name == chosen.until:
                break


if __name__ == "__main__":
    main()
