"""Sealed runs are collected safely; without any one rule, something live is deleted or missed.

Each setting is explored to the end. The numbers of states are exact, as in `test_protocol`. The six
weaker forms that were rejected when the rules were found are among the mutants.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.checks import check_all_broken, check_unsafe, with_large
from tests.model.explorer import explore, tell
from tests.model.sealing import (
    KEPT,
    Collector,
    Evictor,
    Reader,
    Rules,
    Sealed,
    Sealer,
    Setting,
    Trainer,
)

SAVES, FORKS, EVICTS = Trainer(0), Trainer(1, born=True), Evictor()
FROM_BEFORE, FORKS_FROM_BEFORE = Trainer(0, old=True), Trainer(1, born=True, old=True)
C, S, R = Collector(), Sealer(), Reader()
#: A run beside one that is not there yet.
BIRTH = (True, False)

OLD = Setting((C, S))
OLD_TRAINER = Setting((FROM_BEFORE, EVICTS, C, S))
FORK = Setting((FORKS, EVICTS, C, S), BIRTH)
SEALED = Setting((SAVES, C, S), first="sealed")
NOTED = Setting((SAVES, C, S), first="noted")
TWO_SEALERS = Setting((SAVES, C, S, S), first="sealed")
READ = Setting((SAVES, R, S), first="noted")

#: The number of states of each.
SAFE = {
    "a save, an eviction, a collection and a seal": (Setting((SAVES, EVICTS, C, S)), 8_860),
    "a fork": (FORK, 7_363),
    "a seal that was left": (SEALED, 1_438),
    "a sealed run": (NOTED, 1_328),
    "a run from before, with a trainer of then": (OLD_TRAINER, 4_141),
    "a reader of a sealed run": (READ, 1_178),
    "a reader of a run that was never sealed": (Setting((SAVES, EVICTS, R, S)), 5_782),
    "a fork by a program from before": (
        Setting((FORKS_FROM_BEFORE, EVICTS, C, S), BIRTH),
        5_537,
    ),
}
LARGE = {
    "a reader and two sealers": (Setting((SAVES, EVICTS, R, S, S), first="sealed"), 58_929),
    "two sealers": (TWO_SEALERS, 17_819),
    "two sealers, from the first seal on": (Setting((SAVES, EVICTS, C, S, S)), 137_045),
    "two trainers": (Setting((SAVES, FORKS, C, S), BIRTH, "noted"), 30_215),
    "two collectors": (Setting((SAVES, S, C, C), first="noted", epochs=2), 68_523),
    "two collectors and a fork": (Setting((FORKS, EVICTS, C, C), BIRTH, epochs=2), 23_405),
    "two evictions and two seals": (
        Setting((SAVES, EVICTS, EVICTS, C, S, S), first="noted"),
        180_249,
    ),
}
#: By rule: the setting in which breaking it shows, and the steps of the shortest history.
MUTANTS = {
    "numbered": (SEALED, 14),
    "marker_first": (SEALED, 12),
    "every_commit": (Setting((EVICTS, S)), 3),
    "marker_after_seal": (SEALED, 14),
    "epoch_after_marker": (SEALED, 17),
    "note_before_removal": (NOTED, 13),
    "note_by_slot": (TWO_SEALERS, 16),
    "seal_before_note": (SEALED, 12),
    "markers_after_epoch": (SEALED, 12),
    "runs_after_epoch": (FORK, 13),
    "notes_after_listing": (NOTED, 15),
    "notes_by_name": (NOTED, 14),
    "known_before_reading": (READ, 14),
    "markers_before_notes": (READ, 14),
    "newer_notes": (READ, 14),
    "unsealed_is_asked": (Setting((SAVES, R)), 9),
    "unknown_is_active": (OLD, 5),
    "old_refuse": (OLD_TRAINER, 13),
}


@pytest.mark.parametrize("name", with_large(SAFE, LARGE))
def test_a_collection_of_sealed_runs_is_safe(name: str) -> None:
    setting, states = (SAFE | LARGE)[name]
    outcome = explore(Sealed(setting))
    print(f"{name}: {outcome.states} states")
    assert outcome.safe, tell(outcome)
    assert outcome.states == states


@pytest.mark.parametrize("setting", [Setting((SAVES, EVICTS, S)), FORK], ids=["save", "fork"])
def test_no_commit_stands_behind_a_seal_without_a_marker(setting: Setting) -> None:
    outcome = explore(Sealed(setting, reach=True))
    assert outcome.safe, tell(outcome)


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_broken_rule_is_unsafe(rule: str) -> None:
    setting, steps = MUTANTS[rule]
    rules = replace(KEPT, **{rule: False})
    check_unsafe(Sealed(setting, rules, reach=rule == "every_commit"), rule, steps)


def test_every_rule_is_broken_once() -> None:
    check_all_broken(MUTANTS, Rules())
