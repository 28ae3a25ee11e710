"""Filters of rows: what fits, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import Filter

ROWS = (
    {"name": "vit-s", "lr": 0.001, "amp": True, "status": "failed", "best": None},
    {"name": "ViT l", "lr": 0.01, "amp": False, "status": "running", "best": 3},
    {"name": "mlp", "lr": "auto", "created": datetime(2026, 3, 1, tzinfo=UTC), "best": -1.0},
)


@pytest.mark.parametrize(
    ("text", "fitting"),
    [
        ("", [0, 1, 2]),
        ("lr < 1e-2", [0]),
        ("lr<=0.01 and status=failed", [0]),
        ("lr=1e-3 or lr==auto", [0, 2]),
        ("lr != auto", [0, 1]),
        ("name~vit", [0, 1]),
        ("name !~ VIT", [2]),
        ("name = 'ViT l'", [1]),
        ("amp=true", [0]),
        ("amp != TRUE", [1]),
        ("best=none", [0]),
        ("best != none", [1, 2]),
        ("best < 3", [2]),
        ("best=3.0", [1]),
        ("not best=3", [0, 2]),
        ("created > 2026-02-28 AND created<=2026-03-01T01:00+01:00", [2]),
        ("status=failed or status=running and best=3", [0, 1]),
        ("(status=failed or status=running) and best=3", [1]),
        ("not (status=failed or best=3)", [2]),
    ],
)
def test_what_fits(text: str, fitting: list[int]) -> None:
    assert Filter.parse(text).of(ROWS) == [ROWS[i] for i in fitting]


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("lr <", 5, "a value"),
        ("lr 3", 4, "one of ="),
        ("= 3", 1, "a field"),
        ("lr=1 status=failed", 6, "`and`, `or` or the end"),
        ("(lr=1", 6, "`)`"),
        ("lr=1)", 5, "`and`, `or` or the end"),
        ("lr=1 and", 9, "a field"),
        ("name='vit", 6, "a value"),
        ("lr < auto", 6, "a number or a date"),
        ("(" * 21 + "a=1", 22, "at most 20 levels"),
        ("not " * 21 + "a=1", 85, "at most 20 levels"),
    ],
)
def test_what_is_no_filter_is_refused_at_its_place(text: str, at: int, expected: str) -> None:
    with pytest.raises(InvalidInput, match=f"character {at} of") as refused:
        Filter.parse(text)
    assert f"expected {expected}" in str(refused.value)


def test_a_filter_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(InvalidInput, match="at most 1000 characters"):
        Filter.parse("(" * 1001)


def test_a_field_that_no_row_has_is_named_with_its_neighbour() -> None:
    with pytest.raises(InvalidInput, match=r"character 11 of .*; found stauts. Did you mean 'sta"):
        Filter.parse("lr=1 and (stauts=failed)").of(ROWS)
    assert Filter.parse("stauts=failed").of([]) == []


@given(st.text(st.sampled_from("ab1 ()=<>!~'\"andort-.é\n"), max_size=60))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        found = Filter.parse(text)
    except InvalidInput:
        return
    assert all(found.test(row) in (True, False) for row in ROWS)
