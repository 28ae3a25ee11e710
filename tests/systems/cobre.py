"""A training as Cobre's: cuts and bases by stage, in iterations, with scenarios from a seed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from holdfast import Registry, Run
from holdfast.registry.deriving.transitions import Started
from tests.systems.life import Mortal as Story

SEED, RUN = 42, "policy"
STAGES, DIMENSION, FORWARD_PASSES, ITERATIONS, INTERVAL = 4, 3, 2, 12, 2
CONFIG = {
    "max_iterations": ITERATIONS,
    "forward_passes": FORWARD_PASSES,
    "checkpoint_interval": INTERVAL,
    "solver": {"name": "highs", "tolerance": 1e-7},
}
SYSTEM = hashlib.sha256(b"hydros, thermals, lines").hexdigest()
EXPECTED = {"state_dimension": DIMENSION, "num_stages": STAGES}
#: The iteration whose checkpoint processes die in.
DEADLY = 6
#: Fields of a cut that a stage keeps in slots.
_KEPT = ("iteration", "forward_pass_index", "intercept", "is_active", "coefficients")


def _name(stage_id: int) -> str:
    return f"stage_{stage_id:03d}"


class Stage:
    """The cut pool and the solver basis of a stage. Slots are allocated before they are used.

    Args:
        loaded: The cuts of a policy, populated slots only.
        fresh: Slots for new cuts.
    """

    def __init__(self, loaded: dict[str, Any] | None, fresh: int) -> None:
        count = 0 if loaded is None else loaded["populated_count"]
        self.capacity, self.count, self.warm_start_count = count + fresh, count, count
        self.coefficients = np.zeros((self.capacity, DIMENSION))
        self.intercept = np.zeros(self.capacity)
        self.is_active = np.zeros(self.capacity, bool)
        self.iteration = np.zeros(self.capacity, np.uint32)
        self.forward_pass_index = np.zeros(self.capacity, np.uint32)
        self.basis = np.zeros(DIMENSION + self.capacity, np.uint8)
        if loaded is not None:
            for name in _KEPT:
                getattr(self, name)[:count] = loaded["cuts"][name]

    def add(self, slope: np.ndarray, intercept: float, iteration: int, index: int) -> None:
        """Put a cut into the next slot; the solver may switch an older one off."""
        at = self.count
        self.coefficients[at], self.intercept[at] = slope, intercept
        self.is_active[at], self.iteration[at] = True, iteration
        self.forward_pass_index[at] = index
        if at > 4 and intercept > 0:
            self.is_active[at // 2] = False
        self.basis[: DIMENSION + at] = (self.basis[: DIMENSION + at] + 1 + at) % 5
        self.count += 1

    def cuts(self, stage_id: int) -> dict[str, Any]:
        """Return the populated slots as Cobre's table, as views; a cut's slot is its place."""
        used = slice(0, self.count)
        slots = np.arange(self.count, dtype=np.uint32)
        kept = {name: getattr(self, name)[used] for name in _KEPT}
        ids = kept["iteration"].astype(np.uint64) * FORWARD_PASSES + kept["forward_pass_index"]
        return {
            "stage_id": stage_id,
            "state_dimension": DIMENSION,
            "capacity": self.capacity,
            "warm_start_count": self.warm_start_count,
            "populated_count": self.count,
            "active_cut_indices": slots[self.is_active[used]],
            "cuts": {"cut_id": ids, "slot_index": slots, **kept},
        }

    def table_of_basis(self, stage_id: int, iteration: int) -> dict[str, Any]:
        """Return the solver's basis as Cobre's table."""
        return {
            "stage_id": stage_id,
            "iteration": iteration,
            "num_columns": DIMENSION,
            "num_rows": self.count,
            "num_cut_rows": self.count,
            "column_status": self.basis[:DIMENSION].copy(),
            "row_status": self.basis[DIMENSION : DIMENSION + self.count].copy(),
        }

    def solve(self, state: np.ndarray) -> float:
        """Return the cost-to-go at a state: the highest active cut, from the basis on."""
        active = self.is_active[: self.count]
        if not active.any():
            return 0.0
        values = self.coefficients[: self.count] @ state + self.intercept[: self.count]
        return float(values[active].max()) + 1e-3 * float(self.basis.sum())


class Training:
    """One process.

    Args:
        seed: The seed of the scenarios.
        loaded: The cuts of each stage that it starts with.
    """

    def __init__(self, seed: np.random.SeedSequence, loaded: Any = None) -> None:
        self.scenarios = np.random.default_rng(seed)
        self.stages = [
            Stage(None if loaded is None else loaded[_name(at)], ITERATIONS * FORWARD_PASSES)
            for at in range(STAGES)
        ]
        self.completed = 0
        self.lower: list[float] = []
        self.upper: list[float] = []

    def iterate(self) -> None:
        """Take forward and backward passes; each adds a cut to each stage."""
        costs = []
        for index in range(FORWARD_PASSES):
            noise = self.scenarios.standard_normal((STAGES, DIMENSION))
            costs.append(sum(one.solve(at) for one, at in zip(self.stages, noise, strict=True)))
            for stage, at in zip(reversed(self.stages), noise[::-1], strict=True):
                cost = stage.solve(at) + float(at.sum())
                stage.add(np.tanh(at), cost, self.completed + 1, index)
        self.completed += 1
        self.lower.append(min(costs))
        self.upper.append(float(np.mean(costs)))

    def state(self) -> dict[str, Any]:
        """Return what must be serialized; pools hold their populated slots only."""
        return {
            "cuts": {_name(at): stage.cuts(at) for at, stage in enumerate(self.stages)},
            "basis": {
                _name(at): stage.table_of_basis(at, self.completed)
                for at, stage in enumerate(self.stages)
            },
            "completed_iterations": self.completed,
            "rng_state": self.scenarios.bit_generator.state,
            "convergence": {"lower": np.array(self.lower), "upper": np.array(self.upper)},
            "state_dimension": DIMENSION,
            "num_stages": STAGES,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state, with the pools as large as they were."""
        for at, stage in enumerate(self.stages):
            cuts, basis = state["cuts"][_name(at)], state["basis"][_name(at)]
            stage.__init__(cuts, cuts["capacity"] - cuts["populated_count"])
            stage.warm_start_count = cuts["warm_start_count"]
            stage.basis[:DIMENSION] = basis["column_status"]
            stage.basis[DIMENSION : DIMENSION + stage.count] = basis["row_status"]
        self.completed = state["completed_iterations"]
        self.scenarios.bit_generator.state = state["rng_state"]
        self.lower = state["convergence"]["lower"].tolist()
        self.upper = state["convergence"]["upper"].tolist()


def open_policy(reg: Registry, name: str = RUN, **given: Any) -> Run:
    """Open or begin a run, as a job script does, with what must match."""
    known = {"config": CONFIG, "input_hash": SYSTEM, **given}
    return reg.run(name, create=True, preset="cobre", seed=SEED, **known)


def started(run: Run) -> Training:
    """Start fresh, or resume where the run was."""
    if run.latest() is None:
        return Training(run.phases.start("fresh").seeds["scenarios"])
    return resumed(run.phases.start("resume", expected=EXPECTED))


def resumed(found: Started) -> Training:
    training = Training(np.random.SeedSequence(0))
    training.load(found.state)
    return training


def iterate(run: Run, training: Training, until: int) -> None:
    """Train to an iteration; save at the interval of the configuration, and the last one."""
    while training.completed < until:
        training.iterate()
        is_last = training.completed == ITERATIONS
        if training.completed % INTERVAL == 0 or is_last:
            run.save(training.state(), step=training.completed)


def train(reg: Registry, until: int) -> None:
    """Train to an iteration in a new process."""
    run = open_policy(reg)
    iterate(run, started(run), until)


def straight(iterations: int = ITERATIONS) -> Training:
    """Return a training that was never interrupted."""
    training = Training(np.random.SeedSequence(SEED, spawn_key=(1, 0)))
    for _ in range(iterations):
        training.iterate()
    return training


def training(story: Story) -> None:
    """Train to the end: processes die at each write of one checkpoint, and are preempted."""
    with story.place.open() as reg:
        train(reg, DEADLY - 1)
    story.deaths += story.place.dies_at_each_write(lambda reg: train(reg, DEADLY))
    for until in (9, ITERATIONS):  # 9 is between two checkpoints
        with story.place.open() as reg:
            train(reg, until)
    with story.place.open() as reg:
        open_policy(reg).status = "completed"


CHAPTERS = [training]
