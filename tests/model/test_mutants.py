"""Each rule is needed: broken alone, in a scenario that is safe while it is kept, it loses data.

A rule whose breaking goes unnoticed is either not needed or not modelled; both fail here. Each is
found twice: with joint steps, and with every read a step of its own (`Scenario.apart`), which takes
longer ways to the same ends. A sweep without a second replay still marks here, hence 14 steps where
one that leaves the marks out as well needs 8.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import pytest

from tests.model.explorer import explore, tell
from tests.model.protocol import Protocol
from tests.model.scenario import (
    KEPT,
    Collector,
    Evict,
    Forget,
    Free,
    Hide,
    Relocate,
    Rules,
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
EVICTS = Evict("evictor", 0)

#: A run that holds a state, which is evicted, swept, and saved again.
ONE_RUN = Scenario((SAVES, EVICTS, C1))
ONE_RUN_W2A = Scenario((SAVES_W2A, EVICTS, C1))
#: Its state is saved by a run that is born meanwhile: a new one, or a fork of it.
BIRTH = Scenario((BEGINS, EVICTS, C1), runs=((0,), None))
#: Its state is saved by a run that was there before.
TWO_RUNS = Scenario((Writer("saver", 1), EVICTS, C1), runs=((0,), ()))
TWO_SWEEPS = Scenario((SAVES, EVICTS, C1, C2), epochs=2)
#: A state moves to a file that another run lets go.
RELOCATION = Scenario(
    (Relocate("repack", 0, file=1), Evict("evictor", 1, manifest=1), C1),
    runs=((0,), (1,)),
    files=((0,), (1,)),
)
#: A run arrives from another registry with two states; the first is evicted there by now.
ARRIVAL = Scenario(
    (Writer("sync", 0, manifests=(1,), born=True, passing=0),), runs=(None,), files=((0,), (1,))
)
#: A run arrives whose state is here already, and may be let go.
SYNC = Scenario(
    (Writer("sync", 1, manifests=(0, 1), born=True), EVICTS, C1),
    runs=((0, 1), None),
    files=((0,), (1,)),
)
#: A state of two files is thinned to the first one while another save relies on the second.
THINNING = Scenario(
    (Writer("saver", 0, manifests=(1,), own=True), Thin("thinner", 0), C1),
    files=((0, 1), (1,)),
)
#: A run is dropped, freed and taken back while a collection goes on.
DROPPING = Scenario(
    (Writer("undropper", 0, undrops=True), Hide("dropper", 0), Free("freer", 0), C1)
)
#: It is dropped again meanwhile.
DROPPED_TWICE = Scenario((*DROPPING.actors[::2], Hide("dropper", 0, times=2)))
#: Somebody puts a file into the folder of a run that no collector can read.
GARBAGE = Scenario((SAVES_W2A, Spoil("vandal", 0), Forget("operator", 0), C1))


@dataclass(frozen=True)
class Mutant:
    """A broken rule.

    Attributes:
        rule: Field of `Rules`.
        scenario: Where breaking it shows.
        steps: Of the shortest counterexample.
        apart: The same where every read is a step of its own.
    """

    rule: str
    scenario: Scenario
    steps: int
    apart: int

    @property
    def rules(self) -> Rules:
        """All rules but this one."""
        return replace(KEPT, **{self.rule: False})


MUTANTS = {
    "epoch observed before the run exists": Mutant("run_before_epoch", BIRTH, 10, 14),
    "files chosen before the run exists": Mutant("run_before_key", BIRTH, 10, 14),
    "a fork's commit 0 references": Mutant("slot_0_references_nothing", BIRTH, 9, 13),
    "a sync chooses before its run exists": Mutant("run_before_key", SYNC, 11, 15),
    "a sync shows a prefix": Mutant("one_slot", ARRIVAL, 4, 5),
    "a sync shows commits before places": Mutant("places_with_commits", ARRIVAL, 4, 5),
    "a condemned key is used": Mutant("refuse_condemned", ONE_RUN, 9, 13),
    "the same name is uploaded again": Mutant("generations", ONE_RUN, 9, 13),
    "no recheck after a mark": Mutant("recheck", ONE_RUN, 9, 13),
    "no recheck after a mark, in a run that is born": Mutant("recheck", BIRTH, 11, 17),
    "W2a without landing at exactly N": Mutant("exact_slot", ONE_RUN_W2A, 9, 13),
    "an undone eviction counts as W2a": Mutant("held_only", ONE_RUN_W2A, 8, 11),
    "W2a by manifests, not by parts": Mutant("by_parts", THINNING, 9, 13),
    "W2a without a second replay": Mutant("remark", ONE_RUN_W2A, 10, 14),
    "W2a with an unmarked run": Mutant("all_marked", ONE_RUN_W2A, 8, 11),
    "W2a with a run left out": Mutant("every_run", ONE_RUN_W2A, 4, 5),
    "a relocation that checks nothing": Mutant("relocation_checks", RELOCATION, 10, 16),
    "runs listed before the epoch is published": Mutant("publish_before_list", BIRTH, 11, 15),
    "a run left out: its log is absent or unreadable": Mutant("every_run", ONE_RUN, 4, 5),
    "gone on past an unreadable slot, by itself": Mutant("forgotten_by_name", GARBAGE, 5, 6),
    "forgotten before its log is ended": Mutant("ended_first", GARBAGE, 7, 8),
    "a sweep before all runs are marked": Mutant("all_marked", ONE_RUN, 8, 11),
    "a shard that waits for the marks of its own runs": Mutant("shard_of_keys", TWO_RUNS, 9, 14),
    "no second replay: M_e from G1": Mutant("remark", ONE_RUN, 10, 14),
    "M_e from a replay before the mark": Mutant("replay_reaches_mark", ONE_RUN, 9, 13),
    "an older mark taken for this epoch's": Mutant("mark_of_this_epoch", TWO_SWEEPS, 10, 15),
    "what is live is deleted": Mutant("spare_the_live", ONE_RUN, 5, 8),
    "a freed run is not marked": Mutant("freed_marked", DROPPING, 11, 14),
    "an undrop of a freed run takes its old keys": Mutant("undrop_adopts", DROPPING, 12, 16),
    "an undrop that does not look again": Mutant("undrop_looks", DROPPING, 12, 15),
    "a delay by the collector's own clock": Mutant("store_clock", DROPPING, 3, 3),
    "the delay of an earlier drop counts": Mutant("same_hide", DROPPED_TWICE, 8, 9),
    "names forgotten once they are deleted": Mutant("names_kept", ONE_RUN, 10, 14),
}


@pytest.mark.parametrize("apart", [False, True], ids=["joint", "apart"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_unsafe(name: str, apart: bool) -> None:
    mutant = MUTANTS[name]
    outcome = explore(Protocol(replace(mutant.scenario, apart=apart), mutant.rules))
    assert not outcome.safe, f"{name}: found safe in {outcome.states} states"
    print(f"{name}: {len(outcome.trace)} steps, {outcome.states} states\n{tell(outcome)}")
    assert len(outcome.trace) == (mutant.apart if apart else mutant.steps)


@pytest.mark.parametrize("apart", [False, True], ids=["joint", "apart"])
def test_with_every_rule_kept_the_same_scenarios_are_safe(apart: bool) -> None:
    for scenario in {mutant.scenario for mutant in MUTANTS.values()}:
        outcome = explore(Protocol(replace(scenario, apart=apart)))
        assert outcome.safe, tell(outcome)


def test_every_rule_is_broken_once() -> None:
    assert {mutant.rule for mutant in MUTANTS.values()} == {
        field.name for field in dataclasses.fields(Rules)
    }


class Blind(Protocol):
    """The model without its invariant."""

    def wrong(self, state: State) -> None:
        return None


def test_it_is_the_invariant_that_tells() -> None:
    mutant = MUTANTS["no recheck after a mark"]
    assert explore(Blind(mutant.scenario, mutant.rules)).safe


def test_a_counterexample_can_be_read() -> None:
    mutant = MUTANTS["no recheck after a mark"]
    assert tell(explore(Protocol(mutant.scenario, mutant.rules))).splitlines() == [
        " 1. saver: observes epoch 0",
        " 2. saver: finds a.0",
        " 3. evictor: evicts in run 0",
        " 4. collector 1: publishes epoch 1 condemning a.0",
        " 5. collector 1: lists the runs",
        " 6. collector 1: marks run 0",
        " 7. saver: commits, placing nothing new",
        " 8. collector 1: sends DELETEs of a.0",
        " 9. the store: deletes a.0",
        "    Run 0 needs a.0, which is not there.",
    ]
