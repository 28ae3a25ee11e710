"""Schedules: every one with few preemptions, and any number at random.

A schedule is a list of moves. A move is the name of the actor whose next call is carried out, with
`!late` or `!twice` behind it where that call is a delete that lands later, or once more later;
`land:KEY` lets a delete land that is under way; with `kill:NAME` an actor dies. Going from an actor
that could go on to another one is a preemption; where an actor has ended the choice of the next is
free. Deletes under way count as one more actor.

A rank that waits for another one cannot go on until that has spoken, or has died or ended. In a
scenario with deadlines one rank may also wait in vain, once: the others are late then. If all wait
for each other although nobody has died and nobody was late, that is a violation.

Schedules that come to the same world with every actor in the same state go on alike from there, so
that is looked at once; how many schedules go through it is counted all the same. What a program
does for each of a set it does in an order that PYTHONHASHSEED decides: counts then differ a little,
and a schedule is replayed elsewhere only under the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from tests.schedules.actors import Ended, State
from tests.schedules.scenario import Stage
from tests.schedules.soundness import Violation
from tests.schedules.store import Fate, Request, Talk, World

#: Stands for the deletes under way where actors stand by their place in the list.
_LANDING = -1
#: Calls after which two schedules of one world may still differ.
_CHANGES = ("put", "put_if_absent", "delete", "sync", *get_args(Talk))
_DEAD = State(None, None)
#: Steps of a schedule, more or less: where priorities may change.
_USUAL_LENGTH = 60
#: One step in so many kills, while somebody may die.
_ONE_DIES_IN = 30


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a schedule.

    Attributes:
        actor: Whose next call is carried out, or who dies; a delete lands where absent.
        fate: What becomes of the call if it is a delete.
        key: Where a delete lands.
        kills: Whether the actor dies.
    """

    actor: int = _LANDING
    fate: Fate = "now"
    key: str = ""
    kills: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """The store and what each actor knows, at one point of a schedule."""

    world: World
    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """One schedule and what came of it.

    Attributes:
        moves: The schedule.
        calls: Every call, with who made it.
        world: The store at its end.
        ended: How each actor ended; `None` where it died.
    """

    moves: tuple[str, ...]
    calls: list[tuple[str, Request | None]]
    world: World
    ended: list[Ended | None]


@dataclass(frozen=True, slots=True)
class Tally:
    """How much was explored.

    Attributes:
        schedules: Schedules.
        moments: Moments that differ: the world, what every actor knows, what may still follow.
        ends: Moments in which schedules ended.
        runs: Runs of the real programs that it took to know what they do.
    """

    schedules: int
    moments: int
    ends: int
    runs: int


class Explorer:
    """Explores the schedules of a stage.

    Args:
        stage: The registry and the actors.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._actors = stage.actors
        self._names = [actor.name for actor in stage.actors]
        self._mortal = {self._names.index(name) for name in stage.scenario.mortal}
        self._job = stage.scenario.job
        ranks = () if self._job is None else self._job.ranks
        self._ranks = [self._names.index(name) for name in ranks]
        self._path: list[tuple[Move, Moment]] = []
        self._fate: Fate = "now"
        self._counts: dict[object, int] = {}
        self._ends: set[object] = set()
        self.start = self._begin()

    def exhaust(self, preemptions: int, fate: Fate = "now") -> Tally:
        """Go through every schedule with at most so many preemptions.

        Args:
            preemptions: How many.
            fate: What becomes of deletes.

        Raises:
            Violation: One of them leads to what may never be; it has the fewest preemptions.
        """
        self._fate = fate
        schedules = 0
        for bound in range(preemptions + 1):
            self._counts.clear()
            self._ends.clear()
            self._path.clear()
            schedules = self._explore(self.start, None, bound)
        runs = sum(actor.runs for actor in self._actors)
        return Tally(schedules, len(self._counts), len(self._ends), runs)

    def wander(self, seed: int) -> Course:
        """Go through one schedule at random.

        Args:
            seed: Decides on it.

        Raises:
            Violation: It leads to what may never be.
        """
        chance = random.Random(seed)
        choose = _CHOOSERS[seed % len(_CHOOSERS)](chance, len(self._actors))
        self._path.clear()
        at = self.start
        while runnable := self._runnable(at):
            waiting = [who for who in self._ranks if self._may_give_up(at, who)]
            gives_up = waiting and chance.randrange(_ONE_DIES_IN) == 0
            who = chance.choice(waiting) if gives_up else choose(runnable)
            at = self._take(at, self._at_random(at, who, chance))
        self._finish(at)
        return self._course(at)

    def replay(self, shown: Iterable[str]) -> Course:
        """Go through one schedule again, as a course or a violation tells it.

        Raises:
            Violation: As before.
        """
        self._path.clear()
        at = self.start
        for text in shown:
            at = self._take(at, self._parse(text))
        if not self._runnable(at):
            self._finish(at)
        return self._course(at)

    def _course(self, at: Moment) -> Course:
        calls = [
            (self._names[move.actor], before.states[move.actor].request)
            for move, before in self._path
            if move.actor != _LANDING and not move.kills
        ]
        moves = tuple(self._show(move) for move, _ in self._path)
        return Course(moves, calls, at.world, [state.ended for state in at.states])

    def _begin(self) -> Moment:
        """Let every actor do what comes before the schedule."""
        at = Moment(self._stage.world, tuple(actor.first for actor in self._actors))
        for i in range(len(self._actors)):
            while (request := at.states[i].request) is not None and request.method != "ready":
                at = self._take(at, Move(i))
        for i, state in enumerate(at.states):
            if state.request is not None and state.request.method == "ready":
                at = self._take(at, Move(i))
        return at

    def _explore(self, at: Moment, current: int | None, left: int) -> int:
        """Return the number of schedules from here on."""
        runnable = self._runnable(at)
        stuck = current if current not in runnable and self._may_give_up(at, current) else None
        if current not in runnable:
            current = None
        numbers = tuple(state.number for state in at.states)
        key = (at.world.state, numbers, current, stuck, left)
        known = self._counts.get(key)
        if known is not None:
            return known
        if not runnable:
            self._finish(at)
            self._ends.add(key)
            self._counts[key] = 1
            return 1
        found = 0
        for who in runnable:
            cost = 0 if current in (None, who) else 1
            if cost > left:
                continue
            for move in self._moves(at, who, kills=who == current):
                found += self._explore(self._take(at, move), who, left - cost)
                self._path.pop()
        if stuck is not None:
            found += self._explore(self._take(at, Move(stuck)), stuck, left)
            self._path.pop()
        self._counts[key] = found
        return found

    def _runnable(self, at: Moment) -> list[int]:
        """Return who can take a step."""
        going = [i for i, state in enumerate(at.states) if state.request is not None]
        free = [i for i in going if not self._waits(at, i)]
        if not at.world.overdue and _DEAD not in at.states:
            for i in free:
                request = at.states[i].request
                if request is not None and at.world.lacking(request):
                    name = self._names[i]
                    raise self._with_schedule(Violation(f"{name} waits for a rank that has ended"))
        if at.world.late:
            free.append(_LANDING)
        if free or not going:
            return free
        if not at.world.overdue and _DEAD not in at.states:
            raise self._with_schedule(Violation("all ranks wait for each other"))
        # Nothing happens any more until the first deadline has passed.
        waits_s = {i: request.timeout_s for i in going if (request := at.states[i].request)}
        return [i for i, wait_s in waits_s.items() if wait_s == min(waits_s.values())]

    def _waits(self, at: Moment, who: int) -> bool:
        """Return whether an actor waits for a rank that may still speak."""
        request = at.states[who].request
        if request is None:
            return False
        lacking = [at.states[self._ranks[rank]] for rank in at.world.lacking(request)]
        if request.method == "collect" and _DEAD in lacking:
            return False  # a connection shows at once that its other end is gone
        return any(state.request is not None for state in lacking)

    def _may_give_up(self, at: Moment, who: int | None) -> bool:
        """Return whether the deadline of a rank that waits may pass."""
        if who is None or self._job is None or not self._job.has_deadlines or at.world.overdue:
            return False
        return who != _LANDING and self._waits(at, who)

    def _moves(self, at: Moment, who: int, *, kills: bool) -> Iterator[Move]:
        if who == _LANDING:
            yield Move(key=at.world.late[0])
            return
        yield Move(who, self._fate)
        if kills and who in self._mortal and _DEAD not in at.states:
            yield Move(who, kills=True)

    def _at_random(self, at: Moment, who: int, chance: random.Random) -> Move:
        if who == _LANDING:
            return Move(key=chance.choice(at.world.late))
        may_die = who in self._mortal and _DEAD not in at.states
        if may_die and chance.randrange(_ONE_DIES_IN) == 0:
            return Move(who, kills=True)
        request = at.states[who].request
        assert request is not None
        deletes = request.method == "delete"
        return Move(who, chance.choice(("now", "late", "twice")) if deletes else "now")

    def _take(self, at: Moment, move: Move) -> Moment:
        """Return the moment after a step, once what must hold there was checked."""
        self._path.append((move, at))
        try:
            after = self._after(at, move)
            if after.world.mark != at.world.mark:
                self._stage.soundness.check(after.world)
                self._stage.soundness.check(after.world.after_power_loss())
        except Violation as violation:
            raise self._with_schedule(violation) from violation.__cause__
        return after

    def _after(self, at: Moment, move: Move) -> Moment:
        if move.actor == _LANDING:
            world = at.world.copy()
            world.deliver(move.key)
            return Moment(world, at.states)
        state, world = at.states[move.actor], at.world
        if move.kills:
            state = _DEAD
        else:
            assert state.request is not None
            if state.request.method in _CHANGES:
                world = world.copy()
            answer = world.carry_out(state.request, move.fate)
            state = self._actors[move.actor].after(state, answer)
        states = list(at.states)
        states[move.actor] = state
        return Moment(world, tuple(states))

    def _finish(self, at: Moment) -> None:
        try:
            self._stage.check_end(at.world, [state.ended for state in at.states])
        except Violation as violation:
            raise self._with_schedule(violation) from violation.__cause__

    def _with_schedule(self, violation: Violation) -> Violation:
        """Return a violation with the schedule that leads to it."""
        if not violation.moves:
            violation.moves = tuple(self._show(move) for move, _ in self._path)
            violation.calls = tuple(self._call(move, at) for move, at in self._path)
        return violation

    def _call(self, move: Move, at: Moment) -> str:
        asked = "" if move.actor == _LANDING or move.kills else at.states[move.actor].request
        return f"{self._show(move)}: {asked}" if asked else self._show(move)

    def _show(self, move: Move) -> str:
        if move.actor == _LANDING:
            return f"land:{move.key}"
        name = self._names[move.actor]
        if move.kills:
            return f"kill:{name}"
        return name if move.fate == "now" else f"{name}!{move.fate}"

    def _parse(self, text: str) -> Move:
        verb, _, rest = text.partition(":")
        if verb == "land":
            return Move(key=rest)
        if verb == "kill":
            return Move(self._names.index(rest), kills=True)
        name, _, fate = text.partition("!")
        fates: dict[str, Fate] = {"late": "late", "twice": "twice"}
        return Move(self._names.index(name), fates.get(fate, "now"))


Chooser = Callable[[Sequence[int]], int]


def _evenly(chance: random.Random, actors: int) -> Chooser:
    """Return a chooser to whom everybody is equal."""
    return chance.choice


def _in_stretches(chance: random.Random, actors: int) -> Chooser:
    """Return a chooser that lets the same one go on for a while."""
    last = _LANDING

    def choose(runnable: Sequence[int]) -> int:
        nonlocal last
        if last not in runnable or chance.randrange(8) == 0:
            last = chance.choice(runnable)
        return last

    return choose


def _by_priority(chance: random.Random, actors: int) -> Chooser:
    """Return a chooser that goes by ranks, and puts the first one last a few times.

    With few changes of rank, a fault that takes few preemptions is found with a probability that
    has a bound (probabilistic concurrency testing).
    """
    order = [*range(actors), _LANDING]
    chance.shuffle(order)
    changes = {chance.randrange(_USUAL_LENGTH) for _ in range(chance.randint(1, 4))}
    steps = 0

    def choose(runnable: Sequence[int]) -> int:
        nonlocal steps
        if steps in changes:
            first = next(who for who in order if who in runnable)
            order.remove(first)
            order.append(first)
        steps += 1
        return next(who for who in order if who in runnable)

    return choose


_CHOOSERS = (_by_priority, _in_stretches, _evenly, _by_priority)
