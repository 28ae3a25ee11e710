"""Actors that are the ranks of one job: their group, and how their saves may end.

A message of a rank is a call like one to the store, so schedules go through every point at which a
rank can die, or be late, or others can do something in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.backends import Buffer
from holdfast.backends.base import Body
from holdfast.distributed import Group
from holdfast.registry.errors import IncompatibleState, RankFailed
from holdfast.registry.saving.collective.group import LinksBroken
from tests.registry.saving.collective.ranks import group_of, together
from tests.schedules.actors import Ended, Program, Session
from tests.schedules.soundness import Soundness, Violation, opened
from tests.schedules.store import ABSENT, Asking, Request, World

#: Of the ranks of schedules nobody measures time: only which deadline is the first one counts.
_DEADLINE_S = 600.0
#: For ranks that are threads: longer than one needs on a busy machine.
_RETRY_S = 30.0


class AskingGroup:
    """The group of one rank: every call is a step of a schedule."""

    def __init__(self, backend: Asking, rank: int, size: int) -> None:
        self.rank, self.size, self.deadline_s = rank, size, _DEADLINE_S
        self._ask = backend.ask
        self._turns: dict[str, int] = {}

    def send(self, to: Sequence[int], name: str, data: bytes) -> None:
        self._ask(Request("send", name, data, rank=self.rank))

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        found = self._ask(
            Request("receive", name, rank=self.rank, others=tuple(senders), timeout_s=timeout_s)
        )
        assert isinstance(found, tuple)
        return dict(found)

    def forget(self, name: str) -> None:
        self._ask(Request("forget", name, rank=self.rank))

    def exchange(
        self, links: str, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        turn = self._turns[links] = self._turns.get(links, 0) + 1
        name = f"{links}#{turn}"
        pieces = tuple((rank, bytes(data)) for rank, data in outgoing.items())
        self._ask(Request("offer", name, rank=self.rank, pieces=pieces))
        others = tuple(one for one in range(self.size) if one != self.rank)
        found = self._ask(
            Request("collect", name, rank=self.rank, others=others, timeout_s=_DEADLINE_S)
        )
        if found is ABSENT:
            raise LinksBroken(name)
        assert isinstance(found, tuple)
        return {rank: memoryview(data) for rank, data in found if rank in incoming}

    def break_links(self, links: str) -> None:
        self._ask(Request("break", links, rank=self.rank))

    def close(self) -> None:
        """Do nothing: there are no connections."""


#: Returns what a rank has of a state, by its number, the number of ranks, and the step.
State = Callable[[int, int, int], Any]


@dataclass(frozen=True)
class Job:
    """The ranks of a schedule, which save a state together.

    Attributes:
        ranks: The actors, in the order of their ranks.
        run: The run that they save in.
        steps: The step of their checkpoint, and those of further attempts after a failure.
        part: What each rank has.
        has_deadlines: Whether a rank may wait for another in vain, which is late then.
        creates: Whether they create the run.
        misses: The rank that makes only the last attempt; -1 for none.
    """

    ranks: tuple[str, ...]
    run: str
    steps: tuple[int, ...]
    part: State
    has_deadlines: bool = False
    creates: bool = False
    misses: int = -1

    def programs(self) -> dict[str, Program]:
        """Return what each rank does."""
        return {name: self._program(rank) for rank, name in enumerate(self.ranks)}

    def _program(self, rank: int) -> Program:
        def save(session: Session) -> tuple[int, str]:
            session.ready()
            group = AskingGroup(session.backend, rank, len(self.ranks))
            return self._save(session.open(), group)

        return save

    def _save(self, registry: Any, group: Group) -> tuple[int, str]:
        run = registry.run(self.run, group=group, create=self.creates, seed=1)
        *attempts, last = self.steps
        for step in attempts if group.rank != self.misses else ():
            with suppress(RankFailed, IncompatibleState):
                return self._save_at(run, group, step)
        return self._save_at(run, group, last)

    def _save_at(self, run: Any, group: Group, step: int) -> tuple[int, str]:
        made = run.save(self.part(group.rank, group.size, step), step=step)
        return step, str(made.digest)

    def check(self, world: World, ends: Mapping[str, Ended | None], soundness: Soundness) -> None:
        """Check that the ranks that are left have saved one state, or know why they have not.

        Args:
            world: The store in the end.
            ends: How each actor ended; `None` where it died.
            soundness: Reads logs.

        Raises:
            Violation: They have not, or do not.
        """
        left = [one for name in self.ranks if (one := ends[name]) is not None]
        dead = {rank for rank, name in enumerate(self.ranks) if ends[name] is None}
        kept = {one.step for one in soundness.state(world, self.run).checkpoints}
        saved = {one.value for one in left if one.error is None}
        if not {step for step, _ in saved} <= kept:
            raise Violation(f"the ranks were told {saved}, and visible is {kept}")
        if len({step for step, _ in saved}) != len(saved):
            raise Violation(f"the ranks were told {saved}")
        for error in (one.error for one in left if one.error is not None):
            if not dead | world.overdue or not isinstance(error, RankFailed):
                raise Violation(f"a rank failed by itself: {error!r}") from error
            named = re.findall(r"\d+", error.where or "")
            if dead.isdisjoint(map(int, named)) and world.overdue.isdisjoint(map(int, named)):
                raise Violation(f"the error names none of the ranks in trouble: {error}")
            if "unknown" not in str(error) and self.steps[-1] in kept:
                raise Violation(f"a rank was told that nothing was committed: {error}")

    def retry(self, world: World, *, swept: bool) -> None:
        """Save again, as new processes would; nothing that is there already is put again.

        Args:
            world: The store in the end.
            swept: Whether objects may have been condemned, which are put again.

        Raises:
            Violation: The retry failed, or put what was there.
        """
        backend = world.backend()
        before, put, sent = _packs(world), backend.put_if_absent, list[str]()

        def put_and_note(key: str, body: Body) -> bool:
            sent.append(key)
            return put(key, body)

        backend.put_if_absent = put_and_note  # type: ignore[method-assign]

        def save(group: Group) -> tuple[int, str]:
            with opened(backend) as registry:
                return self._save_at(registry.run(self.run, group=group), group, self.steps[-1])

        found = together(group_of(len(self.ranks), _RETRY_S), save)
        if any(not isinstance(one, tuple) for one in found) or len(set(found)) > 1:
            raise Violation(f"the retry failed: {found}")
        again = [key for key in sent if key.partition(".")[0] in before]
        if again and not swept:
            raise Violation(f"the retry has sent packs that were there: {again}")


def _packs(world: World) -> set[str]:
    """Return the keys of all packs, without their generation."""
    return {key.partition(".")[0] for key in world.objects if key.startswith("packs/")}
