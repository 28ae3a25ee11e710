"""A schedule played by threads: every actor a program that really runs, waits and goes on.

Nothing is remembered here. It shows that what `tests.schedules.actors` remembers of programs is
what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from tests.schedules.actors import Actor, Ended, Stopped
from tests.schedules.scenario import Stage
from tests.schedules.store import Answer, Asking, Fate, Request, World


@dataclass(frozen=True)
class Played:
    """What came of a schedule.

    Attributes:
        world: The store at its end.
        calls: Every call in the order in which they were carried out, with who made it.
        ended: How each actor ended; `None` where it died, its next call where it has not.
    """

    world: World
    calls: list[tuple[str, Request]]
    ended: list[Request | Ended | None]


class _Waiting(Asking):
    """A store whose every call waits until it is carried out."""

    def __init__(self, page: int | None) -> None:
        super().__init__(page=page)
        self.said: SimpleQueue[Request | Ended] = SimpleQueue()
        self.answers: SimpleQueue[Answer | Stopped] = SimpleQueue()
        self._stopped = False

    def ask(self, request: Request) -> Answer:
        if self._stopped:
            raise Stopped
        self.said.put(request)
        answer = self.answers.get()
        if isinstance(answer, Stopped):
            self._stopped = True
            raise answer
        return answer


class _Player:
    """An actor in a thread of its own."""

    def __init__(self, actor: Actor, page: int | None) -> None:
        self.name = actor.name
        self._actor = actor
        self._store = _Waiting(page)
        self._thread = Thread(target=self._run, name=actor.name)
        self._thread.start()
        self.next = self._store.said.get()

    def _run(self) -> None:
        try:
            self._store.said.put(self._actor.run_on(self._store))
        except Stopped:
            self._store.said.put(Ended())

    def go_on(self, world: World, fate: Fate = "now") -> Request:
        """Carry out the call for which it waits, and let it run to the next one, or to its end."""
        request = self.next
        assert isinstance(request, Request), f"{self.name} has ended"
        self._answer(world.carry_out(request, fate))
        return request

    def die(self) -> None:
        """Stop it where it waits."""
        if not isinstance(self.next, Ended):
            self._answer(Stopped())

    def _answer(self, answer: Answer | Stopped) -> None:
        self._store.answers.put(answer)
        self.next = self._store.said.get()
        if isinstance(self.next, Ended):
            self._thread.join()


def play(stage: Stage, moves: Sequence[str]) -> Played:
    """Play a schedule, written as `tests.schedules.explore` writes it.

    Args:
        stage: Its registry and actors.
        moves: The schedule.
    """
    world = stage.world.copy()
    players = {actor.name: _Player(actor, stage.scenario.page) for actor in stage.actors}
    calls: list[tuple[str, Request]] = []
    died: set[str] = set()
    try:
        _make_ready(players, world)
        for move in moves:
            verb, _, what = move.partition(":")
            name, _, fate = verb.partition("!")
            if verb == "land":
                world.deliver(what)
            elif verb == "kill":
                players[what].die()
                died.add(what)
            else:
                calls.append((name, players[name].go_on(world, fate or "now")))
    finally:
        ends = [player.next for player in players.values()]
        for player in players.values():
            player.die()
    ended = [None if name in died else end for name, end in zip(players, ends, strict=True)]
    return Played(world, calls, ended)


def _make_ready(players: dict[str, _Player], world: World) -> None:
    for player in players.values():
        while player.go_on(world).method != "ready":
            pass
