"""A training in a process of its own that takes a step when it is told to, and stops by signals.

`python -m tests.systems.paced STORY URL` trains; `Paced` is its parent's side. So a test knows at
which step a signal comes, without waiting for a time.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np

import holdfast
from tests.systems import andrea, cobre
from tests.systems.circle.andrea_engine import CADENCE, SOURCES, Engine
from tests.systems.mutants import make_named

ROOT = Path(__file__).parents[2]


class Paced:
    """A process that trains step by step.

    Args:
        story: `andrea` or `cobre`, or `circle`: ANDREA's with the engine of its files.
        url: The registry.
    """

    def __init__(self, story: str, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.systems.paced", story, url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._line() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def steps(self, count: int) -> int:
        """Let it take steps; return the number of the last one."""
        assert self._process.stdin is not None
        self._process.stdin.write(count * "step\n")
        self._process.stdin.flush()
        return int([self._line() for _ in range(count)][-1])

    def send(self, number: int, *, to_all: bool = False) -> None:
        """Send a signal while it waits for the next step."""
        (os.killpg if to_all else os.kill)(self._process.pid, number)

    def last(self) -> int:
        """Let it finish the step in which it got a signal; return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        _, err = self._process.communicate(timeout=300)
        assert "Traceback" not in err, err
        return self._process.returncode

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise AssertionError(self._process.communicate()[1])
        return line


def told() -> Iterator[None]:
    """Yield when the parent asks for a step."""
    print("ready", flush=True)
    while sys.stdin.readline():
        yield


def train_andrea(url: str) -> None:
    """Train as `andrea.train` does, with a checkpointer."""
    with holdfast.open(url) as reg:
        run = reg.run(andrea.RUN, create=True, preset="andrea", seed=andrea.SEED)
        training = andrea.resume(run)
        with run.checkpointer(background=False) as checkpointer:
            for _ in told():
                loss = training.train()
                checkpointer.step(
                    training.step,
                    training.state,
                    {"loss": loss},
                    streams=training.sidecars([{"step": training.step, "loss": loss}]),
                )
                print(training.step, flush=True)


def train_circle(url: str) -> None:
    """Train with the engine of ANDREA's files, whose data depend on the step alone."""
    with holdfast.open(url) as reg:
        run = reg.run("andrea", create=True, preset="andrea")
        restored = run.restore(sources=dict.fromkeys(run.manifest.spec.sources, SOURCES))
        engine = Engine((run.config or {"floor": 0.05})["floor"])
        if restored is not None:
            engine.step, engine.weights = restored.state["step"], restored.state["weights"]
            engine.m, engine.v = restored.state["m"], restored.state["v"]
            for entry in run.streams["state"].read()[-1:]:
                engine.arms = {name: entry["arms"][name] for name in SOURCES}  # no zombie
        with run.checkpointer(background=False) as checkpointer:
            for _ in told():
                loss = engine.train()
                checkpointer.step(
                    engine.step,
                    lambda: {name: getattr(engine, name) for name in ("step", "weights", "m", "v")},
                    {"loss": loss},
                    meta={"by": "native"},
                    streams={
                        "loss": engine.losses[-1:],
                        "samples": engine.samples[-1:] if engine.step % CADENCE == 0 else [],
                        "state": [{"step": engine.step, "arms": copy.deepcopy(engine.arms)}],
                    },
                )
                print(engine.step, flush=True)


class Pair:
    """Two processes behind a barrier.

    Args:
        rank: 0 or 1.
        other: The connection to the other one.
    """

    def __init__(self, rank: int, other: Connection) -> None:
        self.rank = rank
        self._other = other

    def highest(self, value: int) -> int:
        self._other.send(value)
        return max(value, self._other.recv())


def train_cobre(url: str) -> None:
    """Train with two ranks, of which the second one takes part in every iteration."""
    with holdfast.open(url) as reg:
        cobre.open_policy(reg)
    one, two = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    other = context.Process(target=_second_rank, args=(url, one, two))
    other.start()
    two.close()  # so that each end learns of the other one's death
    try:
        _iterate(url, Pair(0, one), told())
    finally:
        one.close()  # the other one never waits for a rank that is gone
        other.join()
    assert other.exitcode == 0, other.exitcode


def _second_rank(url: str, first: Connection, other: Connection) -> None:
    first.close()
    _iterate(url, Pair(1, other), iter(lambda: None, 0))


def _iterate(url: str, ranks: Pair, steps: Iterator[None]) -> None:
    with holdfast.open(url) as reg:
        run = cobre.open_policy(reg) if ranks.rank == 0 else reg.run(cobre.RUN)
        training = cobre.Training(np.random.SeedSequence(0))
        if ranks.rank == 0:
            training = cobre.started(run)
        with run.checkpointer(
            background=False, stopping=holdfast.Stopping(ranks=ranks)
        ) as checkpointer:
            for _ in steps:
                training.iterate()
                checkpointer.step(training.completed, training.state)
                if ranks.rank == 0:
                    print(training.completed, flush=True)


if __name__ == "__main__":
    # A shell starts jobs in the background with SIGINT ignored, and a checkpointer respects that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    make_named()
    {"andrea": train_andrea, "cobre": train_cobre, "circle": train_circle}[sys.argv[1]](sys.argv[2])
