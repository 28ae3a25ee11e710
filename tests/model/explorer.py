"""Breadth-first search through all states of a small model of anything.

A model has a first state, the steps from a state, and a check of a state. States are hashable
values. The search ends at the first wrong state, so its trace is one of the shortest, or when all
reachable states have been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

StateT = TypeVar("StateT", bound=Hashable)
#: Who does what, and with what: words for a reader.
Step = tuple[object, ...]


class Model(Protocol[StateT]):
    """What can be explored."""

    def initial(self) -> StateT:
        """Return the first state."""
        ...

    def successors(self, state: StateT) -> Iterable[tuple[Step, StateT]]:
        """Return every step that somebody may take next, and where it leads."""
        ...

    def wrong(self, state: StateT) -> str | None:
        """Return what is wrong with a state, or `None`."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        states: Distinct states seen.
        deepest: Steps from the first state to the last one seen.
        kinds: Who did what somewhere: the first two words of every step.
        fault: What is wrong; `None` where every state was seen and none is wrong.
        trace: The shortest way to a wrong state; empty where there is none.
    """

    states: int
    deepest: int
    kinds: frozenset[Step]
    fault: str | None = None
    trace: tuple[Step, ...] = ()

    @property
    def safe(self) -> bool:
        """Whether every reachable state was seen, and none is wrong."""
        return self.fault is None


class TooManyStates(Exception):
    """The search was not exhaustive: neither safe nor unsafe."""


def explore(
    model: Model[StateT],
    *,
    limit: int = 20_000_000,
    visit: Callable[[StateT], object] | None = None,
) -> Outcome:
    """Visit every state that can be reached, nearest first.

    Args:
        model: What to explore.
        limit: States to see at most.
        visit: Called with each state.

    Raises:
        TooManyStates: There are more than `limit`.
    """
    start = model.initial()
    came_from: dict[StateT, StateT | None] = {start: None}
    kinds: set[Step] = set()
    level, depth = [start], 0
    while level:
        following: list[StateT] = []
        for state in level:
            if visit is not None:
                visit(state)
            fault = model.wrong(state)
            if fault is not None:
                way = _way(model, came_from, state)
                return Outcome(len(came_from), depth, frozenset(kinds), fault, way)
            for step, after in model.successors(state):
                kinds.add(step[:2])
                if after not in came_from:
                    came_from[after] = state
                    following.append(after)
        if len(came_from) > limit:
            raise TooManyStates(f"more than {limit} states within {depth + 1} steps")
        level, depth = following, depth + bool(following)
    return Outcome(len(came_from), depth, frozenset(kinds))


def _way(
    model: Model[StateT], came_from: dict[StateT, StateT | None], last: StateT
) -> tuple[Step, ...]:
    """Return the steps to a state: only the states were kept, so they are looked for again."""
    steps: list[Step] = []
    after = last
    while (state := came_from[after]) is not None:
        steps.append(next(step for step, end in model.successors(state) if end == after))
        after = state
    return tuple(reversed(steps))


def tell(outcome: Outcome) -> str:
    """Return a way to a wrong state, one numbered line a step, and what is wrong in the end."""
    lines = [
        f"{number:2}. {who}: {' '.join(map(str, words))}"
        for number, (who, *words) in enumerate(outcome.trace, start=1)
    ]
    return "\n".join([*lines, f"    {outcome.fault or 'Nothing is wrong.'}"])
