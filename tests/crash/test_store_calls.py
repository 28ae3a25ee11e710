"""A push or a sync breaks off at its k-th call to the store, before or after the effect, for all k.

Every run of the tests takes one call in `ONE_IN`, a soak each of them. Whatever the point: the
registry is sound, what was acknowledged is there bit for bit, nothing half done is visible, and
doing the operation again leads where it would have led without the fault.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.backends import Backend
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Fault, InjectedCrash
from holdfast.registry.errors import RegistryError, StoreUnavailable
from holdfast.registry.store.store import create_config
from tests.crash.courses import Attempt, Copies, Course, check_sound, uninterrupted
from tests.crash.scenarios import AGAIN, LIVES, PUSHES, SYNCS, Scenario, sources
from tests.support.loads import check_states
from tests.support.pictures import picture
from tests.support.states import make_state
from tests.support.stores import Scratch, commit_lines, new_backend, opened

SCENARIOS = PUSHES + LIVES + SYNCS
#: These die in a folder, too: one that puts, one that copies, one that deletes. The others by soak.
IN_A_FOLDER = ("first save", "sync to half", "collect")
ONE_IN = 3


def _deaths() -> Iterator[object]:
    """Yield every scenario in memory and in a folder, at some of its calls and at every one."""
    for scenario in SCENARIOS:
        for place in ("memory", "local"):
            marks = () if place == "memory" or scenario.name in IN_A_FOLDER else pytest.mark.soak
            yield pytest.param(place, scenario, ONE_IN, id=f"{place}-{scenario}", marks=marks)
            every = f"{place}-{scenario}, every call"
            yield pytest.param(place, scenario, 1, id=every, marks=pytest.mark.soak)


def _without_answers() -> Iterator[object]:
    """Yield every scenario in memory at some of its calls, and each of them everywhere."""
    # What a lost answer does to the logic is the same on every store, so the folder is for a soak.
    for scenario in SCENARIOS:
        marks = pytest.mark.soak if scenario.name in AGAIN else ()
        yield pytest.param("memory", scenario, ONE_IN, id=f"{scenario}-memory", marks=marks)
        for place in ("memory", "local"):
            every = f"{scenario}-{place}, every call"
            yield pytest.param(place, scenario, 1, id=every, marks=pytest.mark.soak)


@pytest.fixture(params=["memory", "local"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], Copies]:
    """A factory of factories: copies of the store in which a scenario begins."""

    def in_memory(scenario: Scenario) -> Copies:
        template = new_backend()
        with opened(template) as registry:
            scenario.prepare(registry)
        return template.copy

    def on_disk(scenario: Scenario) -> Copies:
        template = tmp_path / "template"
        create_config(LocalBackend(template), "skipped")
        with opened(LocalBackend(template)) as registry:
            scenario.prepare(registry)

        def copy() -> Backend:
            place = tmp_path / "copy"
            if place.exists():
                shutil.rmtree(place)
            shutil.copytree(template, place)
            return LocalBackend(place)

        return copy

    return in_memory if request.param == "memory" else on_disk


def check_complete(store: Backend, course: Course) -> None:
    """Check that a store ended as if nothing had happened."""
    with opened(store) as registry:
        check_states(
            registry,
            lambda one: make_state(20 if one.meta == "second attempt" else one.step),
        )
    assert picture(store) == course.complete


def die(scenario: Scenario, store: Backend, fault: Fault, *, resumed: bool = False) -> None:
    """Let a process die in the operation."""
    attempt = Attempt(scenario, store, [fault], resumed=resumed)
    try:
        attempt.act()
    except InjectedCrash:
        return
    finally:
        attempt.close()
    # A call that fails by itself (a slot that is not there yet) has no answer to lose.
    assert fault.after


def do_again(scenario: Scenario, store: Backend) -> None:
    """Do the operation from the start, in a new process, over a healthy store."""
    again = Attempt(scenario, store, [], resumed=True)
    again.act()
    again.close()


#: Every key of a store and the length of its object. Objects are named by their content, and slots
#: of one number differ by what chance and the clock gave their writers.
Left = frozenset[tuple[str, int]]


def is_new(store: Backend, left: set[Left]) -> bool:
    """Return whether a store is the first one with what it holds, and add it to the others."""
    found = frozenset((info.key, info.size_bytes) for info in store.list())
    known = found in left
    left.add(found)
    return not known


@pytest.mark.parametrize(("stores", "scenario", "one_in"), [*_deaths()], indirect=["stores"])
def test_death_at_every_call(
    scenario: Scenario,
    stores: Callable[[Scenario], Copies],
    one_in: int,
    record_property: Callable[[str, object], None],
) -> None:
    """In memory all scenarios; in a folder those of `IN_A_FOLDER`, with `-m soak` the others."""
    copies = stores(scenario)
    course = uninterrupted(scenario, copies)
    deaths = 0
    left: set[Left] = set()
    for at, after in course.faults[::-one_in]:
        store = copies()
        die(scenario, store, Fault(at, after=after))
        deaths += 1
        # A dead process is known by what it left, and most deaths are at a read.
        if is_new(store, left):
            check_sound(scenario, store, course)
            do_again(scenario, store)
            check_complete(store, course)
    assert deaths * one_in >= len(course.points) > 0
    assert len(left) > 1
    record_property("points", deaths)
    print(f"{scenario}: died at {deaths} points, which left {len(left)} different stores")


@pytest.mark.parametrize(
    ("stores", "scenario", "one_in"), [*_without_answers()], indirect=["stores"]
)
def test_no_answer_at_every_call(
    scenario: Scenario,
    stores: Callable[[Scenario], Copies],
    one_in: int,
    record_property: Callable[[str, object], None],
) -> None:
    copies = stores(scenario)
    course = uninterrupted(scenario, copies, in_order=True)
    faults = refused = 0
    left: set[Left] = set()
    completed: set[Left] = set()
    for at, after in course.faults[::-one_in]:
        store = copies()
        fault = Fault(at, after=after, error=StoreUnavailable("no answer", where="test"))
        attempt = Attempt(scenario, store, [fault], in_order=True)
        faults += 1
        try:
            attempt.act()
        except RegistryError:
            refused += 1
            if is_new(store, left):
                check_sound(scenario, store, course)
            attempt.act()  # the same handle goes on
        else:
            # Nobody was told of the fault, so nothing was committed twice for it.
            assert len(commit_lines(store)) == course.commits
        attempt.close()
        if is_new(store, completed):
            check_complete(store, course)
        assert picture(store) == course.complete
    assert faults * one_in >= len(course.points) > 0
    record_property("points", faults)
    print(f"{scenario}: no answer at {faults} points, {refused} of them told the caller")


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_death_at_every_pair_of_calls(
    scenario: Scenario, record_property: Callable[[str, object], None]
) -> None:
    """The process that comes after a death dies as well, at every call it makes."""
    template = new_backend()
    with opened(template) as registry:
        scenario.prepare(registry)
    course = uninterrupted(scenario, template.copy)
    pairs = 0
    for first in course.points:
        for after in (False, True):
            broken = template.copy()
            die(scenario, broken, Fault(first, after=after))
            pairs += _die_everywhere(scenario, broken, course)
    record_property("points", pairs)
    print(f"{scenario}: died twice at {pairs} pairs of points")


def _die_everywhere(scenario: Scenario, broken: Scratch, course: Course) -> int:
    healthy = Attempt(scenario, broken.copy(), [], resumed=True)
    healthy.act()
    healthy.close()
    deaths = 0
    for second in range(healthy.begun_at + 1, healthy.calls + 1):
        for after in (False, True):
            store = broken.copy()
            die(scenario, store, Fault(second, after=after), resumed=True)
            check_sound(scenario, store, course)
            do_again(scenario, store)
            check_complete(store, course)
            deaths += 1
    return deaths


@pytest.mark.parametrize("half", [False, True], ids=["fresh", "half"])
def test_interrupted_sync_ends_with_the_bytes_of_the_source(half: bool) -> None:
    scenario = SYNCS[half]
    template = new_backend()
    with opened(template) as registry:
        scenario.prepare(registry)
    course = uninterrupted(scenario, template.copy)
    for at in course.points:
        store = template.copy()
        die(scenario, store, Fault(at, after=True))
        do_again(scenario, store)
        assert commit_lines(store) == commit_lines(sources()[1])
