"""How many round trips depend on one another, which is what a slow network makes felt."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from holdfast.backends import parse
from holdfast.registry.cli.listing import Listing
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import (
    AddCheckpoint,
    CreateRun,
    Place,
    ReportMetrics,
    line_digest,
)
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import SNAPSHOT_EVERY, RunLog
from holdfast.registry.history.replay import Slot
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.store.heads import Heads, open_heads
from holdfast.registry.values.digest import Digest
from tests.cost.rounds import Clock, Timed, timed
from tests.support.inline import without_threads
from tests.support.states import make_state
from tests.support.stores import Scratch, new_backend

_COMMITS = 2_000


@cache
def long_run(commits: int) -> Scratch:
    """Return a registry with a run of so many commits, a checkpoint at every tenth."""
    store = new_backend()
    with without_threads(open_on(store)) as registry:
        log = RunLog(registry.handle.store, "long")
        for n in range(commits):
            action = _action(n)
            log.append(
                lambda state, action=action: [*_places(action), commit_line(state, [action])]
            )
        assert log.run.commits == commits
    return store


def _action(n: int) -> CreateRun | AddCheckpoint | ReportMetrics:
    if n == 0:
        nothing = Digest.of(b"")
        return CreateRun(config=None, config_hash=nothing, seed="0" * 16, environment={})
    if n % 100 == 1:
        return AddCheckpoint(manifest=Digest.of(b"%d" % n), phase="main", step=n, size_bytes=1)
    return ReportMetrics(checkpoint=n - (n - 1) % 100, metrics={"loss": 1.0 / n})


def _places(action: object) -> list[Place]:
    """Return where a checkpoint lies: as a save says it in the slot of its commit."""
    if not isinstance(action, AddCheckpoint):
        return []
    made = {"placement": action.manifest, "manifest_generation": 0, "placement_generation": 0}
    return [Place(manifest=action.manifest, **made)]


def _rounds(store: Scratch, act: Callable[[Registry], object], heads: Heads | None = None) -> int:
    clock = Clock()
    with timed(open_on(Timed(store, clock), heads=heads), clock) as registry:
        return clock.rounds(lambda: act(registry))


def test_clock_counts_what_depends() -> None:
    store, clock = new_backend(), Clock()
    for number in range(2500):
        store.put(f"runs/{number:04d}", b"")
    with timed(open_on(Timed(store, clock)), clock) as registry:
        backend, pools = registry.handle.store.backend, registry.handle.store.pools
        assert clock.now == 1  # registry.json
        keys = [f"runs/{number:04d}" for number in range(128)]
        assert clock.rounds(lambda: [backend.get(key) for key in keys]) == 128
        assert clock.rounds(lambda: list(pools.small.map(backend.get, keys[:64]))) == 1
        assert clock.rounds(lambda: list(pools.small.map(backend.get, keys))) == 2
        assert clock.rounds(lambda: pools.small.submit(backend.get, keys[0])) == 0
        assert clock.rounds(lambda: list(backend.list("runs/"))) == 3


@pytest.mark.parametrize(("commits", "rounds"), [(1, 2), (63, 2), (64, 2), (65, 2), (_COMMITS, 3)])
def test_run_opens_in_two_rounds_and_in_three_however_long_it_is(commits: int, rounds: int) -> None:
    assert _rounds(long_run(commits), lambda registry: registry.run("long")) == rounds


def test_a_long_run_of_which_this_machine_has_seen_almost_all_opens_in_two_rounds() -> None:
    heads = open_heads(parse("s3://bucket/seen"))
    store = long_run(_COMMITS)
    for _ in range(2):
        rounds = _rounds(store, lambda registry: registry.run("long"), heads)
    assert rounds == 2


@pytest.mark.parametrize("seen", [1, 500, 990, 1000])
def test_a_head_that_was_seen_before_is_proved_within_these_rounds(seen: int) -> None:
    store = long_run(1000)
    key = slot_key("long", seen - 1)
    ((line, _),) = Slot.decode(seen - 1, store.get(key), where=key).commits
    heads = open_heads(parse("s3://bucket/long"))
    heads.note("long", seen, seen, line_digest(line), seen - 1)
    assert _rounds(store, lambda registry: registry.run("long"), heads) <= 3
    assert heads.all()["long"].commits == 1000


def test_head_of_a_long_run_is_the_newest_commit() -> None:
    with without_threads(open_on(long_run(_COMMITS))) as registry:
        run = registry.run("long")
        assert run.manifest.commits == _COMMITS
        assert len(run.checkpoints()) == _COMMITS // 100
        snapshots = list(registry.handle.store.backend.list("runs/long/snapshots/"))
        assert len(snapshots) == _COMMITS // SNAPSHOT_EVERY


def test_restore_takes_a_round_for_each_thing_that_names_the_next() -> None:
    store = new_backend()
    with without_threads(open_on(store)) as registry:
        registry.create_run("night", seed=1).save(make_state(1), step=1)
    opening = _rounds(store, lambda registry: registry.run("night"))
    whole = _rounds(store, lambda registry: registry.run("night").restore())
    # Is anything new; manifest and placement; packs.
    assert whole - opening <= 3


def test_runs_are_opened_side_by_side_by_listings_and_looks_for_an_id() -> None:
    store = new_backend()
    with without_threads(open_on(store)) as registry:
        saved = [
            registry.create_run(name, seed=1).save(make_state(step), step=step)
            for step, name in enumerate("abcdefgh", start=1)
        ]
    assert _rounds(store, lambda registry: Listing(registry).runs()) == 1 + 2
    last = saved[-1].digest.hex()
    assert _rounds(store, lambda registry: registry.checkpoint(last)) == 1 + 2
