"""What is interrupted: saves, names, forks and syncs, each small, each to be done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from holdfast import Monitor, sync
from holdfast.registry.errors import StoreUnavailable
from holdfast.registry.face.registry import Registry
from holdfast.registry.spec import Gate, Phase, Pool, Retention, RunSpec, Stream, Tier
from tests.support.pictures import RUN
from tests.support.states import make_state
from tests.support.stores import Scratch, new_backend, opened

_MONITOR = Monitor(metric="loss", mode="min")


def nothing(registry: Registry) -> None:
    return None


@dataclass(frozen=True)
class Scenario:
    """An operation and what comes before it.

    Attributes:
        name: What it is called.
        act: The operation, given what `begin` returned.
        prepare: What an earlier process did, unharmed.
        begin: What the same process does first, unharmed.
        resume: What another process does first that comes after it.
        acknowledged: Steps whose checkpoints stand before `act`.
        run: The run whose log grows by it.
        interrupt_source: Whether the source of a sync fails instead of its destination.
    """

    name: str
    act: Callable[[Registry, Any], object]
    prepare: Callable[[Registry], object] = nothing
    begin: Callable[[Registry], Any] = nothing
    resume: Callable[[Registry], Any] | None = None
    acknowledged: tuple[int, ...] = ()
    run: str = RUN
    interrupt_source: bool = False

    def __str__(self) -> str:
        return self.name


def _begin_run(registry: Registry) -> Any:
    return registry.run(RUN, create=True, seed=7, config={"lr": 0.1}, monitor=_MONITOR)


def _two_steps(registry: Registry) -> None:
    run = _begin_run(registry)
    for step in (1, 2):
        run.save(make_state(step), step=step, metrics={"loss": 1 / step})
    run.status = "interrupted"


def _saved_once(registry: Registry) -> Any:
    run = _begin_run(registry)
    run.save(make_state(1), step=1)
    return run


def reopened(registry: Registry) -> Any:
    return registry.run(RUN)


def _first_save(registry: Registry, _: object) -> None:
    _begin_run(registry).save(make_state(1), step=1, metrics={"loss": 1.0})


def _later_save(registry: Registry, run: Any) -> None:
    run.save(make_state(2), step=2, metrics={"loss": 0.5}, meta={"epoch": 1})


def _save_in_background(registry: Registry, run: Any) -> None:
    with suppress(StoreUnavailable):
        run.close()  # hear of the last save's failure, if nobody has yet
    run.save_async(make_state(2), step=2).wait()


def _save_after_takeover(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    restored = run.restore()
    assert restored is not None
    run.save(make_state(3), step=3)


def _save_after_rewind(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    if run.latest().meta != "second attempt":
        run.restore(at=run.checkpoints()[0])
        run.save(make_state(20), step=2, meta="second attempt")


def _report(registry: Registry, _: object) -> None:
    registry.checkpoint(f"{RUN}/main/step1").report({"loss": 0.01, "mu": 25.0})


def _tag(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    run.pins.tags.set("keeper", run.latest())


def _untag(registry: Registry, _: object) -> None:
    tags = registry.run(RUN).pins.tags
    if "keeper" in tags.list():
        tags.remove("keeper")


def _tagged(registry: Registry) -> None:
    _two_steps(registry)
    _tag(registry, None)


PUSHES = [
    Scenario("first save", _first_save),
    Scenario("later save", _later_save, nothing, _saved_once, reopened, (1,)),
    Scenario("save in background", _save_in_background, nothing, _saved_once, reopened, (1,)),
    Scenario("save after takeover", _save_after_takeover, _two_steps, acknowledged=(1, 2)),
    Scenario("save after rewind", _save_after_rewind, _two_steps, acknowledged=(1, 2)),
    Scenario("report", _report, _two_steps, acknowledged=(1, 2)),
    Scenario("tag", _tag, _two_steps, acknowledged=(1, 2)),
    Scenario("untag", _untag, _tagged, acknowledged=(1, 2)),
]


# A run with everything that a save can say at once: a companion that is carried on, a tier, an
# entry in the pool for which the oldest goes, entries of a stream, keys that the commit keeps, an
# eviction.

_SPEC = RunSpec(
    phases=(
        Phase(name="1", monitors=(_MONITOR,)),
        Phase(
            name="2",
            monitors=(_MONITOR,),
            companions=("reference",),
            tiers=(
                Tier(name="record", improves=("loss",), retention=Retention(last=1)),
                Tier(name="rolling", retention=Retention(last=1)),
            ),
        ),
    ),
    gates=(Gate(name="bc_best", phase="1"),),
    commit_keys=("step",),
    finite=("model/*",),
    inference=("model",),
    pool=Pool(phase="2", size=1, promote_on_save=True),
    streams=(Stream(name="losses", lifetime="forever"),),
)


def _entries(step: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1 / step}]


def _live_on(run: Any, step: int, **options: Any) -> None:
    metrics = {"loss": 1 / step}
    run.save(
        make_state(step), step=step, metrics=metrics, streams={"losses": _entries(step)}, **options
    )


def _whole_life(registry: Registry) -> Any:
    run = registry.run(RUN, create=True, seed=7, preset=_SPEC)
    _live_on(run, 1, phase=1)
    _live_on(run, 2, phase=2, companions={"reference": {"policy": make_state(1)["model"]}})
    _live_on(run, 3)
    assert [ck.step for ck in run.retention.evicted()] == [2]
    return run


def _save_with_everything(registry: Registry, run: Any) -> None:
    _live_on(run, 4)


def _set_gate(registry: Registry, _: object) -> None:
    registry.run(RUN).pins.gates.set("bc_best")


def _add_artifact(registry: Registry, _: object) -> None:
    registry.run(RUN).pins.artifacts.set("seeds", {"bank": make_state(9)["optimizer"]["moments"]})


def _undo(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    if run.retention.evicted():
        run.retention.undo()


def _prune(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    run.retention.prune(Retention(last=1))


def _gated_life(registry: Registry) -> None:
    _whole_life(registry).pins.gates.set("bc_best")


def _fork(registry: Registry, _: object) -> None:
    if "fork" not in registry.run_names() or registry.run("fork").latest() is None:
        registry.fork(f"{RUN}/phase2/step3", "fork")


def _drop(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    if run.manifest.dropped is None:
        run.retention.drop("done with")


def _drop_now(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    if not run.manifest.holds_nothing:
        run.retention.drop("done with", now=True)


def _dropped(registry: Registry) -> None:
    _drop(registry, _whole_life(registry))


def _undrop(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    if run.manifest.dropped is not None:
        run.retention.undrop()


def _dropped_long_ago(registry: Registry) -> None:
    """Prepare a collection that frees a run, and deletes what it held."""
    registry.drop_rules(delay_s=0)
    _two_steps(registry)
    other = registry.create_run("other", seed=8)
    other.save(make_state(3), step=3)
    other.retention.drop(reason="a mistake")


def _two_steps_and_a_dropped_run(registry: Registry) -> None:
    _two_steps(registry)
    registry.run(RUN).retention.prune(Retention(last=1))
    other = registry.create_run("other", seed=8)
    other.save(make_state(3), step=3)
    other.retention.drop(reason="a mistake", now=True)


def collect(registry: Registry, _: object) -> None:
    registry.gc(grace_s=0)


def _collected_before(registry: Registry) -> None:
    """Prepare a collection that begins with the notes of another one, and makes new ones."""
    _two_steps_and_a_dropped_run(registry)
    registry.gc(grace_s=0)
    run = registry.run(RUN)
    run.restore()
    run.save(make_state(3), step=3)
    run.retention.prune(Retention(last=1))


def _upgrade(registry: Registry, _: object) -> None:
    registry.upgrade()


def _swept_before_an_upgrade(registry: Registry) -> None:
    """Prepare a collection that puts names in tables, and joins those of an older sweep."""
    _two_steps_and_a_dropped_run(registry)
    registry.gc(grace_s=0)
    registry.upgrade()
    another = registry.create_run("another", seed=9)
    another.save(make_state(4), step=4)
    another.retention.drop(reason="a mistake, too", now=True)


def _about_to_be_sealed(registry: Registry) -> None:
    """Prepare a collection that sweeps, and seals a run."""
    _two_steps_and_a_dropped_run(registry)
    registry.upgrade()


def _sealed(registry: Registry) -> None:
    """Seal the runs, and leave something of one behind its seal that nothing needs."""
    _about_to_be_sealed(registry)
    another = registry.create_run("another", seed=9)
    another.save(make_state(4), step=4)
    registry.gc(grace_s=0)
    another.retention.drop(reason="a mistake, too", now=True)


def _sealed_and_saved(registry: Registry) -> None:
    """Commit behind the seal, so that the next collection seals the run again."""
    _sealed(registry)
    run = registry.run(RUN)
    run.restore()
    run.save(make_state(3), step=3)
    run.retention.prune(Retention(last=1))


def _save_behind_a_seal(registry: Registry, _: object) -> None:
    run = registry.run(RUN)
    run.restore()
    run.save(make_state(3), step=3)


LIVES = [
    Scenario(
        "save with everything", _save_with_everything, nothing, _whole_life, reopened, (1, 2, 3)
    ),
    Scenario("set gate", _set_gate, _whole_life, acknowledged=(1, 2, 3)),
    Scenario("add artifact", _add_artifact, _whole_life, acknowledged=(1, 2, 3)),
    Scenario("undo", _undo, _whole_life, acknowledged=(1, 2, 3)),
    Scenario("prune", _prune, _two_steps, acknowledged=(1, 2)),
    Scenario("fork", _fork, _gated_life, acknowledged=(1, 2, 3), run="fork"),
    Scenario("drop", _drop, _whole_life, acknowledged=(1, 2, 3)),
    Scenario("drop now", _drop_now, _whole_life, acknowledged=(1, 2, 3)),
    Scenario("undrop", _undrop, _dropped, acknowledged=(1, 2, 3)),
    Scenario("free", collect, _dropped_long_ago, acknowledged=(1, 2), run="other"),
    Scenario("collect", collect, _two_steps_and_a_dropped_run, acknowledged=(2,)),
    Scenario("collect by notes", collect, _collected_before, acknowledged=(3,)),
    Scenario("upgrade", _upgrade, _two_steps, acknowledged=(1, 2)),
    Scenario("collect after an upgrade", collect, _swept_before_an_upgrade, acknowledged=(2,)),
    Scenario("seal", collect, _about_to_be_sealed, acknowledged=(2,)),
    Scenario("save behind a seal", _save_behind_a_seal, _sealed, acknowledged=(2,)),
    Scenario("pass over sealed runs", collect, _sealed, acknowledged=(2,), run="another"),
    Scenario("seal again", collect, _sealed_and_saved, acknowledged=(3,)),
]


#: Acts of other scenarios, where a registry was upgraded or sealed, or with another word of one
#: commit. In every run of the tests they die at each call; no answer and no power by a soak.
AGAIN = (
    *("save in background", "save after takeover", "report", "set gate", "add artifact"),
    *("drop now", "free", "collect after an upgrade", "pass over sealed runs", "seal again"),
)


@cache
def sources() -> tuple[Scratch, Scratch]:
    """Return a source of syncs when it was half as long, and as it is now."""
    source = new_backend()
    with opened(source) as registry:
        _two_steps(registry)
    half = source.copy()
    with opened(source) as registry:
        run = registry.run(RUN)
        run.restore()
        run.save(make_state(3), step=3)
        run.pins.tags.set("keeper", run.latest())
        run.latest().report({"loss": 0.3})
    return half, source


def _pull(registry: Registry, source: Any) -> None:
    with opened(sources()[1] if source is None else source) as healthy:
        sync(healthy, registry)


def _pull_half(registry: Registry) -> None:
    with opened(sources()[0]) as half:
        sync(half, registry)


SYNCS = [
    Scenario("sync to fresh", _pull),
    Scenario("sync to half", _pull, _pull_half, acknowledged=(1, 2)),
    Scenario("sync from failing source", _pull, interrupt_source=True),
]
