"""A small brain of regions: it learns a curriculum, grows between stages, and keeps its history.

The names are those of Thalia's document: `get_full_state`, `load_full_state`, `grow_output`,
`grow_source`. What it learns does not matter; what counts is that all of it depends on all before.
It knows nothing of Holdfast: programs with and without it train it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SEED, STEPS = 3, 4
STAGES = ("sensorimotor", "phonology", "toddler", "grammar")
REGIONS = {"cortex_l4": (48, 32), "striatum": (24, 48), "hippocampus": (40, 24)}


@dataclass
class RegionState:
    """What a region is doing: spikes, membrane potentials, traces."""

    spikes: torch.Tensor
    membrane: torch.Tensor
    traces: torch.Tensor


class Brain:
    """Regions with weights, thresholds and a state, a rhythm, and a counter."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(SEED)
        self.steps = 0
        self.growth_history: list[dict[str, Any]] = []
        self.regions: dict[str, dict[str, Any]] = {
            name: {
                "weights": {"feedforward": self._draw(*shape), "bias": torch.zeros(shape[0])},
                "neuron_state": RegionState(
                    torch.zeros(shape[0], dtype=torch.bool),
                    self._draw(shape[0]),
                    self._draw(shape[0]),
                ),
                "learning_state": {"bcm_threshold": self._draw(shape[0])},
            }
            for name, shape in REGIONS.items()
        }

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.noise.standard_normal(shape).astype(np.float32))

    @property
    def neurons(self) -> int:
        """The number of neurons of all regions."""
        return sum(len(part["weights"]["bias"]) for part in self.regions.values())

    def train(self) -> float:
        """Learn for a step; return the loss."""
        self.steps += 1
        for region in self.regions.values():
            weights, state = region["weights"]["feedforward"], region["neuron_state"]
            drive = weights @ self._draw(weights.shape[1])
            state.membrane = 0.9 * state.membrane + drive
            state.spikes = state.membrane > region["learning_state"]["bcm_threshold"]
            state.traces = 0.8 * state.traces + state.spikes.float()
            weights += 0.01 * torch.outer(state.traces, torch.ones(weights.shape[1]))
        return 1.0 / self.steps

    def grow_output(self, region: str, n_new: int) -> None:
        """Add neurons: rows of the weights, and an element of everything else."""
        part = self.regions[region]
        weights, state = part["weights"], part["neuron_state"]
        weights["feedforward"] = torch.cat(
            [weights["feedforward"], self._draw(n_new, weights["feedforward"].shape[1])]
        )
        weights["bias"] = torch.cat([weights["bias"], torch.zeros(n_new)])
        state.spikes = torch.cat([state.spikes, torch.zeros(n_new, dtype=torch.bool)])
        state.membrane = torch.cat([state.membrane, torch.zeros(n_new)])
        state.traces = torch.cat([state.traces, torch.zeros(n_new)])
        learned = part["learning_state"]
        learned["bcm_threshold"] = torch.cat([learned["bcm_threshold"], torch.ones(n_new)])
        self._note(region, "growth", neurons_added=n_new, reason="high_utilization")

    def grow_source(self, region: str, n_new: int) -> None:
        """Add inputs: columns of the weights."""
        weights = self.regions[region]["weights"]
        old = weights["feedforward"]
        weights["feedforward"] = torch.cat([old, torch.zeros(len(old), n_new)], 1)
        self._note(region, "growth", neurons_added=0, inputs_added=n_new, reason="new_source")

    def _note(self, region: str, kind: str, **more: Any) -> None:
        event = {"step": self.steps, "region": region, "type": kind, **more}
        self.growth_history.append(event)

    def get_full_state(self) -> dict[str, Any]:
        """Return everything, under the document's names."""
        return {
            "regions": self.regions,
            "pathways": {},
            "config": {"regions": list(self.regions)},
            "theta": {"phase": 0.25 * (self.steps % 4), "frequency": 8.0},
            "scheduler": {"events_processed": self.steps},
            "trial_state": {"rng": self.noise.bit_generator.state},
            "training_steps": self.steps,
        }

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Continue from a state, of any size."""
        self.regions = state["regions"]
        self.steps = state["training_steps"]
        self.noise.bit_generator.state = state["trial_state"]["rng"]


def grow(brain: Brain, stage: str) -> None:
    """Grow as the curriculum asks before a stage."""
    if stage == "phonology":
        brain.grow_output("striatum", 16)
    if stage == "toddler":
        brain.grow_source("hippocampus", 8)
