"""Two ranks number their saves, and miss some: a model of how they come in step again.

Each rank goes through the same steps. At a step it saves, in the call of its next number, or misses
the save by an error of its own. A rank that waits may give up while the other one trains. Specified
in docs/spec.md, section 43, "In step".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Step


@dataclass(frozen=True)
class Rules:
    """The rules; each can be broken.

    Attributes:
        missed_calls_are_passed: A rank goes on from a call that failed at an earlier step.
        steps_are_compared: Rank 0 refuses a greeting of another step.
        ahead_goes_on: After that the rank with the higher step goes on to the next call.
    """

    missed_calls_are_passed: bool = True
    steps_are_compared: bool = True
    ahead_goes_on: bool = True


@dataclass(frozen=True)
class Setting:
    """Steps of the training, and how often ranks miss a save, or wait in vain."""

    steps: int = 4
    misses: int = 2
    waits: int = 2


class State(NamedTuple):
    """The ranks, and all that they have said.

    Attributes:
        steps: The step that each rank is at.
        calls: The number of its last call.
        waiting: Whether it waits in that call.
        greetings: Calls of rank 1, each with its step.
        left: Calls that rank 1 has given up.
        ended: Calls that rank 0 has ended, each with the last step that is past; -1 for none.
        saved: Steps that were saved, each with that of rank 1.
        troubled: Steps that a rank has missed, or at which it has waited in vain.
        budget: Misses and waits in vain that are left.
    """

    steps: tuple[int, int] = (0, 0)
    calls: tuple[int, int] = (0, 0)
    waiting: tuple[bool, bool] = (False, False)
    greetings: frozenset[tuple[int, int]] = frozenset()
    left: frozenset[int] = frozenset()
    ended: frozenset[tuple[int, int]] = frozenset()
    saved: frozenset[tuple[int, int]] = frozenset()
    troubled: frozenset[int] = frozenset()
    budget: tuple[int, int] = (0, 0)


class InStepModel:
    """A setting under some rules: a model for `explorer.explore`."""

    def __init__(self, setting: Setting, rules: Rules = Rules()) -> None:
        self.setting, self.rules = setting, rules

    def initial(self) -> State:
        """Return the first state."""
        return State(budget=(self.setting.misses, self.setting.waits))

    def wrong(self, state: State) -> str | None:
        """Return the promise that is broken."""
        if any(mine != theirs for mine, theirs in state.saved):
            return "A checkpoint has parts of two steps."
        passed = min(step - waits for step, waits in zip(state.steps, state.waiting, strict=True))
        last = max(state.troubled, default=0)
        kept = {step for step, _ in state.saved}
        if any(step not in kept for step in range(last + 1, passed + 1)):
            return "A save that both ranks have made after the trouble is not there."
        return None

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every step that somebody may take next."""
        for rank in (0, 1):
            who, step = f"rank {rank}", state.steps[rank] + 1
            if not state.waiting[rank]:
                if step <= self.setting.steps:
                    at = state._replace(steps=_with(state.steps, rank, step))
                    yield (who, "saves", step), self._calls(at, rank)
                    if state.budget[0]:
                        budget = (state.budget[0] - 1, state.budget[1])
                        missed = at._replace(budget=budget, troubled=state.troubled | {step})
                        yield (who, "misses", step), missed
                continue
            yield from self._lead(state) if rank == 0 else self._follow(state)
            yield from self._gives_up(state, rank)

    def _calls(self, state: State, rank: int) -> State:
        """Return the state in which a rank has begun its next call."""
        number = state.calls[rank] + 1
        begun = state._replace(
            calls=_with(state.calls, rank, number), waiting=_with(state.waiting, rank, True)
        )
        greeted = begun.greetings | {(number, state.steps[1])}
        return begun if rank == 0 else begun._replace(greetings=greeted)

    def _gives_up(self, state: State, rank: int) -> Iterator[tuple[Step, State]]:
        """A rank waits in vain for one that trains, or has ended."""
        other, call, step = 1 - rank, state.calls[rank], state.steps[rank]
        is_answered = call in (dict(state.ended) if rank else dict(state.greetings))
        is_over = state.steps[other] == self.setting.steps
        if is_answered or state.waiting[other] or not (state.budget[1] or is_over):
            return
        budget = (state.budget[0], state.budget[1] - (not is_over))
        after = self._leaves(state, rank)._replace(
            budget=budget, troubled=state.troubled | {step, state.steps[other]}
        )
        if rank == 0:
            yield ("rank 0", "gives up", step), after._replace(ended=state.ended | {(call, step)})
        else:
            yield ("rank 1", "gives up", step), after._replace(left=state.left | {call})

    def _leaves(self, state: State, rank: int) -> State:
        return state._replace(waiting=_with(state.waiting, rank, False))

    def _lead(self, state: State) -> Iterator[tuple[Step, State]]:
        call, mine = state.calls[0], state.steps[0]
        theirs = dict(state.greetings).get(call)
        if theirs is None:
            return
        if theirs != mine and self.rules.steps_are_compared:
            past = max(mine, theirs) - 1 if self.rules.ahead_goes_on else -1
            told = state._replace(ended=state.ended | {(call, past)})
            goes_on = mine > past >= 0
            after = self._calls(told, 0) if goes_on else self._leaves(told, 0)
            yield ("rank 0", "finds another step", theirs), after
            return
        ended = self._leaves(state, 0)._replace(ended=state.ended | {(call, -1)})
        if call in state.left:
            yield ("rank 0", "hears that rank 1 has left", mine), ended
        else:
            yield ("rank 0", "commits", mine), ended._replace(saved=state.saved | {(mine, theirs)})

    def _follow(self, state: State) -> Iterator[tuple[Step, State]]:
        past = dict(state.ended).get(state.calls[1])
        if past is None:
            return
        if self.rules.missed_calls_are_passed and 0 <= past < state.steps[1]:
            yield ("rank 1", "goes on from", past), self._calls(state, 1)
        else:
            yield ("rank 1", "hears the end", past), self._leaves(state, 1)


def _with(pair: tuple[int, int], at: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if at == 0 else (pair[0], value)
