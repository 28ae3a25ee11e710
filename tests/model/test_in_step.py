"""The rules by which ranks come in step again: kept, no save is lost; without any one, some are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.checks import check_all_broken, check_safe, check_unsafe, with_large
from tests.model.in_step import InStepModel, Rules, Setting

#: By rule: the steps of the shortest counterexample.
MUTANTS = {"missed_calls_are_passed": 8, "steps_are_compared": 4, "ahead_goes_on": 8}


@pytest.mark.parametrize(
    "setting",
    with_large([Setting(), Setting(misses=0), Setting(waits=0)], [Setting(6, 3, 3)]),
    ids=str,
)
def test_with_every_rule_kept_the_next_save_of_both_is_there(setting: Setting) -> None:
    check_safe(InStepModel(setting), setting)


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_broken_rule_loses_a_save(rule: str) -> None:
    rules = replace(Rules(), **{rule: False})
    check_unsafe(InStepModel(Setting(), rules), rule, MUTANTS[rule])


def test_every_rule_is_broken_once() -> None:
    check_all_broken(MUTANTS, Rules)
