"""A small run of two phases, with one of everything that a transition can say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast import Run
from holdfast.registry.deriving.transitions import Transitioned
from holdfast.registry.errors import RegistryError
from holdfast.registry.face.registry import Registry
from holdfast.registry.spec import RunSpec
from tests.support.loads import actions_of

RUN = "life"
ROWS = [
    {"part": "model", "change": "carry"},
    {"part": "model/head.*", "change": "reset", "why": "a new head"},
    {"part": "model", "change": "freeze", "to": "teacher", "dtype": "float16"},
    {"part": "model/head.*", "change": "freeze", "companion": "anchor"},
    {"part": "optimizer | optim", "change": "discard"},
    {"part": "rng", "change": "reseed", "seeds": {"data": 1, "engine": 3}},
    {"part": "step", "change": "carry"},
    {"part": "phase", "change": "reset"},
]
WAY: dict[str, Any] = {
    "from_phase": "1",
    "to_phase": "2",
    "source": "gates/done",
    "strict": ["model"],
    "zero": ["model/mask*"],
    "ready": [
        {"metric": "accuracy", "at_least": 0.5},
        {"metric": "deal_in", "at_most": 0.2},
    ],
    "rows": ROWS,
}
MONITOR = {"metric": "accuracy", "mode": "max"}
GOOD = {"accuracy": 0.5, "deal_in": 0.2}


def spec(rows: list[dict[str, Any]] | None = None, **way: Any) -> RunSpec:
    """Return what such a run is to be, with some things said otherwise."""
    declared = {
        "phases": [
            {"name": "1", "monitors": [MONITOR]},
            {"name": "2", "monitors": [MONITOR], "companions": ["anchor"]},
        ],
        "gates": [{"name": "done", "phase": "1"}, {"name": "first", "phase": "1"}],
        "streams": [
            {"name": "samples", "lifetime": "resettable"},
            {"name": "loss", "lifetime": "forever"},
        ],
        "inference": ["model"],
        "transitions": [{**WAY, **({} if rows is None else {"rows": rows}), **way}],
    }
    return RunSpec.of(declared)


def state(i: int = 0, mask: float = 0.0) -> dict[str, Any]:
    """Return a state of phase 1, another one for every `i`."""
    return {
        "model": {
            "trunk.w": np.arange(300, dtype=np.float32) + i,
            "head.w": np.full(20, 0.25 + i, dtype=np.float32),
            "head.b": np.full(2, 0.5, dtype=np.float32),
            "mask": np.full(40, mask, dtype=np.float32),
        },
        "optimizer": {"m": np.arange(300, dtype=np.float32) * 3 + i},
        "rng": {"state": 2**70 + i},
        "step": i,
        "phase": 1,
    }


def target(**changes: np.ndarray | None) -> dict[str, Any]:
    """Return what the model is to be loaded into; `None` leaves a tensor out."""
    model = {name: np.zeros_like(value) for name, value in state()["model"].items()}
    model |= {name.replace("_", "."): value for name, value in changes.items()}
    return {name: value for name, value in model.items() if value is not None}


def lived(
    reg: Registry, declared: RunSpec | None = None, metrics: dict[str, float] | None = None
) -> Run:
    """Return a run whose phase 1 is over: three checkpoints, the second one a gate."""
    run = reg.create_run(RUN, preset=declared or spec(), seed=42)
    for i in (1, 2, 3):
        run.save(state(i), step=i, metrics=GOOD if metrics is None else metrics)
    run.pins.gates.set("done", run.checkpoints()[1])
    return run


def over(run: Run, to: int | str = 2, **options: Any) -> Transitioned:
    """Carry the transition out."""
    return run.phases.transition(to, **{"targets": {"model": target()}} | options)


def refused(run: Run, error: type[RegistryError], match: str, **options: Any) -> None:
    """Check that a transition fails like this, commits nothing, and leaves phase 1 to go on."""
    before = actions_of(run)
    with pytest.raises(error, match=match):
        over(run, **options)
    assert actions_of(run.refresh()) == before
    assert run.phases.current == 1
    run.save(state(9), step=9)
