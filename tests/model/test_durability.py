"""What outlives the power, and what a handle that outlives its log may say: each rule is needed."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from tests.model import outliving, power
from tests.model.checks import check_all_broken, check_safe, check_unsafe, with_large
from tests.model.explorer import explore, tell
from tests.model.outliving import Outliving
from tests.model.power import Power, SealedPower

#: Actors, whether the state is saved before, and how many states there are.
SAFE = {
    "two writers": (("writer", "writer"), False, 98),
    "three writers": (("writer", "writer", "writer"), False, 1_228),
    "a writer and two collectors": (("writer", "collector", "collector"), False, 2_347),
    "an eviction and two collectors": (("evictor", "collector", "collector"), True, 1_003),
    "everybody": (("writer", "writer", "evictor", "collector"), True, 30_762),
}
LARGE = {
    "everybody, from nothing": (("writer", "writer", "evictor", "collector"), False, 31_532),
}
#: Where breaking a rule shows, and in how many steps.
UNSAFE = {
    "objects": ("two writers", 9),
    "slots": ("an eviction and two collectors", 6),
    "acknowledgements": ("two writers", 12),
    "epochs": ("an eviction and two collectors", 5),
    "reread": ("an eviction and two collectors", 10),
}


def _power(name: str, rules: power.Rules | None = None) -> Power:
    actors, saved, _ = (SAFE | LARGE)[name]
    return Power(actors, rules, saved=saved)


@pytest.mark.parametrize("name", with_large(SAFE, LARGE))
def test_nothing_that_was_told_is_lost_with_the_power(name: str) -> None:
    outcome = explore(_power(name))
    print(f"{name}: {outcome.states} states")
    assert outcome.safe, tell(outcome)
    assert outcome.states == (SAFE | LARGE)[name][2]


@pytest.mark.parametrize("rule", UNSAFE)
def test_without_a_sync_something_is_lost_with_the_power(rule: str) -> None:
    name, steps = UNSAFE[rule]
    outcome = explore(_power(name, replace(power.Rules(), **{rule: False})))
    print(f"{rule}: {outcome.states} states\n{tell(outcome)}")
    assert not outcome.safe
    assert len(outcome.trace) == steps


#: By rule: the steps of the shortest way to a commit that a collection overlooks.
UNSAFE_SEALS = {"marker": 5, "seal": 4, "note": 10}


@pytest.mark.parametrize("actors", [("writer", "sealer"), ("writer", "writer", "sealer")], ids=len)
def test_no_collection_overlooks_a_commit_after_the_power_failed(actors: tuple[str, ...]) -> None:
    check_safe(SealedPower(actors), actors)


@pytest.mark.parametrize("rule", UNSAFE_SEALS)
def test_without_a_sync_a_collection_overlooks_a_commit(rule: str) -> None:
    rules = replace(power.SealRules(), **{rule: False})
    check_unsafe(SealedPower(("writer", "sealer"), rules), rule, UNSAFE_SEALS[rule])


def test_a_handle_acknowledges_nothing_that_its_log_lacks() -> None:
    outcome = explore(Outliving())
    print(f"{outcome.states} states")
    assert outcome.safe, tell(outcome)
    assert {
        ("the handle", "refuses to commit"),
        ("the handle", "refuses to tell"),
        ("the handle", "refuses to read on"),
        ("the handle", "puts a slot"),
        ("the handle", "reads on"),
    } <= outcome.kinds


@pytest.mark.parametrize("rule", ["commit", "acknowledgements", "refresh"])
def test_without_a_look_it_acknowledges_what_its_log_lacks(rule: str) -> None:
    outcome = explore(Outliving(replace(outliving.Rules(), **{rule: False})))
    print(f"{rule}:\n{tell(outcome)}")
    assert not outcome.safe


def test_every_rule_is_broken_once() -> None:
    assert set(UNSAFE) == {field.name for field in dataclasses.fields(power.Rules)}
    check_all_broken(UNSAFE_SEALS, power.SealRules())
    assert {"commit", "acknowledgements", "refresh"} == {
        field.name for field in dataclasses.fields(outliving.Rules)
    }
