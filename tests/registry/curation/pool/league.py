"""A league to test pools by: its rules, its players, and records of entries made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast import Run
from holdfast.registry.history.replay import CheckpointRecord, PoolRecord, RunManifest
from holdfast.registry.spec import Draw, Gate, Phase, Pool, RunSpec
from holdfast.registry.values.digest import Digest

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
_MODEL = Digest.of(b"a model")


def league(**changes: Any) -> RunSpec:
    """Return the league with another pool."""
    assert LEAGUE.pool is not None
    pool = LEAGUE.pool.changed(**changes)
    return LEAGUE.changed(pool=pool)


def player(i: int) -> dict[str, Any]:
    """Return a state whose model, of 1200 bytes, is another one for every `i`."""
    return {
        "model": {"w": np.arange(300, dtype=np.float32) + i},
        "optimizer": {"m": np.arange(500, dtype=np.int32) * 7 + i},
    }


def playing(run: Run) -> list[int]:
    """Return the versions that play."""
    return [entry.version for entry in run.pool.roster()]


def checkpoint(n: int, **fields) -> CheckpointRecord:
    values = {"n": n, "manifest": _MODEL, "phase": "3", "step": n, "metrics": {}}
    return CheckpointRecord(**{**values, "size_bytes": 0, "time_ms": 0, **fields})


def entry(version: int, **fields) -> PoolRecord:
    values = {"version": version, "manifest": _MODEL, "phase": "3", "step": version}
    return PoolRecord(**{**values, "mu": 25.0, "sigma": 8.0, "time_ms": 0, **fields})


def state(spec: RunSpec = LEAGUE, **fields) -> RunManifest:
    """Return a run without a log; its specification is what commit 0 would say."""
    made = RunManifest(run_id="run", **fields)
    made.__dict__["spec"] = spec
    return made


def rated(mu: float, sigma: float) -> dict[str, float]:
    return {"mu": mu, "sigma": sigma}
