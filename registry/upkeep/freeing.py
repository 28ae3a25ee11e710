"""Say in which ways bytes of a registry can be freed, and by which commands."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from holdfast.registry.errors import RegistryError
from holdfast.registry.history import has_policies, kept_ref, plan_retention
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.spec import Retention
from holdfast.registry.store import Store
from holdfast.registry.upkeep.usage import measure

#: Each way with its command, in the order in which states are counted; RUN stands for a run.
WAYS = {
    "dropped runs, after the delay of drops": "holdfast gc",
    "failed runs without pins and holds": "holdfast run rm RUN --reason failed",
    "checkpoints that policies evict": "holdfast prune '*'",
    "older checkpoints of runs without a policy": "holdfast prune RUN --last 1",
    "objects that nothing needs, after the grace": "holdfast gc",
    "dead bytes in packs, at most": "holdfast repack",
}
_DROPPED, _FAILED, _EVICTED, _OLDER, _OBJECTS, _CHUNKS = WAYS
_NEWEST = Retention(last=1)


@dataclass(frozen=True, slots=True)
class Freeing:
    """A way to free bytes."""

    what: str  # what goes
    runs: tuple[str, ...]  # the runs that have it, by name; empty where it belongs to none
    states: int  # the checkpoints and other states that go
    freed_bytes: int  # bytes that nothing else needs
    command: str  # for a shell, with the names of the runs


def ways_to_free(
    store: Store, *, executor: Executor | None = None
) -> tuple[list[Freeing], Mapping[str, RegistryError]]:
    """Return each way with what it frees by itself, and the runs that could not be read.

    A state counts in the first way that takes it. Thinning is not counted. In a run without a
    policy, the newest, the best, and pinned or held checkpoints stay. Where a run is damaged, only
    the ways are returned that need no whole registry. Reads what `measure` reads.
    """
    now_ms = int(time.time() * 1000)
    last: RunManifest | None = None
    way, going = "", frozenset[str]()

    def way_of(run: RunManifest, _: str, ref: str) -> str:
        nonlocal last, way, going
        if run is not last:  # states come run by run
            last, (way, going) = run, _plan(run, now_ms)
        return way if ref in going or way in {_DROPPED, _FAILED} else ""

    usage = measure(store, executor=executor, by=way_of)
    found = []
    for one in usage.runs:
        if one.run:
            runs = tuple(dict.fromkeys(state.ref.partition("/")[0] for state in one.states))
            command = _command(one.run, runs)
            found.append(Freeing(one.run, runs, len(one.states), one.own_bytes, command))
    whole = {_OBJECTS: usage.unneeded_bytes, _CHUNKS: usage.dead_bytes}
    found += [Freeing(way, (), 0, size, WAYS[way]) for way, size in whole.items() if size]
    if usage.damaged:
        found = [one for one in found if one.what in {_FAILED, _OLDER}]
    return sorted(found, key=lambda one: list(WAYS).index(one.what)), usage.damaged


def _command(way: str, runs: Sequence[str]) -> str:
    """Return the command of a way for some runs, for a shell."""
    if "RUN" not in WAYS[way] or len(runs) == 1:
        return WAYS[way].replace("RUN", shlex.quote(runs[0]))
    each = WAYS[way].replace("RUN", '"$run"')
    return f"for run in {shlex.join(runs)}; do {each}; done"


def _plan(run: RunManifest, now_ms: int) -> tuple[str, frozenset[str]]:
    """Return the way that takes states of a run, and the refs of these where it is not the run."""
    if run.dropped is not None:
        return _DROPPED, frozenset()
    if run.status == "failed" and not run.pins and not run.holds:
        return _FAILED, frozenset()
    has_own = has_policies(run.spec)
    plan = plan_retention(run, now_ms, None if has_own else _NEWEST)
    going = frozenset(f"{run.run_id}/{kept_ref(one.checkpoint)}" for one in plan.evicted)
    return _EVICTED if has_own else _OLDER, going
