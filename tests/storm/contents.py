"""What the storm saves: few states, each a function of its seed, that share components and packs.

Few, so that a saved state has often been stored, evicted and collected before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.backends.memory import MemoryBackend
from holdfast.registry.face.factory import open_on
from holdfast.registry.spec import Phase, Pool, Retention, RunSpec
from holdfast.registry.store.store import create_config

SEEDS = 32
#: A run that lets go with every save, and has a pool.
TIGHT = RunSpec(
    phases=(Phase(name="league", retention=Retention(last=1)),),
    inference=("model",),
    pool=Pool(phase="league", size=1),
)
#: A run that keeps everything until somebody prunes it.
LOOSE = RunSpec(phases=(Phase(name="league"),), inference=("model",))
_FAMILIES = 12


def state_of(seed: int) -> dict[str, Any]:
    """Return the state of a seed: two packs of 4 to 130 kB, one of them its family's, or three."""
    own = np.random.default_rng(seed)
    family = np.random.default_rng(1000 + seed % _FAMILIES)
    state: dict[str, Any] = {
        "model": {
            "weights": own.standard_normal((1 + seed % 8, 4096)).astype(np.float32),
            "seed": seed,
        },
        "embedding": {"table": family.standard_normal((16, 64)).astype(np.float32)},
    }
    if seed % 2:
        state["optimizer"] = {"moments": own.standard_normal(600), "lr": 1 / (seed + 1)}
    return state


def difference(loaded: Any, seed: int) -> str | None:
    """Return where a state, or its model alone, is not what its seed gives; `None` if it is."""
    expected = state_of(seed)
    if list(loaded) != list(expected) and list(loaded) != ["model"]:
        return f"keys {list(loaded)}"
    for name, part in loaded.items():
        if list(part) != list(expected[name]):
            return f"{name}: keys {list(part)}"
        for key, value in part.items():
            if not _equal(value, expected[name][key]):
                return f"{name}/{key}"
    return None


def _equal(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        same_form = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return same_form and found.tobytes() == expected.tobytes()
    return bool(found == expected)


def identities() -> dict[str, int]:
    """Return the seeds by the ids of their states."""
    backend = MemoryBackend()
    create_config(backend, "skipped")
    with open_on(backend) as registry:
        run = registry.create_run("identities", seed=1)
        return {run.save(state_of(seed), step=seed).digest.hex(): seed for seed in range(SEEDS)}
