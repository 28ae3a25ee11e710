"""Collective saves among evictions and collections: the plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.distributed import Group, ThreadGroup
from holdfast.registry.face.registry import Registry
from holdfast.registry.spec import Retention
from tests.registry.saving.collective.ranks import together
from tests.registry.saving.collective.rows import Rows
from tests.schedules.actors import Program, Session, named_after
from tests.schedules.plays import (
    AGAIN,
    ALIKE,
    EVICTED,
    NEW,
    NEWEST,
    OLD,
    OTHER,
    Prepare,
    evict,
    gather,
)
from tests.schedules.ranks import Job, State
from tests.schedules.scenario import Saved, Scenario

#: Steps at which something is saved that is nowhere yet: by one attempt, and by the next.
FRESH, FRESHER = 7, 8
#: A step at which another run saves a part of what the ranks save, in the same pack as one of them.
ADOPTED = 9


def content(run_id: str, step: int) -> dict[str, Any]:
    """Return what a checkpoint holds: of its two tensors each rank owns one, and has a part."""
    if step == ADOPTED:
        return {"model": {"a": content(run_id, FRESH)["model"]["a"]}}
    seed = {NEWEST: 2, FRESH: 3, FRESHER: 4}.get(step, 1)
    first = seed if step in (FRESH, FRESHER) else 1  # no sweep condemns it
    model = {"a": np.arange(60.0) * first, "b": np.arange(1, 61.0) * seed}
    return {"model": model, "step": step} if step == ALIKE else {"model": model}


def part(rank: int, size: int, step: int) -> dict[str, Any]:
    """Return what a rank has of it."""
    whole = content("", step)
    return {**whole, "model": {n: Rows(one, rank, size) for n, one in whole["model"].items()}}


def copy(rank: int, size: int, step: int) -> dict[str, Any]:
    """Return the whole of it, which every rank has: no bytes travel."""
    return content("", step)


def prepare(registry: Registry) -> None:
    """Let ranks save a checkpoint that will be evicted, and one that stays."""
    registry.create_run(OLD, seed=1)
    registry.create_run(OTHER, seed=1)

    def save(group: Group) -> None:
        with named_after(f"before {group.rank}"):
            run = registry.run(OLD, group=group)
            for step in (EVICTED, NEWEST):
                run.save(part(group.rank, group.size, step), step=step)

    assert together(ThreadGroup.make(2), save) == [None, None]


def prepare_evicted(registry: Registry) -> None:
    """Do the same, and evict the checkpoint."""
    prepare(registry)
    registry.run(OLD).retention.prune(Retention(last=1))


def job(
    run_id: str,
    *steps: int,
    size: int = 2,
    has_deadlines: bool = False,
    has: State = part,
    misses: int = -1,
) -> Job:
    """Return ranks that save in a run at a step, or at the next one if that fails."""
    ranks = tuple(f"rank{n}" for n in range(size))
    return Job(ranks, run_id, steps, has, has_deadlines, run_id == NEW, misses)


def play(job: Job, *others: str, mortal: bool = False, before: Prepare = prepare) -> Scenario:
    """Return a scenario of the ranks and some others."""
    known: dict[str, Program] = {"evict": evict, "gc": gather, "adopt": adopt}
    return Scenario(
        prepare=before,
        programs={**job.programs(), **{name: known[name] for name in others}},
        content=content,
        mortal=frozenset(job.ranks if mortal else ()),
        job=job,
    )


def adopt(session: Session) -> Saved:
    """Save in another run what rank 0 stores of a fresh state: it is the same pack."""
    session.ready()
    session.open().run(OTHER).exchange.push(content(OTHER, ADOPTED), step=ADOPTED)
    return Saved(OTHER, ADOPTED)


COLLECTIVE: dict[str, Callable[[], Scenario]] = {
    "a rank dies or is late": lambda: play(job(OTHER, FRESH, has_deadlines=True), mortal=True),
    "one of three dies or is late": lambda: play(
        job(OTHER, FRESH, size=3, has_deadlines=True), mortal=True
    ),
    "two attempts": lambda: play(job(OTHER, FRESH, FRESHER, has_deadlines=True)),
    # Nobody waits in vain: in no order of calls is there a need for a deadline.
    "rank 0 misses a save": lambda: play(job(OTHER, FRESH, FRESHER, size=3, misses=0)),
    "rank 1 misses two saves": lambda: play(job(OTHER, 6, FRESH, FRESHER, misses=1)),
    "another run adopts a pack": lambda: play(
        job(OLD, FRESH, has_deadlines=True), "adopt", mortal=True
    ),
    "a collection": lambda: play(job(OTHER, AGAIN), "evict", "gc"),
    "something alike": lambda: play(job(OTHER, ALIKE), "evict", "gc"),
    "copies and a collection": lambda: play(job(OTHER, FRESH, has=copy), "gc"),
    "a new run and a collection": lambda: play(job(NEW, AGAIN), "gc", before=prepare_evicted),
    "the run of the evicted": lambda: play(job(OLD, AGAIN), "evict", "gc"),
    "a collection, and a rank dies or is late": lambda: play(
        job(OTHER, AGAIN, has_deadlines=True), "gc", mortal=True, before=prepare_evicted
    ),
}
