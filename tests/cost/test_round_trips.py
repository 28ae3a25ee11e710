"""The table of round trips in docs/stores.md, counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast.backends import parse
from holdfast.backends.s3.backend import S3Backend
from holdfast.backends.wrappers import Metered
from holdfast.registry.cli.listing import Listing
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.store.heads import forget, open_heads
from tests.cost.rounds import Clock, Timed, timed
from tests.support.inline import without_threads
from tests.support.states import make_state
from tests.support.stores import Scratch, new_backend, small_grid

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "stores.md"
_PLACE = "s3://bucket/trips"
_PACKS = 8


class _Trip(NamedTuple):
    """An operation: what is done before it, which is not counted, and the operation itself."""

    before: Callable[[Registry], Any]
    act: Callable[[Registry, Any], object]
    remembers: bool = False  # whether this machine has listed the runs before
    cuts: bool = False  # whether packs have a kilobyte


def _nothing(_: Registry) -> None:
    """Do nothing before the operation."""


def _sealed(registry: Registry) -> None:
    """Seal all runs by a collection."""
    registry.upgrade()
    registry.gc(grace_s=0)


def _trained(registry: Registry) -> Run:
    """Return a run that is restored and saved once by this handle."""
    run = registry.run("night")
    run.restore()
    run.save(make_state(50), step=50)
    return run


def _followed(registry: Registry) -> Any:
    """Return a follower that has done all checkpoints."""
    coming = registry.run("night").follow.checkpoints(follow=False)
    for _ in coming:
        pass
    return coming


def _large(seed: int) -> dict[str, Any]:
    """Return a state of eight packs, if a pack has a kilobyte."""
    rng = np.random.default_rng(seed)
    return {"model": {f"w{n}": rng.standard_normal(256).astype("f4") for n in range(_PACKS)}}


def _large_run(registry: Registry) -> Run:
    run = registry.create_run("large", seed=1)
    run.save(_large(0), step=1)
    return run


def _rows(registry: Registry, _: object) -> object:
    return Listing(registry).summaries(lambda run: {"run": run.id}, 1, max_age_s=0)


def _sliced(registry: Registry, _: object) -> object:
    return registry.checkpoint("night/latest")["model/w"][:1]


TRIPS = {
    "open a run, or `holdfast ls RUN`": _Trip(
        _nothing, lambda reg, _: reg.run("night").manifest.checkpoints
    ),
    'resolve a ref: `reg.checkpoint("night/latest")`': _Trip(
        _nothing, lambda reg, _: reg.checkpoint("night/latest")
    ),
    'its first slice: `checkpoint["model/w"][:1]`': _Trip(
        lambda reg: reg.checkpoint("night/latest"), lambda _, ck: ck["model/w"][:1]
    ),
    "both: from the ref to the first slice": _Trip(_nothing, _sliced),
    "`run.latest()` of an open run": _Trip(
        lambda reg: reg.run("night"), lambda _, run: run.latest()
    ),
    "`run.restore()` of an open run": _Trip(
        lambda reg: reg.run("night"), lambda _, run: run.restore()
    ),
    "create a run": _Trip(_nothing, lambda reg, _: reg.create_run("new", seed=1)),
    "save a small state, the first save of a new run": _Trip(
        lambda reg: reg.create_run("new", seed=1), lambda _, run: run.save(make_state(60), step=1)
    ),
    "save a small state, each later time": _Trip(
        _trained, lambda _, run: run.save(make_state(51), step=51)
    ),
    "save a large state of 8 packs, each later time": _Trip(
        _large_run, lambda _, run: run.save(_large(1), step=2), cuts=True
    ),
    "save what did not change": _Trip(_trained, lambda _, run: run.save(make_state(50), step=51)),
    "commit without objects: a tag, a metric": _Trip(
        lambda reg: (lambda run: (run, run.latest()))(_trained(reg)),
        lambda _, both: both[0].pins.tags.set("keeper", both[1]),
    ),
    "`watch`, each poll": _Trip(_followed, lambda _, coming: next(coming, None)),
    "`run ls` of 50 runs, the first time": _Trip(_nothing, _rows),
    "`run ls` of 50 sealed runs, the first time": _Trip(_sealed, _rows),
    "`run ls` of 50 runs, each later time": _Trip(_nothing, _rows, remembers=True),
}


@cache
def _store() -> Scratch:
    """Return a registry of 50 runs, one of them with 12 checkpoints."""
    store = new_backend()
    with without_threads(open_on(store)) as registry:
        run = registry.create_run("night", seed=1)
        for step in range(1, 13):
            state = make_state(step)
            run.save({**state, "model": {**state["model"], "w": np.arange(99) + step}}, step=step)
        for number in range(49):
            registry.create_run(f"other{number:02}", seed=1).save(make_state(number), step=1)
    return store


def _count(trip: _Trip) -> tuple[int, int]:
    """Return the chain of round trips of an operation, and its requests."""
    clock, store = Clock(), _store().copy()
    if trip.remembers:
        with without_threads(open_on(store, heads=open_heads(parse(_PLACE)))) as registry:
            trip.act(registry, None)
    backend = Metered(Timed(store, clock))
    backend.concurrency = S3Backend.concurrency
    heads = open_heads(parse(_PLACE)) if trip.remembers else None
    grid = small_grid(pack_bytes=1024) if trip.cuts else nullcontext()
    with grid, timed(open_on(backend, heads=heads), clock) as registry:
        made = trip.before(registry)
        with backend.measure() as usage:
            chain = clock.rounds(lambda: trip.act(registry, made))
    if trip.remembers:
        forget(parse(_PLACE))
    return chain, usage.requests


def _told() -> dict[str, tuple[int, int]]:
    """Return the rows of the table."""
    _, _, rest = _PAGE.read_text().partition("\n## Round trips\n")
    rows = [line.strip("| ").split(" | ") for line in rest.splitlines() if line.startswith("| ")]
    return {what: (int(chain), int(requests)) for what, chain, requests in rows[1:]}


def test_the_table_has_every_operation() -> None:
    assert [*_told()] == ["open a registry", *TRIPS]


def test_a_registry_is_opened_by_one_request() -> None:
    backend = Metered(Timed(_store(), clock := Clock()))
    with open_on(backend):
        assert (clock.now, backend.snapshot().requests) == _told()["open a registry"]


@pytest.mark.parametrize("what", TRIPS)
def test_the_table_of_round_trips_is_true(what: str) -> None:
    assert _count(TRIPS[what]) == _told()[what]
