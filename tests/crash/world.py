"""What the tests of reliability share: small states, stores that can be copied, and pictures.

A picture is all that a user can see of a registry, and nothing of how it came about: two registries
with equal pictures hold the same checkpoints, metrics, tags and objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from backends import Backend
from backends.memory import MemoryBackend
from registry.log import RunLog
from registry.objects.keys import KINDS
from registry.registry import Registry, open_on
from registry.state import RunManifest, advance
from registry.store import create_config
from tests.crash.inline import without_threads

RUN = "night"
_numbers = itertools.count(1)


class Scratch(MemoryBackend):
    """A store in memory with a URL of its own that can be copied as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self._number = next(_numbers)

    @property
    def url(self) -> str:
        return f"memory://scratch-{self._number}"

    def copy(self) -> Scratch:
        other = Scratch()
        for key, data in contents(self).items():
            other.put(key, data)
        return other


def contents(backend: Backend) -> dict[str, bytes]:
    """Return every object of a store."""
    return {info.key: backend.get(info.key) for info in backend.list()}


def make_state(step: int) -> dict[str, Any]:
    """Return the state of a step: half of the model stays, the rest changes from step to step."""
    fresh = np.random.default_rng(step)
    return {
        "model": {
            "embedding": np.arange(300, dtype=np.float32).reshape(30, 10),
            "head": fresh.standard_normal((10, 12)).astype(np.float32),
            "scale": np.float32([step, 1.5]),  # small enough to lie in the manifest
        },
        "optimizer": {"moments": fresh.standard_normal(40), "groups": [{"lr": 0.1 / (step + 1)}]},
        "step": step,
    }


def fresh_store() -> Scratch:
    """Return a store with an empty registry."""
    backend = Scratch()
    create_config(backend, "skipped")
    return backend


@contextmanager
def opened(backend: Backend) -> Iterator[Registry]:
    """Open a registry with nothing remembered from before."""
    registry = without_threads(open_on(backend))
    try:
        yield registry
    finally:
        registry.close()


def picture_of_run(state: RunManifest) -> Any:
    """Return what a user sees of a run."""
    shown = [
        (
            *(ck.phase, ck.step, ck.manifest.hex(), ck.tier, ck.evicted, ck.superseded),
            *(sorted(ck.metrics.items()), sorted(ck.companions.items())),
        )
        for ck in state.checkpoints
    ]
    return {
        "checkpoints": shown,
        "pins": {pin.ref: pin.manifest.hex() for pin in state.pins},
        "pool": [(entry.version, entry.manifest.hex(), entry.evicted) for entry in state.pool],
        "tags": sorted(state.tags.items()),
        "release": state.release,
        "phases": [(phase.to_phase, phase.manifest.hex()) for phase in state.phases],
        "matches": state.matches,
        "streams": {
            stream.name: (stream.count, [archive.label for archive in stream.archives])
            for stream in state.streams
        },
        "watched": [(group.name, group.done) for group in state.groups],
        "status": state.status,
        "dropped": state.dropped,
        "begun": state.commits > 0,
    }


def picture_of_runs(backend: Backend) -> Any:
    """Return what a user sees of each run of a registry."""
    with opened(backend) as registry:
        return {
            name: picture_of_run(registry.run(name).full_manifest()) for name in registry.runs()
        }


def picture(backend: Backend) -> Any:
    """Return what a user sees of a registry, and the objects behind it."""
    objects = {k: v for k, v in contents(backend).items() if k.startswith(KINDS)}
    return {"runs": picture_of_runs(backend), "objects": objects}


def pictures_on_the_way(backend: Backend, run: str = RUN) -> list[Any]:
    """Return what a user saw of the runs after each slot of one of them, from none at all on."""
    with opened(backend) as registry:
        others = {
            name: picture_of_run(registry.run(name).full_manifest())
            for name in registry.runs()
            if name != run
        }
        state = RunManifest(run_id=run)
        seen: list[Any] = [others]
        for slot in RunLog(registry.store, run).slots():
            state = advance(state, [slot])
            seen.append({**others, run: picture_of_run(state)})
    return seen
