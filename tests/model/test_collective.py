"""The rules of a collective save: kept, every setting is safe; each one broken, one is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.checks import check_all_broken, check_safe, check_unsafe, with_large
from tests.model.collective import KEPT, CollectiveModel, Key, Rules, Setting, State
from tests.model.explorer import explore

FOUND = Setting(found=(Key(0, 0, 0), Key(1, 0, 0)))
NEW_RUN = Setting(exists=False, found=(Key(0, 0, 0), Key(1, 0, 0)))
OWN = Setting(kept=(Key(1, 0, 0),), evictions=1)
OTHERS = Setting(found=(Key(1, 0, 0),), others=1)
CHANGES = Setting(changes=True, found=(Key(0, 1, 0), Key(1, 1, 0)))
SILENT = Setting(sweeps=0, lost=1)
SETTINGS = [FOUND, NEW_RUN, OWN, OTHERS, CHANGES, SILENT]
LARGE = [
    Setting(sweeps=2, found=(Key(0, 0, 0), Key(1, 0, 0)), others=1, attempts=3),
    Setting(sweeps=2, kept=(Key(1, 0, 0),), evictions=1, others=1),
]

#: By rule: a setting where breaking it shows, and the steps of the shortest counterexample.
MUTANTS = {
    "run_before_epoch": (NEW_RUN, 13),
    "acknowledged": (SILENT, 8),
    "own_attempt": (CHANGES, 17),
    "standing": (CHANGES, 15),
    "hears_marks": (CHANGES, 13),
    "every_name": (CHANGES, 14),
    "from_the_first": (FOUND, 14),
    "own_epoch": (NEW_RUN, 14),
    "own_replay": (OWN, 15),
    "exact_slot": (CHANGES, 14),
    "refused_chooses_again": (FOUND, 13),
    "searches": (SILENT, 12),
    "unknown": (SILENT, 11),
    "nobody_deletes": (OWN, 12),
    "checked_again": (OWN, 20),
}


@pytest.mark.parametrize("setting", with_large(SETTINGS, LARGE), ids=str)
def test_with_every_rule_kept_all_settings_are_safe(setting: Setting) -> None:
    check_safe(CollectiveModel(setting), setting)


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_broken_rule_is_unsafe(rule: str) -> None:
    setting, steps = MUTANTS[rule]
    check_unsafe(CollectiveModel(setting, replace(KEPT, **{rule: False})), rule, steps)


def test_every_rule_is_broken_once() -> None:
    check_all_broken(MUTANTS, Rules)


def test_every_end_is_reached_and_a_refused_save_succeeds_with_the_next_attempt() -> None:
    ends: set[tuple[str, str]] = set()
    attempts: set[int] = set()

    def note(state: State) -> None:
        ends.add(state.ends)
        attempts.update(slot.number for slot in state.log if slot.kind == "save")

    for setting in SETTINGS:
        explore(CollectiveModel(setting), visit=note)
    assert {one for one, _ in ends} == {"", "saved", "failed"}
    assert {one for _, one in ends} == {"", "saved", "unknown"}
    assert attempts == {1, 2}
