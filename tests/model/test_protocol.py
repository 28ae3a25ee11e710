"""The protocol is safe: no scenario here can reach a state in which something live is missing.

Each is explored to the end. The numbers of states are exact: whatever changes the model changes
them, and a scenario that shrinks shows that something can no longer happen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.model.checks import with_large
from tests.model.collectors import Collectors
from tests.model.explorer import explore, tell
from tests.model.keys import Keys
from tests.model.log import Logs
from tests.model.protocol import Protocol
from tests.model.scenario import (
    KEPT,
    PIN,
    Collector,
    Evict,
    Forget,
    Free,
    Hide,
    Relocate,
    Scenario,
    Spoil,
    State,
    Thin,
    Writer,
)

C1, C2 = Collector("collector 1"), Collector("collector 2")
SAVES = Writer("saver", 0)
SAVES_W2A = Writer("saver", 0, own=True)
BEGINS = Writer("beginner", 1, born=True)
BEGINS_W2A = Writer("beginner", 1, born=True, own=True)
PROMOTES = Writer("promoter", 0, name=PIN, own=True)
REPACKS = Relocate("repack", 0, file=1)
EVICTS = Evict("evictor", 0)
EVICTS_AGAIN = Evict("second evictor", 0)
DROPS = Evict("dropper", 0, drop=True)

#: A run that holds a state, and one that is yet to be born.
TWO_RUNS: tuple[tuple[int, ...] | None, ...] = ((0,), None)
TWO_STATES = ((0,), (1,))
_GIVES_UP = (SAVES_W2A, BEGINS_W2A, Spoil("vandal", 0), Forget("operator", 0), C1)


def _crowd(*actors: Writer | Relocate | Evict, **given: object) -> Scenario:
    """Return a scenario with everything that the adversary has: see `Scenario`."""
    options = {"runs": TWO_RUNS, "epochs": 2, "crowd": True, "strangers": True} | given
    return Scenario(actors, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Safe:
    """A scenario that is safe.

    Attributes:
        scenario: Which.
        states: How many states it has.
        happens: Some of what must happen in it: first words of steps, by whom.
    """

    scenario: Scenario
    states: int
    happens: tuple[tuple[str, str], ...] = ()


PROTOCOL = {
    # Two collectors, each a process of its own that may die or join the other's sweep.
    "a writer and two collectors": Safe(
        Scenario((SAVES_W2A, EVICTS, C1, C2), epochs=2),
        1_977,
        (
            ("saver", "may not name"),
            ("collector 1", "joins sweep"),
            ("collector 2", "sends DELETEs of"),
        ),
    ),
    "a run that is born, every read apart": Safe(
        Scenario((BEGINS, EVICTS, C1), TWO_RUNS, epochs=2, apart=True),
        870,
        (("beginner", "loses the slot"), ("beginner", "may not name")),
    ),
    "a run whose writer lists objects before it observes an epoch": Safe(
        Scenario((replace(BEGINS, early=True), EVICTS, C1, C2), TWO_RUNS, epochs=2),
        8_441,
        (("beginner", "lists objects"), ("beginner", "finds"), ("beginner", "may not name")),
    ),
    # Somebody puts a file that no collector can read into the folder of a run. An operator may give
    # the run up, and the file may go again, while the run and a fork of it are written.
    "a run that is forgotten and comes back": Safe(
        Scenario(_GIVES_UP, TWO_RUNS),
        7_328,
        (
            ("operator", "forgets"),
            ("vandal", "takes it from"),
            ("saver", "gives up"),
            ("beginner", "may not name"),
            ("collector 1", "sends DELETEs of"),
        ),
    ),
    # A save relies on what a thinning gives up, and the thinning is undone.
    "a thinned state": Safe(
        Scenario(
            (
                Writer("saver", 0, manifests=(1,), own=True),
                Writer("undoer", 0),
                Thin("thinner", 0),
                C1,
            ),
            files=((0, 1), (1,)),
        ),
        3_295,
        (
            ("saver", "takes from its own log"),
            ("saver", "may not name"),
            ("undoer", "may not name"),
            ("collector 1", "sends DELETEs of"),
        ),
    ),
    # A run is dropped, freed and taken back while it is saved, twice.
    "a drop that is taken back": Safe(
        Scenario(
            (
                SAVES_W2A,
                Writer("undropper", 0, undrops=True),
                Hide("dropper", 0, times=2),
                Free("freer", 0),
                EVICTS,
                C1,
            )
        ),
        5_445,
        (
            ("undropper", "may not name"),
            ("undropper", "commits, placing"),
            ("freer", "frees"),
            ("saver", "gives up"),
            ("collector 1", "sends DELETEs of"),
        ),
    ),
    # From here on: any number of collectors and of strangers.
    "two writers": Safe(_crowd(SAVES_W2A, BEGINS_W2A, EVICTS), 32_983),
    "relocation beside a save": Safe(
        _crowd(REPACKS, SAVES_W2A, BEGINS, EVICTS, epochs=1),
        33_640,
        (
            ("repack", "moves to"),
            ("repack", "gives up"),
            ("repack", "may not name"),
        ),
    ),
    "sync of two states, one sweep": Safe(
        _crowd(
            Writer("sync", 1, manifests=(0, 1), born=True, passing=2),
            EVICTS,
            runs=((0, 1), None),
            files=((0,), (1,), (1,)),
            epochs=1,
        ),
        620,
        (("sync", "may not name"),),
    ),
    "sync that goes on": Safe(
        _crowd(
            Writer("sync", 0, manifests=(0, 1), own=True),
            EVICTS,
            runs=((0,),),
            files=TWO_STATES,
        ),
        15_353,
        (("sync", "takes from its own log"),),
    ),
    "promotion": Safe(_crowd(PROMOTES, BEGINS_W2A, EVICTS), 30_314),
    "three runs": Safe(
        _crowd(
            SAVES_W2A,
            BEGINS,
            Writer("second beginner", 2, born=True),
            EVICTS,
            runs=((0,), None, None),
            epochs=1,
        ),
        30_843,
    ),
    "states that share a file": Safe(
        _crowd(
            Writer("saver", 0, manifests=(1,), own=True),
            EVICTS,
            runs=((0,),),
            files=((0,), (0, 1)),
        ),
        13_583,
        (("saver", "takes from its own log"), ("saver", "may not name")),
    ),
}

#: Up to three minutes of a processor and more than 1 GB of memory each; run by hand.
SOAK = {
    "runs whose writers list objects before they observe an epoch": Safe(
        Scenario(
            (Writer("saver", 0, early=True), replace(BEGINS, early=True), EVICTS, C1, C2),
            TWO_RUNS,
            epochs=2,
        ),
        165_562,
        (("beginner", "lists objects"), ("beginner", "finds"), ("beginner", "may not name")),
    ),
    "fork of a run that is dropped": Safe(
        _crowd(BEGINS, SAVES_W2A, EVICTS, DROPS), 60_191, (("saver", "gives up"),)
    ),
    "undo of an eviction": Safe(
        _crowd(SAVES_W2A, EVICTS, EVICTS_AGAIN, BEGINS), 53_478, (("second evictor", "evicts in"),)
    ),
    "two writers and two collectors": Safe(
        Scenario((SAVES, BEGINS, EVICTS, C1, C2), TWO_RUNS, epochs=2),
        111_448,
        (
            ("saver", "may not name"),
            ("beginner", "may not name"),
            ("collector 1", "joins sweep"),
            ("collector 2", "sends DELETEs of"),
        ),
    ),
    "the same with W2a": Safe(
        Scenario((SAVES_W2A, BEGINS_W2A, EVICTS, C1, C2), TWO_RUNS, epochs=2),
        127_937,
        (("saver", "takes from its own log"), ("saver", "may not name")),
    ),
    "the same, every read apart, without the saver": Safe(
        Scenario((BEGINS, EVICTS, C1, C2), TWO_RUNS, epochs=2, apart=True),
        110_892,
        (
            ("beginner", "loses the slot"),
            ("collector 1", "loses the epoch"),
            ("the store", "deletes"),
        ),
    ),
    "relocation beside a fork, two sweeps": Safe(_crowd(REPACKS, BEGINS), 225_980),
    "sync of two states": Safe(
        _crowd(
            Writer("sync", 1, manifests=(0, 1), born=True, passing=2),
            EVICTS,
            Evict("other evictor", 0, manifest=1),
            runs=((0, 1), None),
            files=((0,), (1,), (1,)),
        ),
        130_108,
        (("sync", "may not name"),),
    ),
    "two writers and two collectors, every read apart": Safe(
        Scenario((SAVES, BEGINS, EVICTS, C1, C2), TWO_RUNS, epochs=2, apart=True), 4_622_537
    ),
    "a run that is forgotten and comes back, two collectors": Safe(
        Scenario((*_GIVES_UP, C2), TWO_RUNS, epochs=2), 542_748
    ),
    "any number of collectors, three sweeps": Safe(
        _crowd(SAVES_W2A, BEGINS_W2A, EVICTS, epochs=3), 1_228_719
    ),
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", with_large(PROTOCOL, SOAK))
def test_the_protocol_is_safe(name: str) -> None:
    safe = (PROTOCOL | SOAK)[name]
    outcome = explore(Protocol(safe.scenario))
    print(f"{outcome.states} states, at most {outcome.deepest} steps deep")
    assert outcome.safe, tell(outcome)
    for kind in safe.happens:
        assert kind in outcome.kinds, f"{kind} never happens"
    assert outcome.states == safe.states


#: Small enough to be explored in every way that steps are joined.
SMALL = {
    "a run that is born": Scenario((BEGINS, EVICTS, C1), TWO_RUNS),
    "W2a": Scenario((SAVES_W2A, EVICTS, C1)),
    "two sweeps": Scenario((SAVES_W2A, EVICTS, C1, C2), epochs=2),
    "relocation": Scenario((REPACKS, BEGINS, C1), TWO_RUNS),
}


def _public(scenario: Scenario) -> set[tuple[object, ...]]:
    """Return what everybody could see, and what is deleting, in each state of a scenario."""
    seen: set[tuple[object, ...]] = set()

    def note(state: State) -> None:
        logs = tuple(log and log.says for log in state.logs)
        seen.add((state.deleting, state.epochs, logs))

    assert explore(Protocol(scenario), visit=note).safe
    return seen


@pytest.mark.parametrize("name", SMALL)
def test_a_larger_scenario_leaves_nothing_out(name: str) -> None:
    """Joint steps can do what separate reads can, strangers and a crowd what each of them can.

    That strangers put all at once, and not one by one, leaves nothing out either.
    """
    scenario = SMALL[name]
    plain = _public(scenario)
    assert _public(replace(scenario, apart=True)) <= plain
    joint = replace(scenario, strangers=True)
    strange = _public(joint)
    assert plain <= strange
    assert _public(replace(joint, apart=True)) <= strange
    others = tuple(one for one in scenario.actors if not isinstance(one, Collector))
    crowd = {public[1:] for public in _public(replace(scenario, actors=others, crowd=True))}
    assert {public[1:] for public in plain} <= crowd


@pytest.mark.parametrize("name", SMALL)
def test_a_crowd_dooms_what_collectors_do(name: str) -> None:
    scenario = SMALL[name]
    files = 2 if name == "relocation" else 1
    logs = Logs(len(scenario.files), scenario.epochs)
    crowd = Collectors(scenario, KEPT, Keys(files, scenario.epochs), logs)
    deleting = 0

    def compare(state: State) -> None:
        nonlocal deleting
        deleting += bool(state.deleting)
        assert not state.deleting & ~crowd.deletable_by_crowd(state)

    explore(Protocol(scenario), visit=compare)
    assert deleting
