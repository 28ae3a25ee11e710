"""Ranks that are threads, which can die or be late at any of their calls of the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.backends import Buffer
from holdfast.distributed import Group, ThreadGroup
from tests.support.faults import Died


class Troubled:
    """A group whose rank has trouble at one of its calls, and tells nobody.

    Args:
        group: The group.
        trouble: What happens then.
        at: The number of the call, from 1; 0 for never.
    """

    def __init__(self, group: Group, trouble: Callable[[], None], at: int = 0) -> None:
        self._group, self._trouble, self._at = group, trouble, at
        self.rank, self.size, self.deadline_s = group.rank, group.size, group.deadline_s
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self._at:
            self._trouble()

    def send(self, to: Sequence[int], name: str, data: bytes) -> None:
        self._call()
        self._group.send(to, name, data)

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        self._call()
        return self._group.receive(name, senders, timeout_s)

    def forget(self, name: str) -> None:
        self._group.forget(name)

    def exchange(
        self, links: str, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        self._call()
        return self._group.exchange(links, outgoing, incoming)

    def break_links(self, links: str) -> None:
        self._group.break_links(links)

    def close(self) -> None:
        self._group.close()


class Mortal(Troubled):
    """A rank that can fall silent; the others notice at once, instead of at a deadline.

    Args:
        group: The group.
        silent: The ranks that are silent, shared by all ranks.
        links: The names of connections that any rank has used, shared too.
        dies_at: The number of the call at which it dies; 0 for never.
    """

    def __init__(
        self, group: ThreadGroup, silent: set[int], links: set[str], dies_at: int = 0
    ) -> None:
        super().__init__(group, self._die, dies_at)
        self._board = group._board
        self._silent, self._links = silent, links
        self._is_dead = False

    def fall_silent(self) -> None:
        """Let the others notice that nothing comes from this rank any more."""
        with self._board.changed:
            self._silent.add(self.rank)
            self._board.broken |= self._links
            self._board.changed.notify_all()

    def speak(self) -> None:
        """Be a rank like the others again."""
        with self._board.changed:
            self._silent.discard(self.rank)

    def _die(self) -> None:
        self._is_dead = True
        self.fall_silent()
        raise Died

    def _call(self) -> None:
        if self._is_dead:
            raise Died
        super()._call()

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        self._call()
        board = self._board
        with board.changed:
            board.changed.wait_for(
                lambda: all((name, s) in board.messages or s in self._silent for s in senders),
                timeout_s,
            )
            return {s: board.messages[name, s] for s in senders if (name, s) in board.messages}

    def exchange(
        self, links: str, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        with self._board.changed:
            self._links.add(links)
            if self._silent:
                self._board.broken.add(links)
        return super().exchange(links, outgoing, incoming)


def mortals(size: int, deadline_s: float, victim: int = -1, dies_at: int = 0) -> list[Mortal]:
    """Return the ranks of a new job, of which one dies at one of its calls."""
    silent, links = set[int](), set[str]()
    return [
        Mortal(one, silent, links, dies_at if one.rank == victim else 0)
        for one in ThreadGroup.make(size, deadline_s)
    ]


def together(groups: Sequence[Any], act: Callable[[Any], Any]) -> list[Any]:
    """Run `act` on every rank; return what each returned, or the error that it raised."""
    found: list[Any] = [None] * len(groups)

    def run(group: Any) -> None:
        try:
            found[group.rank] = act(group)
        except BaseException as error:
            found[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a rank hangs"
    return found


def group_of(size: int, deadline_s: float) -> list[ThreadGroup]:
    """Return the ranks of a new job."""
    return ThreadGroup.make(size, deadline_s)
