"""The rules of the journal: kept, every setting is safe and ends; each one broken, one is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.checks import check_all_broken, check_safe, check_unsafe, with_large
from tests.model.explorer import explore
from tests.model.journal import KEPT, JournalModel, Rules, Setting, State, ends

RESTART = Setting(entries=2, carriers=2, restarts=1, others=1)
TAKEN_BEFORE = Setting(taken_before=True, restarts=1)
EVICTED = Setting(entries=2, evictions=1)
SWEPT = Setting(carriers=2, others=1, sweeps=1)
BLOCKED = Setting(carriers=2, blocks=1)
LINE = Setting(entries=2, carriers=2, blocks=1)
GIVES_UP = Setting(carriers=2, others=1, gives_up=1)
OUTAGE = Setting(entries=2, outages=1, others=1, taken_before=True)
OUTAGE_LINE = Setting(entries=2, outages=1, blocks=1)
SETTINGS = [RESTART, TAKEN_BEFORE, EVICTED, SWEPT, BLOCKED, LINE, GIVES_UP, OUTAGE, OUTAGE_LINE]
LARGE = [
    Setting(2, 2, restarts=1, blocks=1),
    Setting(2, 2, restarts=1, others=1, evictions=1, sweeps=1),
    Setting(2, 2, others=2, taken_before=True, blocks=1, gives_up=1),
    Setting(3, 1, restarts=1, others=1),
    Setting(2, 2, restarts=2, others=1),
    Setting(2, 2, restarts=1, outages=1, others=1),
]

#: By rule: a setting where breaking it shows, and the steps of the shortest counterexample.
MUTANTS = {
    "takeover_first": (TAKEN_BEFORE, 5),
    "continues": (OUTAGE, 7),
    "by_own_takeover": (RESTART, 9),
    "own_restarts": (RESTART, 8),
    "judged_before": (RESTART, 9),
    "never_takes_over": (RESTART, 7),
    "holds_bytes": (SWEPT, 4),
    "bytes_until_read_back": (SWEPT, 6),
    "keeps_refused": (BLOCKED, 7),
    "keeps_stranded": (RESTART, 7),
    "in_order": (RESTART, 11),
    "searches": (RESTART, 10),
    "searches_evicted": (EVICTED, 11),
    "searches_again": (GIVES_UP, 11),
    "composed_late": (EVICTED, 13),
    "exact_slot": (RESTART, 7),
    "checks_late": (SWEPT, 9),
    "refusal_by_log": (GIVES_UP, 9),
    "noted_first": (BLOCKED, 12),
    "ends_line": (LINE, 12),
    "one_carrier": (BLOCKED, 11),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", with_large(SETTINGS, LARGE), ids=str)
def test_with_every_rule_kept_all_settings_are_safe_and_end(setting: Setting) -> None:
    model = JournalModel(setting)

    def check_it_ends(state: State) -> None:
        entries = ends(model, state).entries
        assert all(entry.note for entry in entries), entries

    check_safe(model, setting, visit=check_it_ends)


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_broken_rule_is_unsafe(rule: str) -> None:
    setting, steps = MUTANTS[rule]
    check_unsafe(JournalModel(setting, replace(KEPT, **{rule: False})), rule, steps)


def test_every_rule_is_broken_once() -> None:
    check_all_broken(MUTANTS, Rules)


def test_every_outcome_is_reached() -> None:
    notes = set()
    explore(
        JournalModel(GIVES_UP),
        visit=lambda state: notes.update(one.note for one in state.entries),
    )
    assert notes == {"", "carried", "refused", "stranded"}
