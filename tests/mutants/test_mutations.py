"""Changes are drawn by a seed, each changes a function, and what they break is noticed."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.mutations import MODULES, draw, mutations
from tests.mutants.reach import hooked
from tests.mutants.survivors import SURVIVORS
from tests.mutants.trial import Limits, attempt, chosen

ROOT = Path(__file__).parents[2]
SLOTS = "registry.history.slots"
TEST = "tests/mutants/sample.py::test_a_race_that_is_lost_counts"


def test_a_seed_draws_the_same_changes_from_every_part() -> None:
    drawn = draw(12, 7)
    assert drawn == draw(12, 7) != draw(12, 8)
    for modules in MODULES.values():
        assert sum(one.module in modules for one in drawn) == 3
    assert len(hooked(drawn)) == len({(one.module, one.function) for one in drawn})


def test_each_change_of_a_module_gives_other_code() -> None:
    found = [one for one in mutations(SLOTS) if one.function == "Races.lose"]
    assert len({one.code().co_code + repr(one.code().co_consts).encode() for one in found}) > 8
    assert "self.lost > 2 -> self.lost >= 2" in {f"{one.before} -> {one.after}" for one in found}


def test_a_change_that_a_test_notices_is_killed_and_another_survives() -> None:
    found = {one.name: one for one in mutations(SLOTS)}
    limits = Limits(least_s=250.0)
    lost = found[f"{SLOTS}:Races.lose: self.lost += 1 -> pass"]
    late = found[f"{SLOTS}:Races.lose: self.lost > 2 -> self.lost >= 2"]
    assert attempt(lost, [(0.1, TEST)], limits, ROOT).outcome == "killed"
    assert attempt(late, [(0.1, TEST)], limits, ROOT).outcome == "survived"
    assert attempt(lost, [], limits, ROOT).outcome == "not reached"


def test_the_shortest_tests_are_chosen() -> None:
    reaching = [(1.0, "a"), (2.0, "b"), (3.0, "c")]
    assert [name for _, name in chosen(reaching, Limits(seconds=4, tests=9))] == ["a", "b"]
    assert [name for _, name in chosen(reaching, Limits(seconds=0.5, tests=9))] == ["a"]
    assert [name for _, name in chosen(reaching, Limits(seconds=9, tests=2))] == ["a", "b"]


def test_what_survives_and_is_explained_is_a_change_that_there_is() -> None:
    names = {one.name for modules in MODULES.values() for m in modules for one in mutations(m)}
    assert set(SURVIVORS) <= names
