"""The search itself, on models that can be counted by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.explorer import Step, TooManyStates, explore, tell


class Grid:
    """Walks right and up on a square; one corner may be wrong."""

    def __init__(self, side: int, wrong: tuple[int, int] | None = None) -> None:
        self._side = side
        self._wrong = wrong

    def initial(self) -> tuple[int, int]:
        return (0, 0)

    def successors(self, state: tuple[int, int]) -> Iterator[tuple[Step, tuple[int, int]]]:
        x, y = state
        if x + 1 < self._side:
            yield ("walker", "goes right to", x + 1), (x + 1, y)
        if y + 1 < self._side:
            yield ("walker", "goes up to", y + 1), (x, y + 1)
        if x == y and x + 2 < self._side:
            yield ("walker", "jumps to", x + 2), (x + 2, y + 2)

    def wrong(self, state: tuple[int, int]) -> str | None:
        return "Here be dragons." if state == self._wrong else None


def test_every_state_is_seen_once() -> None:
    seen: list[tuple[int, int]] = []
    outcome = explore(Grid(5), visit=seen.append)
    assert outcome.safe
    assert outcome.states == 25
    assert sorted(seen) == [(x, y) for x in range(5) for y in range(5)]
    assert outcome.deepest == 5  # to (4, 1), which no jump comes near
    assert outcome.kinds == {
        ("walker", "goes right to"),
        ("walker", "goes up to"),
        ("walker", "jumps to"),
    }


def test_the_shortest_way_is_told() -> None:
    outcome = explore(Grid(5, wrong=(2, 3)))
    assert not outcome.safe
    assert len(outcome.trace) == 2
    assert tell(outcome) == (
        " 1. walker: jumps to 2\n 2. walker: goes up to 3\n    Here be dragons."
    )


def test_a_first_state_can_be_wrong() -> None:
    outcome = explore(Grid(5, wrong=(0, 0)))
    assert not outcome.safe
    assert outcome.trace == ()


def test_a_search_that_was_cut_short_is_no_proof() -> None:
    with pytest.raises(TooManyStates, match="more than 10 states"):
        explore(Grid(5), limit=10)


def test_a_safe_outcome_says_so() -> None:
    assert tell(explore(Grid(2))) == "    Nothing is wrong."
