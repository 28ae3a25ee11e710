"""A test for the tests of the changes; pytest takes it only by its name."""

from __future__ import annotations

from holdfast.registry.history.slots import Races


def test_a_race_that_is_lost_counts() -> None:
    races = Races()
    assert races.lose()
    assert races.lost == 1
