"""The processes of one job, seen from one of them: messages with deadlines, and bulk bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.backends import Buffer
from holdfast.registry.values import seconds

#: Seconds after which waiting for another rank is an error.
DEADLINE_S = 600.0


class LinksBroken(Exception):
    """An exchange failed: a rank is dead or late, or has ended its connections."""


class Group(Protocol):
    """The ranks of a job. Any thread may call a method, one at a time.

    `examples/mpi/job.py` implements a group for mpi4py.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        deadline_s: Seconds after which waiting for another rank is an error.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which waiting for another rank is an error."""

    def send(self, to: Sequence[int], name: str, data: bytes) -> None:
        """Send a message to some ranks, without waiting; every name is used once by a rank."""

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return the messages of a name by sender, without those that came too late."""

    def forget(self, name: str) -> None:
        """Drop a message of this rank that nobody needs any more."""

    def exchange(
        self, links: str, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Send bytes to ranks and return the bytes that they sent to this rank; all ranks call it.

        Args:
            links: The name of the connections; they are made at its first use.
            outgoing: Bytes by receiving rank.
            incoming: Number of bytes by sending rank.

        Raises:
            LinksBroken: A rank is dead or late, or has broken the links.
        """

    def break_links(self, links: str) -> None:
        """End connections, so that no rank waits in an exchange; their name is not used again."""

    def close(self) -> None:
        """End the connections and release what the group holds."""


@dataclass
class _Board:
    """Messages and counters that the threads of a `ThreadGroup` share."""

    #: Guards everything below.
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: Messages by name and sender.
    messages: dict[tuple[str, int], bytes] = field(default_factory=dict)
    #: Bytes of exchanges by links, turn, sender and receiver.
    mail: dict[tuple[str, int, int, int], bytes] = field(default_factory=dict)
    #: Ranks that have reached a turn, by links and turn.
    turns: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)  # links that were broken


class ThreadGroup:
    """Ranks that are threads of one process, for simulations and tests.

    Attributes:
        rank: The number of this thread.
        size: The number of threads.
        deadline_s: Seconds after which waiting for another rank is an error.
        moved_bytes: The bytes that this rank has sent in exchanges.
    """

    def __init__(self, rank: int, size: int, board: _Board, deadline_s: float) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self._board = board
        self._turns: dict[str, int] = {}
        self.moved_bytes = 0

    @classmethod
    def make(cls, size: int, deadline_s: float = DEADLINE_S) -> list[ThreadGroup]:
        """Return the sides of a new group, one for each thread."""
        board = _Board()
        limit_s = seconds(deadline_s, "deadline_s", what="not a deadline")
        return [cls(rank, size, board, limit_s) for rank in range(size)]

    def send(self, to: Sequence[int], name: str, data: bytes) -> None:  # noqa: ARG002
        """Send a message."""
        with self._board.changed:
            self._board.messages[name, self.rank] = data
            self._board.changed.notify_all()

    def receive(self, name: str, senders: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Return the messages of a name that came in time."""
        board = self._board
        with board.changed:
            board.changed.wait_for(
                lambda: all((name, one) in board.messages for one in senders), timeout_s
            )
            found = {one: board.messages.get((name, one)) for one in senders}
        return {one: data for one, data in found.items() if data is not None}

    def forget(self, name: str) -> None:
        """Drop a message."""
        with self._board.changed:
            self._board.messages.pop((name, self.rank), None)

    def exchange(
        self, links: str, outgoing: Mapping[int, Buffer], incoming: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """Exchange bytes with the other threads."""
        board = self._board
        turn = self._turns[links] = self._turns.get(links, 0) + 1
        with board.changed:
            was_broken = links in board.broken
            for rank, data in outgoing.items():
                board.mail[links, turn, self.rank, rank] = bytes(data)
                self.moved_bytes += len(data)
            here = board.turns.setdefault((links, turn), set())
            here.add(self.rank)
            board.changed.notify_all()
            board.changed.wait_for(
                lambda: len(here) == self.size or links in board.broken, self.deadline_s
            )
            # Once all are here, what they sent arrives, also if one of them ends right after.
            if was_broken or len(here) < self.size:
                board.broken.add(links)
                board.changed.notify_all()
                raise LinksBroken(links)
            return {
                rank: memoryview(board.mail.pop((links, turn, rank, self.rank)))
                for rank in incoming
            }

    def break_links(self, links: str) -> None:
        """Stop all threads that wait in an exchange."""
        with self._board.changed:
            self._board.broken.add(links)
            self._board.changed.notify_all()

    def close(self) -> None:
        """Do nothing: the threads end by themselves."""
