"""What is interrupted: pushes and syncs, each small, each able to be done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from registry import Monitor, sync
from registry.errors import StoreUnavailable
from registry.registry import Registry
from tests.crash.world import RUN, Scratch, fresh_store, make_state, opened

_MONITOR = Monitor(metric="loss", mode="min")


def _nothing(registry: Registry) -> None:
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
        interrupt_source: Whether the source of a sync fails instead of its destination.
    """

    name: str
    act: Callable[[Registry, Any], object]
    prepare: Callable[[Registry], object] = _nothing
    begin: Callable[[Registry], Any] = _nothing
    resume: Callable[[Registry], Any] | None = None
    acknowledged: tuple[int, ...] = ()
    interrupt_source: bool = False

    def __str__(self) -> str:
        return self.name


def _begin_run(registry: Registry) -> Any:
    return registry.run(RUN, create=True, seed=7, config={"lr": 0.1}, monitor=_MONITOR)


def _two_steps(registry: Registry) -> None:
    run = _begin_run(registry)
    for step in (1, 2):
        run.save(make_state(step), step=step, metrics={"loss": 1 / step})
    run.set_status("interrupted")


def _saved_once(registry: Registry) -> Any:
    run = _begin_run(registry)
    run.save(make_state(1), step=1)
    return run


def _reopened(registry: Registry) -> Any:
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
    run.tag("keeper", run.latest())


PUSHES = [
    Scenario("first save", _first_save),
    Scenario("later save", _later_save, _nothing, _saved_once, _reopened, (1,)),
    Scenario("save in background", _save_in_background, _nothing, _saved_once, _reopened, (1,)),
    Scenario("save after takeover", _save_after_takeover, _two_steps, acknowledged=(1, 2)),
    Scenario("save after rewind", _save_after_rewind, _two_steps, acknowledged=(1, 2)),
    Scenario("report", _report, _two_steps, acknowledged=(1, 2)),
    Scenario("tag", _tag, _two_steps, acknowledged=(1, 2)),
]


@cache
def sources() -> tuple[Scratch, Scratch]:
    """Return a source of syncs when it was half as long, and as it is now."""
    source = fresh_store()
    with opened(source) as registry:
        _two_steps(registry)
    half = source.copy()
    with opened(source) as registry:
        run = registry.run(RUN)
        run.restore()
        run.save(make_state(3), step=3)
        run.tag("keeper", run.latest())
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
