"""The real code without one of its rules: there is a schedule that shows it, and it is found."""

from __future__ import annotations

import pytest

from tests.schedules.broken import BROKEN, without
from tests.schedules.explore import Explorer
from tests.schedules.plays import CUT, DISK, MIXES, REQUIRED, SEALED
from tests.schedules.scenario import Stage
from tests.schedules.soundness import Violation
from tests.schedules.store import Fate

GONE = "holds what needs .* is gone"
#: Where each is found: the play, preemptions, what becomes of deletes, and what is told.
FOUND: dict[str, tuple[str, int, Fate, str]] = {
    "no_mark": ("another run", 1, "now", GONE),
    "no_second_look": ("another run, something alike, opened before", 1, "now", GONE),
    "deletes_before_all_marks": ("another run, something alike, opened before", 1, "now", GONE),
    "shards_mark_their_own_runs": ("two shards", 1, "now", GONE),
    "runs_listed_too_early": ("another run, something alike, opened before", 1, "now", GONE),
    "no_recheck": ("another run", 1, "now", GONE),
    "rechecked_once": ("another run", 1, "now", GONE),
    "marks_ignored": ("another run", 1, "now", GONE),
    "epoch_observed_early": ("another run", 1, "late", GONE),
    "condemned_keys_named": ("another run", 1, "now", GONE),
    "condemned_packs_chosen": ("another run", 1, "now", "5 times in a row"),
    "generations_ignored": ("another run", 0, "twice", GONE),
    "cover_by_evicted": ("resumed from the evicted, something alike", 1, "now", GONE),
    "run_overlooked": ("another run", 0, "now", GONE),
    "objects_not_synced": ("the same in two runs", 1, "now", GONE),
    "slots_not_synced": ("the same again", 1, "now", "is saved, and it is lost"),
    "epochs_not_synced": ("a collector behind another one", 1, "now", "an epoch that is not there"),
    "no_marker": ("a sealed run", 0, "now", GONE),
    "marker_after_the_epoch": ("a sealed run", 1, "now", GONE),
    "no_marker_after_a_new_seal": ("a run that is being sealed", 0, "now", GONE),
    "epoch_kept_after_a_new_seal": ("a run that is being sealed", 1, "now", GONE),
    "markers_without_a_number": ("a sealed run and two collectors", 1, "late", GONE),
    "notes_read_before_the_markers": ("a sealed run and two collectors", 1, "now", GONE),
    "markers_listed_before_the_epoch": ("a sealed run", 1, "now", GONE),
    "markers_removed_before_the_note": ("a sealed run and two collectors", 1, "now", GONE),
    "the_note_put_last_counts": ("a run that is being sealed", 1, "now", GONE),
    "markers_not_synced": ("a save behind another's marker", 1, "now", GONE),
    "notes_not_synced": ("a collector behind a note", 1, "now", GONE),
    "log_not_looked_at": ("a log that loses its newest slot", 0, "now", "and it is lost"),
}


def play(name: str) -> Explorer:
    return Explorer(Stage((REQUIRED | MIXES | SEALED | DISK | CUT)[name]()))


#: Takes long to find, or is found like another one.
SLOW = {
    "condemned_packs_chosen",
    "cover_by_evicted",
    "deletes_before_all_marks",
    "epochs_not_synced",
    "markers_listed_before_the_epoch",
    "markers_removed_before_the_note",
    "rechecked_once",
    "runs_listed_too_early",
    "epoch_observed_early",
    "epoch_kept_after_a_new_seal",
    "markers_without_a_number",
    "notes_read_before_the_markers",
    "the_note_put_last_counts",
}


@pytest.mark.parametrize(
    "rule", [pytest.param(one, marks=[pytest.mark.soak] if one in SLOW else []) for one in BROKEN]
)
def test_a_broken_rule_is_caught(rule: str) -> None:
    name, preemptions, fate, message = FOUND[rule]
    with without(rule):
        with pytest.raises(Violation, match=message) as caught:
            play(name).exhaust(preemptions, fate)
        # The schedule that is told leads there again, in an explorer that remembers nothing.
        with pytest.raises(Violation, match=message):
            play(name).replay(caught.value.moves)
    print(f"{rule}: {caught.value}")


def test_a_broken_rule_is_caught_at_random() -> None:
    with without("no_recheck"):
        explorer = play("another run")
        with pytest.raises(Violation, match=GONE):
            for seed in range(300):
                explorer.wander(seed)


@pytest.mark.soak
def test_only_a_second_landing_shows_that_names_are_used_again() -> None:
    with without("generations_ignored"):
        assert play("another run").exhaust(1, "now").schedules > 1_000
