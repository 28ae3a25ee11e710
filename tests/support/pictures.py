"""Pictures of a registry: all that a user can see of it, and nothing of how it came about.

Two registries with equal pictures hold the same checkpoints, metrics, tags and objects.
"""

from __future__ import annotations

from typing import Any

from holdfast.backends import Backend
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest, advance
from holdfast.registry.objects.keys import KINDS
from tests.support.stores import contents, opened

RUN = "night"


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
        "freed": state.freed_at is not None,
        "begun": state.commits > 0,
    }


def picture_of_runs(backend: Backend) -> Any:
    """Return what a user sees of each run of a registry."""
    with opened(backend) as registry:
        return {
            name: picture_of_run(registry.run(name).history.manifest())
            for name in registry.run_names()
        }


def picture(backend: Backend) -> Any:
    """Return what a user sees of a registry, and the objects behind it."""
    objects = {k: v for k, v in contents(backend).items() if k.startswith(KINDS)}
    return {"runs": picture_of_runs(backend), "objects": objects}


def pictures_on_the_way(backend: Backend, run: str = RUN) -> list[Any]:
    """Return what a user saw of the runs after each slot of one of them, from none at all on."""
    with opened(backend) as registry:
        others = {
            name: picture_of_run(registry.run(name).history.manifest())
            for name in registry.run_names()
            if name != run
        }
        state = RunManifest(run_id=run)
        seen: list[Any] = [others]
        for slot in RunLog(registry.handle.store, run).slots():
            state = advance(state, [slot])
            seen.append({**others, run: picture_of_run(state)})
    return seen
