"""A handle that outlives its log: the check of the newest slot, as a model to explore.

Slots are numbers that stand for their bytes. Between two operations of the handle anybody may cut
the log or replace it, and others may then write to it. A change during an operation, after its
check, is noticed by the next operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Step

IDLE, COMMITS, STOPPED = "idle", "commits", "stopped"


@dataclass(frozen=True)
class Rules:
    """When the handle checks that the newest slot is the one that it has read.

    Attributes:
        commit: Before it puts a slot.
        acknowledgements: Before it reports that nothing is left to do.
        refresh: Before it reads new slots.
    """

    commit: bool = True
    acknowledgements: bool = True
    refresh: bool = True


class State(NamedTuple):
    """The log, and the handle.

    Attributes:
        log: Its slots; `None` is a gap.
        replay: The slots that the handle has read or put.
        does: What the handle is about to do.
        acked: Whether the handle has just acknowledged the slots that it has read.
        fresh: The next slot's bytes, which nobody has had before.
        left: What may still be done: harm from outside, slots by others, commits of the handle.
    """

    log: tuple[int | None, ...] = (1, 2)
    replay: tuple[int, ...] = (1, 2)
    does: str = IDLE
    acked: bool = False
    fresh: int = 3
    left: tuple[int, int, int] = (1, 2, 2)


class Outliving:
    """A model for `explorer.explore`."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()

    def initial(self) -> State:
        """Return the first state."""
        return State()

    def wrong(self, state: State) -> str | None:
        """Return what the handle has acknowledged wrongly."""
        if state.acked and state.log[: len(state.replay)] != state.replay:
            return "The handle acknowledged what the log does not hold."
        return None

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every possible next step, and the state after it."""
        state = state._replace(acked=False)
        harm, others, commits = state.left
        if state.does == STOPPED:
            return
        if state.does == COMMITS:
            yield from self._put(state)
            return
        if harm:
            harmed = state._replace(left=(harm - 1, others, commits))
            for length in range(len(state.log)):
                yield ("somebody", "cuts the log"), harmed._replace(log=state.log[:length])
            for length in range(1, len(state.log) + 2):
                new = tuple(range(state.fresh, state.fresh + length))
                after = harmed._replace(log=new, fresh=state.fresh + length)
                yield ("somebody", "puts another log in its place"), after
        if others:
            after = state._replace(log=(*state.log, state.fresh), fresh=state.fresh + 1)
            yield ("others", "put a slot"), after._replace(left=(harm, others - 1, commits))
        if commits:
            begun = state._replace(left=(harm, others, commits - 1))
            refused = self._rules.commit and not self._stands(state)
            yield (
                (("the handle", "refuses to commit"), begun._replace(does=STOPPED))
                if refused
                else (("the handle", "composes"), begun._replace(does=COMMITS))
            )
        if self._rules.acknowledgements and not self._stands(state):
            yield ("the handle", "refuses to tell"), state._replace(does=STOPPED)
        else:
            yield ("the handle", "tells that all is done"), state._replace(acked=True)
        yield from self._read_on(state)

    def _put(self, state: State) -> Iterator[tuple[Step, State]]:
        n = len(state.replay)
        if n < len(state.log):
            yield from self._read_on(state)
            return
        gap = (None,) * (n - len(state.log))
        yield (
            ("the handle", "puts a slot"),
            state._replace(
                log=(*state.log, *gap, state.fresh),
                replay=(*state.replay, state.fresh),
                does=IDLE,
                acked=True,
                fresh=state.fresh + 1,
            ),
        )

    def _read_on(self, state: State) -> Iterator[tuple[Step, State]]:
        following = state.log[len(state.replay) :]
        if not following or None in following:
            return
        if self._rules.refresh and not self._stands(state):
            yield ("the handle", "refuses to read on"), state._replace(does=STOPPED)
        else:
            read = (*state.replay, *(slot for slot in following if slot is not None))
            yield ("the handle", "reads on"), state._replace(replay=read)

    @staticmethod
    def _stands(state: State) -> bool:
        """Look at the newest slot that was read."""
        number = len(state.replay) - 1
        return number < len(state.log) and state.log[number] == state.replay[number]
