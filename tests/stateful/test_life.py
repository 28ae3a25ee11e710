"""Runs live, are mirrored and collected, in any order and with everything going wrong at any call.

Processes with stale handles, collectors at every step, deletes that land late and twice, crashes
and lost answers at any call, clocks that jump by decades: nothing live is ever lost, nothing wrong
ever read, and in the end no unneeded object is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.base import Base
from tests.stateful.collecting import Collecting
from tests.stateful.writing import Writing
from tests.support.places import PLACES
from tests.support.sometimes import Watch

# Some lives report no metric; evictions then say that none of the checkpoints was better.
pytestmark = pytest.mark.filterwarnings("ignore:.*evicted as if none were better:UserWarning")

_WEIGHTS = {
    "create": 3,
    "save": 7,
    "rewind_and_save": 2,
    "leave_orphan": 4,
    "append": 3,
    "archive": 3,
    "undo": 2,
    "undrop": 3,
    "promote": 2,
    "prune": 3,
    "thin": 3,
    "tier": 2,
    "go_on": 3,
    "finish": 2,
    "collect": 2,
    "start_collector": 3,
    "step_collector": 6,
    "deliver_delete": 2,
    "sync": 2,
}


class Life(Writing, Collecting):
    """All rules together. Each is as likely as any other: what matters most has several names."""


_SEEDS = itertools.count()

for _name, _weight in _WEIGHTS.items():
    for _number in range(1, _weight):
        setattr(Life, f"{_name}_{_number}", getattr(Life, _name))


#: What must have gone well at least once: a machine that is refused everything finds nothing.
_EVERYTHING = (
    *("create", "save", "delta", "rewind and save", "fork", "prune", "thin", "undo", "report"),
    *("drop", "undrop", "undrop from a mirror", "upgrade"),
    *("tag", "untag", "gate", "artifact", "publish", "point back", "promote", "append", "archive"),
    *("collect", "collect in full", "choose", "condemn", "mark", "delete", "repack", "tier"),
    *("sync", "read late", "load"),
)
#: The rare places that these lives are for: in every run of the tests, and by a soak.
_PLACES = (
    "a condemned object is copied",
    "a mark is met between plan and commit",
    "a quiet run is passed over",
    "a run is sealed",
    "a run needs what was condemned",
    "a sealed run is woken",
    "an undrop brings states from a mirror",
    "another writer has the slot",
    "the outcome of a slot is unknown",
)
_RARER = (
    *_PLACES,
    "a change is stale and made again",
    "a change looks for evicted records",
    "a collection begins at a note",
    "a mark is newer than the observed epoch",
    "a new seal is met at the commit",
    "a save repeats a checkpoint",
    "a sealed run was woken by another writer",
    "a slot needs the records of evicted checkpoints",
    "lines are composed of the whole history",
    "objects are written again after a sweep",
    "slots that were read need the whole history",
)
_TROUBLE = (
    "killed, stopped on the way",
    "no answer, stopped on the way",
    "done, stopped on the way",
)


def _live(rounds: int, steps: int) -> None:
    """Live so many rounds of ten lives; after ten hypothesis begins to vary what it has tried."""
    chosen = settings(
        max_examples=10,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    for _ in range(rounds):
        if settings.default.derandomize:
            # As on CI machines: without seeds of their own all rounds would be the same ten lives.
            seed(next(_SEEDS))(Life)
        run_state_machine_as_test(Life, settings=chosen)


def _live_what_chance_seldom_brings() -> None:
    """Live one life in an order that chance seldom brings about."""
    life = Life()
    try:
        life.begin(first=0, second=2, number=1)
        life.tag(side=0, who=0, which=1, of=0, name="a", stop=None)
        life.untag(side=0, who=1, which=1, name="a", stop=None)
        life.publish(side=0, who=0, which=1, of=0, version=0, whole=True, stop=None)
        life.publish(side=0, who=0, which=1, of=0, version=1, whole=True, stop=None)
        life.point_back(side=0, who=0, which=0, stop=None)
        life.create(side=0, who=0, kind=1, number=2, stop=None)
        life.sync(back=False, who=0, whom=0, stop=None)
        life.drop(side=0, who=1, which=0, now=0, stop=None)
        life.collect(side=0, grace_s=0.0, full=0, stop=None)
        life.upgrade(side=0, stop=None)
        life.collect(side=0, grace_s=0.0, full=1, stop=None)
        life.undrop(side=0, who=2, which=0, stop=None)
        life.what_is_live_is_there()
    finally:
        life.teardown()


def _lacking(watch: Watch) -> list[str]:
    """Return what of `_EVERYTHING`, `_TROUBLE` and the places has not happened yet."""
    undone = [what for what in _EVERYTHING if not Base.tally[f"{what}: done"]]
    unseen = [one for one in _TROUBLE if not any(one in ending for ending in Base.tally)]
    return [*undone, *unseen, *watch.missing]


def _watch(folder: Path, places: Iterable[str]) -> Watch:
    return Watch(folder, {name: PLACES[name] for name in places}, is_here=True)


def _report() -> str:
    return "\n".join(f"{count:7} {what}" for what, count in sorted(Base.tally.items()))


# Not the usual limit: what it finds takes minutes to be made small.
@pytest.mark.timeout(1800)
def test_nothing_live_is_lost_and_nothing_dead_stays(tmp_path: Path) -> None:
    Base.tally.clear()
    with _watch(tmp_path, _PLACES) as watch:
        _live_what_chance_seldom_brings()
        _live(1, 60)
        for _ in range(27):
            if not _lacking(watch):
                break
            _live(1, 60)  # chance left something out
        assert _lacking(watch) == []


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_nothing_live_is_lost_and_nothing_dead_stays_for_long(tmp_path: Path) -> None:
    with _watch(tmp_path, _RARER) as watch:
        _live(200, 200)
        print(_report())
        watch.check()
