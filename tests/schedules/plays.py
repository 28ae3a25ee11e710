"""The programs that are interleaved, and the registries that they begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from holdfast import Storing
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.errors import Conflict, IntegrityError, MissingObject, NotFound, RolledBack
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.syncing import sync
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.spec import Retention
from holdfast.registry.store.store import create_config
from holdfast.registry.upkeep.gc import collect
from holdfast.registry.upkeep.repacking.execution import repack
from tests.schedules.actors import Program, Session, named_after
from tests.schedules.scenario import Saved, Scenario
from tests.schedules.soundness import opened
from tests.support.states import same

#: The run in which something is evicted, another that exists, and one that is begun meanwhile.
OLD, OTHER, NEW = "old", "other", "new"
#: A run of another registry.
FAR = "far"
#: Checkpoints of the old run: the one that is evicted, and the one that stays.
EVICTED, NEWEST = 1, 2
#: Steps of saves: of the evicted state again; of a state that shares only its tensors.
AGAIN, ALIKE = 3, 4
#: A later step of the old run that holds what the newest one held.
LATER = 5
#: A step at which a state that differs little from the evicted one is saved, as a delta.
NEAR = 6
#: A step at which something is saved that is nowhere yet.
FRESH = 7

#: How the pusher stands when the schedule begins: with nothing; with an open handle; with a handle
#: that continues from the evicted checkpoint, whose objects it may name without a check (W2a).
Stand = Literal["fresh", "opened", "resumed"]


def weights(i: int) -> np.ndarray:
    """Return a tensor just large enough to be stored as a difference."""
    return np.arange(60, dtype=np.float32) + i


def content(run_id: str, step: int) -> object:
    """Return what the checkpoint of a run at a step is saved with."""
    if run_id == OLD and step in (NEWEST, LATER):
        return {"model": weights(2)}
    model = weights(FRESH if step == FRESH else 1)
    if step == NEAR:
        model[7] = 0.5
    return {"model": model, "step": step} if step == ALIKE else {"model": model}


def prepare(registry: Registry) -> None:
    """Save a checkpoint that will be evicted, and one that stays."""
    run = registry.create_run(OLD, seed=1)
    run.save(content(OLD, EVICTED), step=EVICTED)
    run.save(content(OLD, NEWEST), step=NEWEST)
    registry.create_run(OTHER, seed=1)


def prepare_evicted(registry: Registry) -> None:
    """Do the same, and evict the checkpoint."""
    prepare(registry)
    registry.run(OLD).retention.prune(Retention(last=1))


def prepare_swept(registry: Registry) -> None:
    """Collect it, and then save and evict the same state again."""
    prepare_evicted(registry)
    collect(registry.handle.store, grace_s=0.0)
    registry.run(OLD).exchange.push(content(OLD, AGAIN), step=AGAIN)
    registry.run(OLD).exchange.push(content(OLD, LATER), step=LATER)


def prepare_old(registry: Registry) -> None:
    """Evict the checkpoint in a registry whose next collection seals the runs."""
    prepare(registry)
    registry.upgrade()
    registry.run(OLD).retention.prune(Retention(last=1))


def prepare_whole(registry: Registry) -> None:
    """Seal both runs, in which nothing is evicted."""
    prepare(registry)
    registry.upgrade()
    collect(registry.handle.store, grace_s=0.0)


def prepare_saved(registry: Registry) -> None:
    """Seal both runs, and save something new behind the seal."""
    prepare_whole(registry)
    registry.run(OLD).exchange.push(content(OLD, FRESH), step=FRESH)


def prepare_sealed(registry: Registry) -> None:
    """Seal both runs, and evict the checkpoint behind the seal."""
    prepare_whole(registry)
    registry.run(OLD).retention.prune(Retention(last=1))


# Programs


def push_again(run_id: str = OLD, step: int = AGAIN, stand: Stand = "fresh") -> Program:
    """Save the state of the evicted checkpoint in an existing run."""

    def push(session: Session) -> Saved:
        if stand == "fresh":
            session.ready()
        run = session.open().run(run_id)
        if stand == "resumed":
            run.restore(at=run.checkpoints()[0])
        if stand != "fresh":
            session.ready()
        keep = run.save if stand == "resumed" else run.exchange.push
        storing = Storing(keyframe_every=8 if step == NEAR else 1)
        keep(content(run_id, step), step=step, storing=storing)
        return Saved(run_id, step)

    return push


def push_born(session: Session) -> Saved:
    """Create a run, and save the state of the evicted checkpoint in it."""
    session.ready()
    run = session.open().create_run(NEW, seed=1)
    run.save(content(NEW, AGAIN), step=AGAIN)
    return Saved(NEW, AGAIN)


def evict(session: Session) -> None:
    """Evict all but the newest checkpoint of the old run."""
    session.ready()
    session.open().run(OLD).retention.prune(Retention(last=1))


def gather(session: Session) -> None:
    """Collect all unneeded objects, without a grace."""
    session.ready()
    collect(session.open().handle.store, grace_s=0.0)


def gather_shard(shard: str) -> Program:
    """Collect the unneeded objects of one part of the keys."""

    def gather_it(session: Session) -> None:
        session.ready()
        collect(session.open().handle.store, grace_s=0.0, shard=shard)

    return gather_it


def undo(session: Session) -> Saved:
    """Recover the evicted checkpoint."""
    session.ready()
    session.open().run(OLD).retention.undo()
    return Saved(OLD, EVICTED)


def fork(session: Session) -> Saved:
    """Fork a run from the evicted checkpoint."""
    session.ready()
    session.open().fork(f"{OLD}/main/step{EVICTED}", NEW)
    return Saved(NEW, EVICTED)


def promote(session: Session) -> None:
    """Promote the evicted checkpoint to the pool."""
    session.ready()
    run = session.open().run(OLD)
    run.pool.promote(run.checkpoints()[0])


def outlive(session: Session) -> Saved:
    """Continue a run after somebody has deleted its newest slot."""
    run = session.open().run(OLD)
    session.ready()
    session.backend.delete(slot_key(OLD, run.manifest.next_slot - 1))
    run.exchange.push(content(OLD, LATER), step=LATER)
    return Saved(OLD, LATER)


def read(session: Session) -> None:
    """Load the newest checkpoint of the old run."""
    session.ready()
    found = session.open().run(OLD).latest()
    assert same(found.load(), content(OLD, NEWEST))


def repack_all(session: Session) -> None:
    """Combine the small packs of the old run."""
    session.ready()
    repack(session.open().handle.store, [OLD])


def bring(source: Registry) -> Program:
    """Sync a run from another registry."""

    def bring_it(session: Session) -> Saved:
        session.ready()
        sync(source, session.open(), [FAR])
        return Saved(FAR, AGAIN)

    return bring_it


def mirror(session: Session) -> None:
    """Sync the old run to another registry, which must then be whole."""
    session.ready()
    backend = MemoryBackend()
    create_config(backend, "skipped")
    with opened(backend) as there:
        sync(session.open(), there, [OLD])
        assert there.verify(deep=True).findings == ()


def far_registry() -> Registry:
    """Return another registry, in which a run has the state of the evicted checkpoint."""
    backend = MemoryBackend()
    with named_after("far"):
        create_config(backend, "skipped")
        registry = opened(backend)
        registry.create_run(FAR, seed=1).save(content(FAR, AGAIN), step=AGAIN)
    return registry


# What is played

Prepare = Callable[[Registry], object]


def play(
    programs: Mapping[str, Program],
    *,
    before: Prepare = prepare,
    refused: Mapping[str, tuple[type[Exception], ...]] | None = None,
    mortal: tuple[str, ...] = (),
    page: int | None = None,
    is_disk: bool = False,
) -> Scenario:
    """Return a scenario of these programs."""
    return Scenario(
        prepare=before,
        programs=programs,
        content=content,
        refused=refused or {},
        mortal=frozenset(mortal),
        page=page,
        is_disk=is_disk,
    )


def required(
    run_id: str = OLD, step: int = AGAIN, stand: Stand = "fresh", before: Prepare = prepare
) -> Scenario:
    """Return two pushes, an eviction and a collection."""
    again = push_again(run_id, step, stand)
    programs = {"again": again, "born": push_born, "evict": evict, "gc": gather}
    return play(programs, before=before)


REQUIRED: dict[str, Callable[[], Scenario]] = {
    "the run of the evicted": lambda: required(),
    "the run of the evicted, opened before": lambda: required(stand="opened"),
    "resumed from the evicted": lambda: required(stand="resumed"),
    "resumed from the evicted, something alike": lambda: required(step=ALIKE, stand="resumed"),
    "another run": lambda: required(OTHER),
    "another run, something alike, opened before": lambda: required(OTHER, ALIKE, "opened"),
    "after a sweep": lambda: required(before=prepare_swept, step=ALIKE),
}

MIXES: dict[str, Callable[[], Scenario]] = {
    "a delta on the evicted": lambda: play(
        {"near": push_again(step=NEAR, stand="resumed"), "evict": evict, "gc": gather}
    ),
    "a delta and a repack": lambda: play(
        {
            "near": push_again(step=NEAR, stand="resumed"),
            "evict": evict,
            "gc": gather,
            "repack": repack_all,
        }
    ),
    "undo": lambda: play(
        {"undo": undo, "born": push_born, "gc": gather},
        before=prepare_evicted,
        refused={"undo": (MissingObject,)},
    ),
    "fork": lambda: play(
        {"fork": fork, "evict": evict, "gc": gather, "again": push_again()},
        refused={"fork": (Conflict, NotFound)},
    ),
    "promotion": lambda: play(
        {"promote": promote, "evict": evict, "gc": gather, "born": push_born},
        refused={"promote": (Conflict,)},
    ),
    "sync to here": lambda: play(
        {"bring": bring(far_registry()), "evict": evict, "gc": gather, "again": push_again()}
    ),
    "sync from here": lambda: play({"mirror": mirror, "evict": evict, "gc": gather}),
    "repack": lambda: play(
        {"repack": repack_all, "evict": evict, "gc": gather, "again": push_again(stand="resumed")}
    ),
    "reading under a repack": lambda: play({"read": read, "repack": repack_all, "gc": gather}),
    "two collectors": lambda: play(
        {"again": push_again(), "evict": evict, "gc": gather, "gc2": gather},
    ),
    "two shards": lambda: play(
        {
            "again": push_again(OTHER),
            "evict": evict,
            "gc": gather_shard("1/2"),
            "gc2": gather_shard("2/2"),
        },
    ),
    "a collector dies": lambda: play(
        {"again": push_again(), "gc": gather, "born": push_born, "gc2": gather},
        before=prepare_evicted,
        mortal=("gc",),
    ),
    "listings in pages": lambda: play(
        {"again": push_again(OTHER), "born": push_born, "evict": evict, "gc": gather}, page=2
    ),
}

#: Runs that are sealed: `OTHER` is passed over, unless its pusher is seen.
SEALED: dict[str, Callable[[], Scenario]] = {
    "a sealed run": lambda: play(
        {"again": push_again(OTHER, ALIKE), "gc": gather}, before=prepare_sealed
    ),
    "a sealed run, opened before": lambda: play(
        {"again": push_again(OTHER, ALIKE, "opened"), "gc": gather}, before=prepare_sealed
    ),
    "a run that is being sealed": lambda: play(
        {"again": push_again(OTHER, ALIKE, "opened"), "gc": gather, "gc2": gather},
        before=prepare_old,
    ),
    "a sealed run and two collectors": lambda: play(
        {"again": push_again(OTHER, ALIKE), "gc": gather, "gc2": gather}, before=prepare_sealed
    ),
    "an eviction behind a seal": lambda: play(
        {"evict": evict, "gc": gather, "again": push_again(OTHER, ALIKE)}, before=prepare_whole
    ),
}

#: Somebody deletes from a log: the outcome is reported, not proven.
CUT: dict[str, Callable[[], Scenario]] = {
    "a log that loses its newest slot": lambda: play(
        {"outlive": outlive, "gc": gather},
        refused={"outlive": (RolledBack,), "gc": (IntegrityError,)},
    ),
}

#: On a disk, whose power may go at any step: somebody dies, and another one goes on.
DISK: dict[str, Callable[[], Scenario]] = {
    "the same in two runs": lambda: play(
        {"old": push_again(OLD, FRESH), "other": push_again(OTHER, FRESH)},
        mortal=("old", "other"),
        is_disk=True,
    ),
    "the same again": lambda: play(
        {"again": push_again(), "too": push_again()}, mortal=("again",), is_disk=True
    ),
    "a collector behind an eviction": lambda: play(
        {"evict": evict, "gc": gather}, mortal=("evict",), is_disk=True
    ),
    "a save behind another's marker": lambda: play(
        {"again": push_again(OTHER, FRESH), "too": push_again(OTHER, FRESH)},
        before=prepare_whole,
        mortal=("again",),
        is_disk=True,
    ),
    "a collector behind a note": lambda: play(
        {"gc": gather, "gc2": gather}, before=prepare_saved, mortal=("gc",), is_disk=True
    ),
    "a collector behind another one": lambda: play(
        {"gc": gather, "gc2": gather, "again": push_again(OTHER)},
        before=prepare_evicted,
        mortal=("gc",),
        is_disk=True,
    ),
}
