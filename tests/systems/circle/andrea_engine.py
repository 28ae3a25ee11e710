"""ANDREA's program: flat arrays, a bandit over data sources, step files and their sidecars.

`andrea_engine.py FOLDER STEP` trains on from the newest step file of a folder. It imports nothing
of Holdfast and knows the files by the document alone. It waits for a line before each 50 steps,
after which it writes its sidecars; a step file comes every 100 steps.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

PARAMETERS, CADENCE, FLUSH, SEED = 300, 100, 50, 27
SOURCES = ("wiki", "books", "code")
ZOMBIE = "repo-docstrings"
RATE, BETA1, BETA2 = np.float32(1e-3), np.float32(0.9), np.float32(0.999)


def fresh_arms() -> dict[str, Any]:
    return {name: {"weight": 1.0, "pulls": 0} for name in SOURCES}


class Engine:
    """A training at a step; the data of a step depend on its number and on `salt` alone."""

    def __init__(self, floor: float, salt: int = 0) -> None:
        self.floor, self.salt, self.step = floor, salt, 0
        self.weights = np.random.default_rng(SEED).standard_normal(PARAMETERS).astype("<f4")
        self.m, self.v = np.zeros((2, PARAMETERS), "<f4")
        self.arms = fresh_arms()
        self.losses: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []

    def train(self) -> float:
        """Take one step of AdamW on a source that the bandit chose; return the loss."""
        self.step += 1
        choice, target = np.random.default_rng([SEED, self.salt, self.step]).random(2)
        weights = np.array([max(arm["weight"], self.floor) for arm in self.arms.values()])
        chosen = min(np.searchsorted(np.cumsum(weights / weights.sum()), choice), len(weights) - 1)
        gradient = self.weights - np.float32(chosen + target)
        loss = float(np.dot(gradient, gradient)) / PARAMETERS
        self.m = BETA1 * self.m + (1 - BETA1) * gradient
        self.v = BETA2 * self.v + (1 - BETA2) * gradient * gradient
        self.weights = self.weights - RATE * self.m / (np.sqrt(self.v) + np.float32(1e-8))
        arm = list(self.arms.values())[chosen]
        arm["weight"] = 0.9 * arm["weight"] + 0.1 / (1.0 + loss)
        arm["pulls"] += 1
        self.losses.append({"step": self.step, "loss": loss})
        if self.step % CADENCE == 0:
            self.samples.append({"step": self.step, "text": f"sample {loss:.3f}"})
        return loss

    def write_step(self, folder: Path) -> None:
        data = struct.pack("<ii", self.step, PARAMETERS)
        for array in (self.weights, self.m, self.v):
            data += array.tobytes()
        (folder / "step.tmp").write_bytes(data)
        (folder / "step.tmp").rename(folder / f"step_{self.step:06d}.bin")

    def write_sidecars(self, folder: Path) -> None:
        (folder / "run.loss.json").write_text(json.dumps(self.losses))
        (folder / "run.samples.json").write_text(json.dumps(self.samples))
        (folder / "run.state.json").write_text(json.dumps({"arms": self.arms}))

    def load(self, folder: Path, step: int | None) -> None:
        """Read a step file, by default the newest, and the sidecars up to it."""
        steps = {int(one.stem[5:]): one for one in folder.glob("step_*.bin")}
        data = steps[max(steps) if step is None else step].read_bytes()
        self.step, count = struct.unpack_from("<ii", data)
        assert len(data) == 8 + 12 * count
        self.weights, self.m, self.v = np.frombuffer(data, "<f4", offset=8).reshape(3, count)
        losses, samples = (
            json.loads((folder / f"run.{name}.json").read_text()) for name in ("loss", "samples")
        )
        self.losses = [one for one in losses if one["step"] <= self.step]
        self.samples = [one for one in samples if one["step"] <= self.step]
        self.arms = json.loads((folder / "run.state.json").read_text())["arms"]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("folder", type=Path)
    asked.add_argument("until", type=int)
    asked.add_argument("--floor", type=float, required=True)
    asked.add_argument("--resume", type=int, help="a step file that is not the newest")
    asked.add_argument("--salt", type=int, default=0)
    asked.add_argument("--zombie", action="store_true", help="a source whose data come and go")
    given = asked.parse_args()
    engine = Engine(given.floor, given.salt)
    engine.load(given.folder, given.resume)
    if given.zombie:
        engine.arms[ZOMBIE] = {"weight": 1.546, "pulls": 17}
    while engine.step < given.until and sys.stdin.readline():
        for _ in range(FLUSH):
            engine.train()
        if engine.step % CADENCE == 0:
            engine.write_step(given.folder)
        engine.write_sidecars(given.folder)
        print(engine.step, flush=True)


if __name__ == "__main__":
    main()
