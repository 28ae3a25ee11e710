"""A run with an opponent pool, and what is needed to fill it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from registry import Checkpoint, Registry, Run
from registry.spec import Draw, Gate, Phase, Pool, RunSpec

#: A league: three entries beside the frozen ones, of the model alone.
LEAGUE = RunSpec(
    phases=(Phase(name="1"), Phase(name="2"), Phase(name="3")),
    inference=("model | net",),
    gates=(Gate(name="first", phase="1"), Gate(name="second", phase="2")),
    pool=Pool(
        phase="3",
        size=3,
        seed_child=4,
        cache=2,
        draws=(
            Draw(kind="self", weight=50),
            Draw(kind="roster", weight=30),
            Draw(kind="frozen", weight=20, name="second"),
        ),
    ),
)
#: Ratings of an unknown player, and what its uncertainty is at least when it enters.
MU, SIGMA, LEAST = 25.0, 25 / 3, 25 / 3 / 3


def league(**changes: Any) -> RunSpec:
    """Return the league with another pool."""
    assert LEAGUE.pool is not None
    pool = LEAGUE.pool.model_copy(update=changes)
    return LEAGUE.model_copy(update={"pool": pool})


def player(i: int) -> dict[str, Any]:
    """Return a state whose model, of 1200 bytes, is another one for every `i`."""
    return {
        "model": {"w": np.arange(300, dtype=np.float32) + i},
        "optimizer": {"m": np.arange(500, dtype=np.int32) * 7 + i},
    }


@pytest.fixture
def run(reg: Registry) -> Run:
    return reg.create_run("run", seed=42, preset=LEAGUE)


@pytest.fixture
def save(run: Run) -> Callable[..., Checkpoint]:
    """Saves the player of a step into the run, in phase 3."""

    def save(step: int, /, phase: int = 3, **options: Any) -> Checkpoint:
        return run.save(player(step), step=step, phase=phase, **options)

    return save


def playing(run: Run) -> list[int]:
    """Return the versions that play."""
    return [entry.version for entry in run.pool.roster()]
