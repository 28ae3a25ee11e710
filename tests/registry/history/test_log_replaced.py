"""A handle outlives its log: the newest slots are deleted, or something else is in their place.

Whatever the handle would commit, or would call done already, it refuses, and it names the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Retention
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import IntegrityError, RolledBack
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.upkeep.gc import Collector
from tests.support.states import small_state
from tests.support.stores import Open, Scratch, contents, new_backend

RUN = "run"


def live(registry: Registry, steps: int = 3, offset: int = 0) -> Run:
    """Return a run that has something of everything."""
    run = registry.create_run(RUN, seed=1)
    for step in range(1, steps + 1):
        run.save(small_state(step + offset), step=step, metrics={"loss": 1 / step})
    run.pins.gates.set("done", run.latest())
    run.pool.promote(run.latest())
    run.streams["losses"].append({"step": 1}, lifetime="resettable")
    run.releases.publish("1.0.0", run.latest(), card={"name": "it"})
    run.releases.publish("1.1.0", run.latest(), card={"name": "it"})
    run.retention.prune(Retention(last=2))
    return run


# What becomes of the log

Loss = Callable[[MemoryBackend], None]


def overwrite(backend: MemoryBackend, other: MemoryBackend) -> None:
    for key in contents(backend):
        backend.delete(key)
    for key, data in contents(other).items():
        backend.put(key, data)


def newest_slot_deleted(backend: MemoryBackend) -> None:
    backend.delete(list(contents(backend, f"runs/{RUN}/log/"))[-1])


def set_back(backend: MemoryBackend) -> None:
    for key in list(contents(backend, f"runs/{RUN}/log/"))[3:]:
        backend.delete(key)


def another_registry(backend: MemoryBackend, steps: int = 3) -> None:
    other = new_backend()
    with open_on(other) as registry:
        live(registry, steps, offset=50)
    overwrite(backend, other)


def another_longer_registry(backend: MemoryBackend) -> None:
    another_registry(backend, steps=9)


def everything_gone(backend: MemoryBackend) -> None:
    overwrite(backend, MemoryBackend())


LOSSES = [
    newest_slot_deleted,
    set_back,
    another_registry,
    another_longer_registry,
    everything_gone,
]

# What the handle is asked to do then

Act = Callable[[Run], object]
ACTS: dict[str, Act] = {
    "save": lambda run: run.save(small_state(9), step=9),
    "save an unchanged state": lambda run: run.save(small_state(3), step=9),
    "save in the background": lambda run: run.save_async(small_state(9), step=9).wait(),
    "save again": lambda run: run.save(small_state(3), step=3, metrics={"loss": 1 / 3}),
    "push": lambda run: run.exchange.push(small_state(9), step=9),
    "report": lambda run: run.history.checkpoint(run.manifest.latest().n).report({"loss": 2.0}),
    "tag": lambda run: run.pins.tags.set("keeper", run.history.checkpoint(run.manifest.latest().n)),
    "gate": lambda run: run.pins.gates.set(
        "other", run.history.checkpoint(run.manifest.latest().n)
    ),
    "gate again": lambda run: run.pins.gates.set(
        "done", run.history.checkpoint(run.manifest.latest().n)
    ),
    "artifact": lambda run: run.pins.artifacts.set("file", {"rows": [1, 2]}),
    "publish": lambda run: run.releases.publish(
        "2.0.0", run.history.checkpoint(run.manifest.latest().n)
    ),
    "roll back": lambda run: run.releases.rollback("1.0.0"),
    "roll back again": lambda run: run.releases.rollback("1.1.0"),
    "promote again": lambda run: run.pool.promote(run.history.checkpoint(run.manifest.latest().n)),
    "match": lambda run: run.pool.record_match([None, 1], [1, 2], match="final"),
    "append": lambda run: run.streams["losses"].append({"step": 2}),
    "archive": lambda run: run.streams["losses"].archive("first"),
    "prune": lambda run: run.retention.prune(Retention(last=1)),
    "prune again": lambda run: run.retention.prune(Retention(last=2)),
    "undo": lambda run: run.retention.undo(run.retention.evicted()[0]),
    "merge": lambda run: run.exchange.merge(
        [run.history.checkpoint(2), run.history.checkpoint(3)],
        step=9,
        average=["model"],
        pick={"optimizer": run.history.checkpoint(2)},
    ),
    "watch": lambda run: next(run.follow.checkpoints(follow=False)),
    "set status": lambda run: setattr(run, "status", "completed"),
    "drop": lambda run: run.retention.drop("a mistake"),
}


@pytest.fixture(scope="module")
def lived() -> Scratch:
    backend = new_backend()
    with open_on(backend) as registry:
        live(registry)
    return backend


@pytest.fixture
def backend(lived: Scratch) -> MemoryBackend:
    return lived.copy()


#: Each act after some of the losses in every check, and each loss before half of the acts.
_PAIRS = [
    pytest.param(
        act,
        loss,
        id=f"{act}-{loss.__name__}",
        marks=pytest.mark.soak if (row + column) % 2 else (),
    )
    for row, act in enumerate(ACTS)
    for column, loss in enumerate(LOSSES)
]


@pytest.mark.parametrize(("act", "loss"), _PAIRS)
def test_nothing_is_committed_to_a_log_that_was_replaced(
    act: str, loss: Loss, backend: MemoryBackend, open_registry: Open
) -> None:
    run = open_registry(backend).run(RUN)
    run.restore()
    loss(backend)
    before = contents(backend, "runs/")
    # A merge reads its sources first: they may be gone as well.
    with pytest.raises(IntegrityError if act == "merge" else RolledBack):
        ACTS[act](run)
    assert contents(backend, "runs/") == before


@pytest.mark.parametrize("there", [None, "another"])
def test_no_run_begins_in_another_registry(there: str | None, open_registry: Open) -> None:
    backend, other = new_backend(), new_backend()
    registry = open_registry(backend)
    overwrite(backend, other if there else MemoryBackend("empty"))
    before = contents(backend)
    with pytest.raises(RolledBack, match="not the one that this handle was opened on") as told:
        registry.create_run(RUN, seed=1)
    with pytest.raises(RolledBack):
        registry.run(RUN, create=True, seed=1)
    assert (told.value.found == "none") is (there is None)
    assert contents(backend) == before


def test_the_error_says_what_was_expected_and_found(
    backend: MemoryBackend, open_registry: Open
) -> None:
    run = open_registry(backend).run(RUN)
    newest = run.manifest.next_slot - 1
    newest_slot_deleted(backend)
    with pytest.raises(RolledBack) as told:
        run.status = "failed"
    assert told.value.where == slot_key(RUN, newest)
    assert told.value.found == "no slot"
    another_registry(backend)
    with pytest.raises(RolledBack) as told:
        run.status = "failed"
    assert (told.value.expected or "").startswith("the slot ")
    assert (told.value.found or "").startswith("the slot ")
    assert told.value.found != told.value.expected
    assert told.value.exit_code == IntegrityError.exit_code == 6
    # A handle that reads the log again continues from what is there.
    open_registry(backend).run(RUN).status = "failed"


def test_a_handle_that_read_on_over_the_seam_notices(
    backend: MemoryBackend, open_registry: Open
) -> None:
    """What follows has no commit, so no chain of commits tells."""
    run = open_registry(backend).run(RUN)
    behind = run.manifest.next_slot
    newest_slot_deleted(backend)
    other = open_registry(backend).run(RUN)
    other.status = "failed"  # in the place of the slot that is gone
    backend.put(slot_key(RUN, behind), _mark())
    with pytest.raises(RolledBack):
        run.refresh()
    assert run.manifest.next_slot == behind


def _mark() -> bytes:
    store = new_backend()
    with open_on(store) as registry:
        run = registry.create_run(RUN, seed=1)
        run.save(small_state(1), step=1)
        run.save(small_state(2), step=2)
        run.retention.prune(Retention(last=1))
        registry.gc(grace_s=0)
        return contents(store, f"runs/{RUN}/log/")[
            slot_key(RUN, run.refresh().manifest.next_slot - 1)
        ]


def test_a_collector_stops_at_a_run_that_was_replaced(
    backend: MemoryBackend, open_registry: Open
) -> None:
    collector = Collector(open_registry(backend).handle.store, grace_s=0)
    collector.choose()
    collector.condemn()
    newest_slot_deleted(backend)
    before = contents(backend)
    with pytest.raises(RolledBack, match="Nothing was deleted"):
        collector.mark()
    assert contents(backend) == before


def test_the_look_is_made_at_each_commit(backend: MemoryBackend, open_registry: Open) -> None:
    calls: list[Any] = []
    run = open_registry(Metered(backend, calls)).run(RUN)
    run.status = "running"
    calls.clear()
    for _ in range(3):
        run.status = "running"
    newest = run.manifest.next_slot - 1
    asked = [(call.method, call.key) for call in calls]
    assert asked == [
        one
        for slot in (newest - 2, newest - 1, newest)
        for one in (("get", slot_key(RUN, slot - 1)), ("put_if_absent", slot_key(RUN, slot)))
    ]


def test_a_look_that_others_have_overtaken_is_made_again(
    backend: MemoryBackend, open_registry: Open
) -> None:
    log = RunLog(open_registry(backend).handle.store, RUN)
    log.open()
    look = log.look()
    other = open_registry(backend).run(RUN)
    other.status = "failed"
    log.refresh()
    newest_slot_deleted(backend)
    with pytest.raises(RolledBack):
        log.append(lambda _: None, look=look)
