"""Two pushes, an eviction and a collection, and whatever else may meet a collection, interleaved.

After every step each live checkpoint loads and is what was saved; at the end of every schedule
nothing acknowledged is lost, two quiet collections leave no object that nothing needs, and `verify`
finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from holdfast import Storing
from holdfast.registry.face.factory import open_on
from tests.schedules.explore import Explorer, Tally
from tests.schedules.plays import (
    CUT,
    DISK,
    MIXES,
    NEAR,
    OLD,
    REQUIRED,
    SEALED,
    content,
    prepare,
)
from tests.schedules.scenario import Stage
from tests.schedules.store import Fate
from tests.support.stores import new_backend

Record = Callable[[str, object], None]
FATES: tuple[Fate, ...] = ("now", "late", "twice")
PLAYS = REQUIRED | MIXES | SEALED | DISK
#: One preemption in every run of the tests, and the fates of deletes there. The rest, with two
#: preemptions, by a soak.
QUICK: dict[str, tuple[Fate, ...]] = {
    "another run": ("now",),
    "sync from here": ("late",),
    "an eviction behind a seal": ("now",),
}
#: Takes long with one preemption; a sync that is left out shows without.
SLOW_ON_DISK = "a collector behind another one"
#: Fewer schedules than these would mean that something is not interleaved any more.
LEAST_OF_TWO, LEAST_OF_ONE, LEAST_OF_NONE = 30_000, 150, 10
#: Schedules at random of each play, by a soak; in every run of the tests one of some plays.
RANDOM = 400


def exhaust(
    name: str, preemptions: int, record: Record, fates: tuple[Fate, ...] = FATES
) -> list[Tally]:
    """Go through every schedule of a play, for each fate that deletes may have."""
    explorer = Explorer(Stage(PLAYS[name]()))
    tallies = []
    for fate in fates:
        tally = explorer.exhaust(preemptions, fate)
        tallies.append(tally)
        record(f"schedules, deletes {fate}", tally.schedules)
        print(f"{name}: at most {preemptions} preemptions, deletes {fate}: {tally}")
    return tallies


def wander(names: Iterable[str], schedules: int, record: Record) -> None:
    """Go through schedules of each play at random."""
    for name in names:
        explorer = Explorer(Stage(PLAYS[name]()))
        lengths = [len(explorer.wander(seed).moves) for seed in range(schedules)]
        assert min(lengths) > 10
        record(f"{name}, at random", len(lengths))
        print(f"{name}: {len(lengths)} schedules at random, of {max(lengths)} steps at most")


@pytest.mark.parametrize("name", QUICK)
def test_all_schedules_with_one_preemption(name: str, record_property: Record) -> None:
    for tally in exhaust(name, 1, record_property, QUICK[name]):
        assert tally.schedules > LEAST_OF_ONE


@pytest.mark.parametrize(
    ("name", "preemptions"),
    [
        *((name, int(name != SLOW_ON_DISK)) for name in DISK),
        pytest.param(SLOW_ON_DISK, 1, marks=pytest.mark.soak),
    ],
)
def test_all_schedules_on_a_disk(name: str, preemptions: int, record_property: Record) -> None:
    tally = Explorer(Stage(DISK[name]())).exhaust(preemptions)
    record_property("schedules", tally.schedules)
    print(f"{name}: at most {preemptions} preemptions, the power may go at any step: {tally}")
    assert tally.schedules > (LEAST_OF_ONE if preemptions else LEAST_OF_NONE)


@pytest.mark.parametrize("name", CUT)
def test_a_log_that_was_cut_takes_no_commit(name: str) -> None:
    tally = Explorer(Stage(CUT[name]())).exhaust(1)
    print(f"{name}: {tally}")
    assert tally.schedules > LEAST_OF_NONE


def test_schedules_at_random(record_property: Record) -> None:
    wander([*PLAYS][::6], 1, record_property)


def test_what_is_saved_near_the_evicted_is_a_delta_on_it() -> None:
    with open_on(new_backend()) as reg:
        prepare(reg)
        run = reg.run(OLD)
        evicted = run.checkpoints()[0]
        run.restore(at=evicted)
        near = run.save(content(OLD, NEAR), step=NEAR, storing=Storing(keyframe_every=8))
        assert tuple(near.handle.reader.placement.extra) == tuple(evicted.manifest.direct_chunks)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", REQUIRED)
def test_soak_all_schedules_with_two_preemptions(name: str, record_property: Record) -> None:
    for tally in exhaust(name, 2, record_property):
        assert tally.schedules > LEAST_OF_TWO


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", MIXES | SEALED)
def test_soak_all_schedules_with_one_preemption(name: str, record_property: Record) -> None:
    for tally in exhaust(name, 1, record_property):
        assert tally.schedules > (LEAST_OF_NONE if name in SEALED else LEAST_OF_ONE)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_schedules_at_random(record_property: Record) -> None:
    wander(PLAYS, RANDOM, record_property)
