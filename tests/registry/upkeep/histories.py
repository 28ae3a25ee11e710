"""Random histories: runs that share parts, deltas, evictions, thinnings, drops and forks."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np

from holdfast import Checkpoint, Retention, Storing
from holdfast.backends import Backend
from holdfast.registry.errors import Conflict, Thinned
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.upkeep.gc import collect
from tests.support.inline import without_threads


def drifting(seed: int, step: int) -> dict:
    """Return a state of which half never changes, in any run, and the rest a little a step."""
    values = np.random.default_rng(seed).normal(size=1500).astype(np.float32)
    for n in range(1, step + 1):
        changing = np.random.default_rng([seed, n])
        values[changing.choice(1500, 20, replace=False)] = changing.normal(size=20)
    noise = np.random.default_rng([seed, step, 1]).bytes(900)
    frozen = np.frombuffer(np.random.default_rng(99).bytes(1800), np.uint8)
    return {
        "model": {"frozen": frozen, "w": (values.view(np.uint32) & 0xFFFF0000).view(np.float32)},
        "optimizer": {"noise": np.frombuffer(noise, np.uint8)},
    }


def write_history(backend: Backend, seed: int) -> None:
    """Write a registry."""
    drawn = random.Random(seed)
    with without_threads(open_on(backend)) as registry:
        for number in range(drawn.randint(1, 3)):
            _write_run(registry, f"run-{number}", drawn)
        if drawn.random() < 0.4:
            registry.repack(compression=drawn.choice([None, "zstd"]))
        if len(registry.run_names()) > 1 and drawn.random() < 0.3:
            registry.run("run-0").retention.drop("over", now=True)
        if drawn.random() < 0.5:
            collect(registry.handle.store, grace_s=0)


def _write_run(registry: Registry, name: str, drawn: random.Random) -> None:
    run, seed = registry.create_run(name, seed=1), drawn.randint(1, 3)
    every = drawn.choice([1, 1, 4])
    how = Storing(compression="none" if every == 1 else "zstd", keyframe_every=every)
    for step in range(1, drawn.randint(3, 7)):
        run.save(drifting(seed, step), step=step, storing=how, metrics={"seed": float(seed)})
        if drawn.random() < 0.3:
            run.pins.tags.set(f"kept-{step}", run.latest())
        if drawn.random() < 0.3:
            run.retention.prune(Retention(last=drawn.randint(1, 3)))
    if drawn.random() < 0.3:
        run.pins.artifacts.set("final", drifting(seed, 0))
    if drawn.random() < 0.4:
        with suppress(Conflict):  # the only one, or one with a tag
            run.retention.thin(run.checkpoints()[0], ["model"])
    if drawn.random() < 0.3:
        registry.fork(run.latest(), f"{name}-fork")
        run.retention.prune(Retention(last=1))


def loaded(backend: Backend) -> dict[str, object]:
    """Load everything that is held; check that the registry is whole."""
    with without_threads(open_on(backend)) as registry:
        assert registry.verify(deep=True).findings == ()
        return {
            one.ref: _load(one)
            for name in registry.run_names()
            for one in registry.run(name).checkpoints()
        }


def _load(checkpoint: Checkpoint) -> object:
    try:
        return checkpoint.load()
    except Thinned:
        return checkpoint.load(only=["model"])
