"""The checks of a model with rules: with all of them it is safe, without any one it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.model.explorer import explore, tell


def with_large(settings: Iterable[object], large: Iterable[object]) -> list[Any]:
    """Return settings for a test; the large ones only for a soak."""
    return [*settings, *(pytest.param(one, marks=pytest.mark.soak) for one in large)]


def check_safe(model: Any, name: object, visit: Callable[[Any], object] | None = None) -> None:
    """Fail if a model can reach a wrong state; tell the way there."""
    outcome = explore(model, visit=visit)
    assert outcome.safe, tell(outcome)
    print(f"{name}: {outcome.states} states")


def check_unsafe(model: Any, rule: str, steps: int) -> None:
    """Fail if a model without a rule is safe, or the shortest way to a wrong state is another."""
    outcome = explore(model)
    assert not outcome.safe, f"{rule}: found safe in {outcome.states} states"
    print(f"{rule}: {outcome.states} states\n{tell(outcome)}")
    assert len(outcome.trace) == steps


def check_all_broken(mutants: Mapping[str, object], rules: Any) -> None:
    """Fail unless each rule is broken in a test."""
    assert set(mutants) == {field.name for field in dataclasses.fields(rules)}
