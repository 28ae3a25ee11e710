"""Binary search for the first bad checkpoint.

A test says good, bad, or that it cannot say; then the search tests the neighbours. If none of them
can be decided, it returns the two checkpoints between which it is undecided. Nothing is read here:
the search works on any list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Generic, Literal, TypeVar

from holdfast.registry.errors import InvalidInput

_T = TypeVar("_T")

Verdict = Literal["good", "bad", "skipped"]


@dataclass(frozen=True, slots=True)
class Step(Generic[_T]):
    """One test."""

    one: _T  # the tested checkpoint
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bisected(Generic[_T]):
    """The result of a search."""

    good: _T  # the last one known to be good
    bad: _T  # the first one known to be bad
    #: Those between the two that could not be decided, in order; any of them may be the first bad
    #: one. Empty where `bad` is certainly the first bad one.
    undecided: tuple[_T, ...]
    steps: tuple[Step[_T], ...]  # the tests, in the order in which they were made

    @property
    def first_bad(self) -> _T | None:
        """The first bad one, where that is certain."""
        return None if self.undecided else self.bad


def bisect(checkpoints: Sequence[_T], is_bad: Callable[[_T], bool | None]) -> Bisected[_T]:
    """Find the first bad one in a list that turns from good to bad once.

    The first is taken to be good and the last to be bad; neither is tested, and none is tested
    twice.
    """
    if len(checkpoints) < 2:
        raise InvalidInput("a search needs a good checkpoint and a bad one", found=len(checkpoints))
    low, high = 0, len(checkpoints) - 1
    skipped: set[int] = set()
    steps: list[Step[_T]] = []
    while (at := _next(low, high, skipped)) is not None:
        bad = is_bad(checkpoints[at])
        if bad is None:
            skipped.add(at)
        elif bad:
            high = at
        else:
            low = at
        verdict: Verdict = "skipped" if bad is None else "bad" if bad else "good"
        steps.append(Step(checkpoints[at], verdict))
    undecided = tuple(checkpoints[low + 1 : high])
    return Bisected(checkpoints[low], checkpoints[high], undecided, tuple(steps))


def steps_left(untested: int) -> int:
    """Return the number of tests that this many untested ones take, if none is skipped."""
    return int(log2(untested)) + 1 if untested else 0


def _next(low: int, high: int, skipped: set[int]) -> int | None:
    """Return the untested one nearest to the middle."""
    middle = (low + high) // 2
    left = (at for at in range(low + 1, high) if at not in skipped)
    return min(left, key=lambda at: (abs(at - middle), at), default=None)
