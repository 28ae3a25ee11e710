"""A program as ANDREA's that writes step files and histories, dies at random, and goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import Run

CADENCE, PARAMETERS = 5, 16


class Writer:
    """The program, and the line of training that its folder shows.

    Args:
        folder: Where it writes.
        seed: Decides when it dies, and where it goes back to.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, np.random.default_rng(seed)
        self.line: dict[int, bytes] = {}  # the files of the present line by step
        self.losses: list[dict[str, Any]] = []
        self.salt = self.files = self.returns = self.torn = 0

    @property
    def step(self) -> int:
        return len(self.losses)

    def act(self) -> None:
        """Train to the next step file, or die on the way and go back to an earlier file."""
        fate = self.chance.random()
        if fate < 0.85 or len(self.line) < 2:
            self.train(CADENCE)
            self.write_step()
        elif fate < 0.9:
            self.train(CADENCE)
            self.die_in_a_file()
        else:
            self.train(int(self.chance.integers(1, CADENCE)))
            self.go_back(int(self.chance.integers(0, 4)))

    def train(self, count: int) -> None:
        """Take steps, each with its loss; those after the last file are lost by a death."""
        for _ in range(count):
            value = float(np.random.default_rng([self.salt, self.step + 1]).random())
            self.losses.append({"step": self.step + 1, "loss": value})
        self.write_histories()

    def write_histories(self) -> None:
        (self.folder / "run.loss.json").write_text(json.dumps(self.losses))
        arms = {"wiki": {"pulls": self.step}, f"source-{self.salt}": {"pulls": 1}}
        (self.folder / "run.state.json").write_text(json.dumps({"arms": arms}))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.bin"

    def data(self) -> bytes:
        arrays = np.random.default_rng([self.salt, self.step]).standard_normal((3, PARAMETERS))
        header = np.array([self.step, PARAMETERS], "<i4").tobytes()
        return header + arrays.astype("<f4").tobytes()

    def write_step(self) -> None:
        """Write a file in two pieces, since nothing makes it atomic; then the histories again."""
        self.line[self.step] = data = self.data()
        self.files += 1
        with self.path(self.step).open("wb", buffering=0) as file:
            file.write(data[:50])
            file.write(data[50:])
        self.write_histories()

    def die_in_a_file(self) -> None:
        """Leave half of a file, and go on from the one before."""
        self.path(self.step).write_bytes(self.data()[:50])
        self.torn += 1
        self.go_back(0)

    def go_back(self, files: int) -> None:
        """Resume from the newest file of the line, or some files before it."""
        steps = sorted(self.line)
        to = steps[max(len(steps) - 1 - files, 0)]
        self.line = {step: data for step, data in self.line.items() if step <= to}
        self.losses = self.losses[:to]
        self.salt += 1
        self.returns += to != steps[-1]
        self.write_histories()

    def finish(self) -> None:
        """Train past every file that the folder still has of lines that were left."""
        last = max(int(one.stem[5:]) for one in self.folder.glob("step_*.bin"))
        while self.step <= last:
            self.train(CADENCE)
            self.write_step()


def check_line(run: Run, writer: Writer) -> None:
    """Compare a run with the line: files, losses, and what each checkpoint knew of them."""
    found = {one.step: one for one in run.checkpoints()}
    assert list(found) == sorted(writer.line)
    for step, one in found.items():
        state = one.load()
        arrays = b"".join(np.asarray(state[name]).tobytes() for name in ("weights", "m", "v"))
        assert arrays == writer.line[step][8:]
        assert one.metrics == {"loss": writer.losses[step - 1]["loss"]}
        assert one.handle.record.streams["loss"].count == step
    assert run.streams["loss"].read() == writer.losses[: max(writer.line)]
    assert run.streams["loss"].archives == {}
