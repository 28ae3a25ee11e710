"""The rare places are in the source, tests name them, and a watch notices who was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.registry.history.slots import Races
from tests.support.places import PLACES
from tests.support.processes import run_apart
from tests.support.sometimes import Place, Watch, rewritten

TESTS = Path(__file__).parent
LOST = {"a race is lost": Place("registry.history.slots", "Races.lose", "self.lost += 1")}


def test_every_place_is_in_the_source() -> None:
    changed = {function for _, function in rewritten(PLACES)}
    assert changed == {place.function for place in PLACES.values()}


@pytest.mark.parametrize(
    "place",
    [
        Place("registry.history.slots", "Races.lose", "self.won += 1"),
        Place("registry.history.slots", "Races.lose", "self."),
        Place("registry.history.slots", "Races.win", "self.lost += 1"),
    ],
    ids=["gone", "twice", "no function"],
)
def test_a_place_that_is_not_in_the_source_fails_at_once(place: Place) -> None:
    with pytest.raises(LookupError):
        rewritten({"somewhere": place})


def test_every_place_is_one_of_a_test() -> None:
    mine = Path(__file__).name
    texts = [one.read_text() for one in TESTS.rglob("test_*.py") if one.name != mine]
    assert [name for name in PLACES if not any(f'"{name}"' in text for text in texts)] == []


def test_a_watch_notices_a_place_and_takes_its_call_away(tmp_path: Path) -> None:
    before = Races.lose.__code__
    with Watch(tmp_path, LOST, is_here=True) as watch:
        with pytest.raises(AssertionError, match="never been at"):
            watch.check()
        assert Races().lose()
        assert watch.seen == {"a race is lost": 1}
        watch.check()
    assert Races.lose.__code__ is before


def test_a_watch_notices_other_processes(tmp_path: Path) -> None:
    with Watch(tmp_path, LOST) as watch:
        assert Races().lose()
        assert watch.missing == ["a race is lost"]
        assert run_apart(_lose_twice) == 0
        assert watch.seen == {"a race is lost": 1}
    assert run_apart(_lose_twice) == 0
    assert watch.seen == {"a race is lost": 1}


def _lose_twice() -> None:
    races = Races()
    races.lose()
    races.lose()


def test_a_condition_has_to_hold(tmp_path: Path) -> None:
    (place,) = LOST.values()
    with Watch(tmp_path, {"often": place._replace(when="self.lost == 2")}, is_here=True) as watch:
        races = Races(patience_s=1e-9)
        races.lose()
        races.lose()
        assert watch.missing == ["often"]
        races.lose()
        assert watch.missing == []
