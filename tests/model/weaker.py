"""Rejected protocols: one content under one name, two writers, one sweeper.

Each is two short programs over a shared store. The first run holds the content at first, and may
evict it; the writers name it in runs of their own. As everywhere, an actor may stop for ever at any
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Step

#: Index of the run that holds the content at first; the writers' runs come before it.
OLD_RUN = 2
WRITERS = range(OLD_RUN)


class Process(NamedTuple):
    """A process: the next step of its program, and what it saw."""

    step: int = 0
    saw: int = 0


class State(NamedTuple):
    """The state of the store and of the processes.

    Attributes:
        objects: Whether the content exists under its name (bit 0), or a second one (bit 1).
        fresh: Whether a writer has put it again, so that it is too young to delete.
        deleting: Whether a DELETE of the first name was sent.
        runs: Runs that name the content, as bits.
        moved: Runs that name it by the second name, as bits.
        leases: Writers that hold a lease, as bits.
        sweeping: Whether the sweeper's flag is set, or its condemned set is published.
        writers: The writers.
        sweeper: The sweeper.
    """

    objects: int = 1
    fresh: bool = False
    deleting: bool = False
    runs: int = 1 << OLD_RUN
    moved: int = 0
    leases: int = 0
    sweeping: bool = False
    writers: tuple[Process, ...] = (Process(),) * len(WRITERS)
    sweeper: Process = Process()


@dataclass(frozen=True)
class Scheme:
    """A protocol.

    Attributes:
        writer: The steps of a writer.
        sweeper: Those of the sweeper.
        leases_expire: A lease may run out by the clock while its holder still works.
        deletes_land_late: A DELETE that was sent may land at any later time, and again.
    """

    writer: tuple[str, ...]
    sweeper: tuple[str, ...]
    leases_expire: bool = False
    deletes_land_late: bool = False


_LEASED = ("takes a lease", "sees no sweep", "looks", "commits", "gives the lease back")
_DEKKER = ("raises its flag", "sees no lease", "replays the logs", "deletes", "lowers its flag")

NO_PROTECTION = Scheme(("looks", "commits"), ("replays the logs", "deletes"))
PUT_AGAIN = Scheme(("puts", "commits"), ("replays the logs", "sees that it is old", "deletes"))
LEASES_THAT_EXPIRE = Scheme(_LEASED, _DEKKER, leases_expire=True)
LEASES_AND_LATE_DELETES = Scheme(_LEASED, _DEKKER, deletes_land_late=True)
#: Safe, but one crashed writer stops collection for ever, and no store promises that a DELETE whose
#: answer was lost will not land any more.
LEASES_IN_A_PERFECT_WORLD = Scheme(_LEASED, _DEKKER)
COMMIT_THEN_CHECK = Scheme(
    ("looks", "commits", "checks what is condemned"),
    ("raises its flag", "replays the logs", "deletes"),
)


class Weaker:
    """A rejected protocol: a model for `explorer.explore`."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def initial(self) -> State:
        """Return the first state."""
        return State()

    def wrong(self, state: State) -> str | None:
        """The invariant: the content that a run names exists."""
        if state.runs & ~state.moved and not state.objects & 1:
            return "A run names the content, which is not there."
        return None

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield every possible next step, and the state after it."""
        if state.deleting and state.objects & 1:
            yield ("the store", "deletes"), state._replace(objects=state.objects & ~1)
        if state.runs >> OLD_RUN & 1:
            yield ("the old run", "evicts"), state._replace(runs=state.runs & ~(1 << OLD_RUN))
        if self._scheme.leases_expire:
            for one in WRITERS:
                if state.leases >> one & 1:
                    after = state._replace(leases=state.leases & ~(1 << one))
                    yield (f"the lease of writer {one}", "expires"), after
        for one in WRITERS:
            program, me = self._scheme.writer, state.writers[one]
            if me.step < len(program):
                for after in _WRITER[program[me.step]](state, one):
                    yield (f"writer {one}", program[me.step]), _wrote(after, one)
        if state.sweeper.step < len(self._scheme.sweeper):
            step = self._scheme.sweeper[state.sweeper.step]
            for after in self._sweep(step, state):
                me = after.sweeper._replace(step=state.sweeper.step + 1)
                yield ("the sweeper", step), after._replace(sweeper=me)

    def _sweep(self, step: str, state: State) -> Iterator[State]:
        saw = state.sweeper._replace(saw=int(not state.runs))
        match step:
            case "raises its flag":
                yield state._replace(sweeping=True)
            case "lowers its flag":
                yield state._replace(sweeping=False)
            case "sees no lease":
                if not state.leases:
                    yield state
            case "replays the logs":
                yield state._replace(sweeper=saw)
            case "sees that it is old":
                if not state.fresh:
                    yield state
            case "deletes":
                if not state.sweeper.saw:
                    yield state
                elif self._scheme.deletes_land_late:
                    yield state._replace(deleting=True)
                else:
                    yield state._replace(objects=state.objects & ~1)


def _wrote(state: State, one: int) -> State:
    me = state.writers[one]
    writers = list(state.writers)
    writers[one] = me._replace(step=me.step + 1)
    return state._replace(writers=tuple(writers))


def _look(state: State, one: int) -> Iterator[State]:
    # One step even where it puts: weaker protocols get the benefit of the doubt.
    yield state if state.objects & 1 else _upload(state)


def _upload(state: State) -> State:
    return state._replace(objects=state.objects | 1, fresh=True)


def _put(state: State, one: int) -> Iterator[State]:
    yield _upload(state)


def _commit(state: State, one: int) -> Iterator[State]:
    yield state._replace(runs=state.runs | 1 << one)


def _check(state: State, one: int) -> Iterator[State]:
    if not state.sweeping:
        yield state
    else:
        yield state._replace(objects=state.objects | 2, moved=state.moved | 1 << one)


def _lease(state: State, one: int) -> Iterator[State]:
    yield state._replace(leases=state.leases | 1 << one)


def _see_no_sweep(state: State, one: int) -> Iterator[State]:
    if not state.sweeping:
        yield state


def _give_back(state: State, one: int) -> Iterator[State]:
    yield state._replace(leases=state.leases & ~(1 << one))


_WRITER: dict[str, Callable[[State, int], Iterator[State]]] = {
    "looks": _look,
    "puts": _put,
    "commits": _commit,
    "checks what is condemned": _check,
    "takes a lease": _lease,
    "sees no sweep": _see_no_sweep,
    "gives the lease back": _give_back,
}
