"""The first bad one is found with few tests, and an undecided rest is reported."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.cli.bisect import Step, search, steps_left
from holdfast.registry.errors import InvalidInput


@given(st.integers(2, 300), st.data())
def test_the_first_bad_one_is_found_in_few_steps(count, data):
    first = data.draw(st.integers(1, count - 1))
    found = search(range(count), lambda n: n >= first)
    assert (found.good, found.bad, found.first_bad) == (first - 1, first, first)
    assert found.undecided == ()
    assert len(found.steps) <= ceil(log2(count - 1)) <= steps_left(count - 2) + 1
    assert all(step.verdict == ("bad" if step.one >= first else "good") for step in found.steps)


@given(st.integers(2, 60), st.data())
def test_what_cannot_be_told_widens_the_answer_and_never_falsifies_it(count, data):
    first = data.draw(st.integers(1, count - 1))
    unclear = data.draw(st.sets(st.integers(0, count - 1)))
    tested = []

    def is_bad(n: int) -> bool | None:
        tested.append(n)
        return None if n in unclear else n >= first

    found = search(range(count), is_bad)
    assert len(set(tested)) == len(tested)
    assert not {0, count - 1} & set(tested)
    assert found.good < first <= found.bad
    # As narrow as possible: none of those between can be decided.
    assert list(found.undecided) == list(range(found.good + 1, found.bad))
    assert set(found.undecided) <= unclear
    assert (found.first_bad is None) == bool(found.undecided)
    assert found.first_bad in (None, first)


def test_the_steps_are_told_in_order():
    found = search("abcdefgh", lambda one: None if one == "d" else one > "e")
    assert found.steps == (
        Step("d", "skipped"),
        Step("c", "good"),
        Step("e", "good"),
        Step("f", "bad"),
    )
    assert (found.good, found.bad) == ("e", "f")


def test_what_goes_wrong_in_a_test_comes_through():
    with pytest.raises(ZeroDivisionError):
        search(range(9), lambda n: n < 1 / 0)


@pytest.mark.parametrize("row", [[], ["one"]])
def test_one_is_no_row(row):
    with pytest.raises(InvalidInput, match="a good checkpoint and a bad one"):
        search(row, bool)


@pytest.mark.parametrize(("candidates", "steps"), [(0, 0), (1, 1), (2, 2), (3, 2), (7, 3), (8, 4)])
def test_steps_left(candidates, steps):
    assert steps_left(candidates) == steps
