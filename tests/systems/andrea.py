"""A training as ANDREA's: one long run of flat arrays, a bandit over data sources, two pivots."""

from __future__ import annotations

from typing import Any

import numpy as np

import holdfast
from holdfast import Registry, Run
from tests.support.commands import invoke
from tests.systems.life import Mortal as Story

SEED, RUN, CADENCE, STEPS = 1, "andrea", 100, 12_000
PARAMETERS = 400
SOURCES = ("wiki", "books", "code")
#: Steps at which an operator pivots, and the floors of the bandit from the start and from each on.
PIVOTS = {4_000: "polish-1", 8_000: "polish-2"}
FLOORS = (0.05, 0.2, 0.1)
#: The step whose save processes die in.
DEADLY = 1_500
BETA1, BETA2 = np.float32(0.9), np.float32(0.999)


class Bandit:
    """The proxy's choice of a data source, under one policy.

    Args:
        floor: The least weight of an arm.
        arms: Weight and pulls of each arm; a fresh bandit without it.
    """

    def __init__(self, floor: float, arms: dict[str, Any] | None = None) -> None:
        self.floor = floor
        self.arms = arms or {name: {"weight": 1.0, "pulls": 0} for name in SOURCES}

    def pull(self, draw: float) -> str:
        weights = np.array([max(arm["weight"], self.floor) for arm in self.arms.values()])
        at = int(np.searchsorted(np.cumsum(weights / weights.sum()), draw))
        return list(self.arms)[min(at, len(self.arms) - 1)]

    def reward(self, name: str, value: float) -> None:
        arm = self.arms[name]
        arm["weight"] = 0.9 * arm["weight"] + 0.1 * value
        arm["pulls"] += 1


class Training:
    """One process: the CUDA engine and its proxy.

    Args:
        floor: The floor of the bandit's policy.
        rate: The learning rate.
    """

    def __init__(self, floor: float = FLOORS[0], rate: float = 1e-3) -> None:
        self.data = np.random.default_rng(SEED)
        self.weights = self.data.standard_normal(PARAMETERS).astype(np.float32)
        self.m = np.zeros(PARAMETERS, np.float32)
        self.v = np.zeros(PARAMETERS, np.float32)
        self.rate = np.float32(rate)
        self.step = 0
        self.bandit = Bandit(floor)

    def train(self) -> float:
        """Take one step of AdamW on a source that the bandit chose; return the loss."""
        arm = self.bandit.pull(self.data.random())
        target = np.float32(SOURCES.index(arm) + self.data.random())
        gradient = self.weights - target
        loss = float(np.dot(gradient, gradient)) / PARAMETERS
        self.m = BETA1 * self.m + (1 - BETA1) * gradient
        self.v = BETA2 * self.v + (1 - BETA2) * gradient * gradient
        self.weights = self.weights - self.rate * self.m / (np.sqrt(self.v) + np.float32(1e-8))
        self.step += 1
        self.bandit.reward(arm, 1.0 / (1.0 + loss))
        return loss

    def state(self) -> dict[str, Any]:
        """Return the five regions, and the generators."""
        return {
            "step": self.step,
            "weights": self.weights,
            "m": self.m,
            "v": self.v,
            "rng": holdfast.rng.capture({"data": self.data}),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.weights, self.m, self.v = state["weights"], state["m"], state["v"]
        holdfast.rng.restore(state["rng"], {"data": self.data})

    def save(self, run: Run, losses: list[dict[str, Any]]) -> None:
        """Save, with the sidecars since the save before."""
        metrics = {"loss": losses[-1]["loss"]}
        run.save(self.state(), step=self.step, metrics=metrics, streams=self.sidecars(losses))

    def sidecars(self, losses: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Return new losses and the bandit, and at a multiple of the cadence a sample."""
        arms = {name: dict(arm) for name, arm in self.bandit.arms.items()}
        samples = [{"step": self.step, "text": f"sample {self.step}"}]
        return {
            "loss": losses,
            "samples": [] if self.step % CADENCE else samples,
            "state": [{"step": self.step, "arms": arms, "phase_counter": self.step}],
        }


def resume(run: Run) -> Training:
    """Restore the run, as a new process."""
    restored = run.restore(sources={"streams/state/arms": SOURCES, "bandit/arms": SOURCES})
    floor = FLOORS[len(run.manifest.pivots)]
    training = Training(floor)
    if restored is not None:
        training.load(restored.state)
        known = run.streams["state"].read(last_step=training.step)
        training.bandit = Bandit(floor, known[-1]["arms"] if known else None)
    return training


def train(reg: Registry, until: int) -> None:
    """Train to a step in a new process, with a save at each multiple of the cadence."""
    run = reg.run(RUN, create=True, preset="andrea", seed=SEED)
    training = resume(run)
    losses = []
    while training.step < until:
        losses.append({"step": training.step + 1, "loss": training.train()})
        if run.phases.is_due(training.step):
            training.save(run, losses)
            losses = []


def straight() -> Training:
    """Return a training that was never interrupted, but pivoted at the same steps."""
    training = Training()
    for step in range(STEPS):
        if step in PIVOTS:
            training.bandit = Bandit(FLOORS[1 + list(PIVOTS).index(step)])
        training.train()
    return training


def first_days(story: Story) -> None:
    """Train to the first pivot; processes die at every write of one save."""
    with story.place.open() as reg:
        train(reg, DEADLY - CADENCE)
    story.deaths += story.place.dies_at_each_write(lambda reg: train(reg, DEADLY))
    for until in (2_700, 4_000):
        with story.place.open() as reg:
            train(reg, until)


def polish(story: Story) -> None:
    """Pivot in a program that dies at once, and train on."""
    with story.place.open() as reg:
        reg.run(RUN).phases.pivot(PIVOTS[4_000])
    for until in (5_250, 8_000):  # 5,250 is between two saves: 50 steps are trained again
        with story.place.open() as reg:
            train(reg, until)


def polish_again(story: Story) -> None:
    """Pivot by the command, while nothing trains, and train to the end."""
    done = invoke("run", "pivot", RUN, PIVOTS[8_000], "--registry", story.place.url)
    assert done.exit_code == 0, done.output
    with story.place.open() as reg:
        train(reg, STEPS)


CHAPTERS = [first_days, polish, polish_again]
