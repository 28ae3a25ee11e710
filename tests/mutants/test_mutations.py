"""Changes are drawn by a seed, each changes a function, and what they break is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.mutants.mutations import MODULES, Mutation, draw, mutations
from tests.mutants.reach import hooked
from tests.mutants.survivors import SURVIVORS
from tests.mutants.trial import Limits, Trials, Verdict, chosen
from tests.support.processes import run_apart
from tests.support.rewriting import target

SLOTS = "registry.history.slots"


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


def _try(folder: Path, drawn: list[Mutation]) -> None:
    Trials(folder, drawn, Limits(least_s=250.0), 1, [Path(__file__).parent / "sample.py"]).run()


def test_a_call_that_is_left_out_still_names_what_it_needs() -> None:
    part = "registry.writing.object_writer"
    (left_out,) = (one for one in mutations(part) if one.before.startswith("super().__init__("))
    assert left_out.code().co_freevars == target(part, left_out.function).__code__.co_freevars


def test_a_change_that_a_test_notices_is_killed_and_another_survives(tmp_path: Path) -> None:
    found = {one.name: one for one in mutations(SLOTS)}
    drawn = [
        found[f"{SLOTS}:Races.lose: self.lost += 1 -> pass"],
        found[f"{SLOTS}:Races.lose: self.lost > 2 -> self.lost >= 2"],
        mutations("registry.upkeep.sealing")[0],
    ]
    for _ in range(2):  # another call finds nothing left to do
        assert run_apart(_try, tmp_path, drawn) == 0
    said = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [one["outcome"] for one in said] == ["killed", "survived", "not reached"]
    assert (
        said[0]["by"] == "tests/mutants/sample.py::test_a_race_that_is_lost_counts: assert 0 == 1"
    )


def test_the_shortest_tests_are_chosen_and_more_seconds_try_more() -> None:
    reaching = [(1.0, "a"), (2.0, "b"), (3.0, "c")]
    assert [name for _, name in chosen(reaching, 4)] == ["a", "b"]
    assert [name for _, name in chosen(reaching, 0.5)] == ["a"]
    survived = Verdict(0, "m:f: 1 -> 2", 1, "survived", 2, 3, 4.0)
    assert [survived.is_final(seconds) for seconds in (4, 5)] == [True, False]
    assert replace(survived, tests=3).is_final(5)
    assert replace(survived, outcome="killed").is_final(5)


def test_what_survives_and_is_explained_is_a_change_that_there_is() -> None:
    names = {one.name for modules in MODULES.values() for m in modules for one in mutations(m)}
    assert set(SURVIVORS) <= names
