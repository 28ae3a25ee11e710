"""The messages of one save or load: what every rank says to rank 0, and rank 0 to all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from holdfast.backends import Buffer
from holdfast.registry.collective.group import Group
from holdfast.registry.collective.wire import broken, describe, join, lost, rebuild, split, unlinked

#: Messages are kept for this many later calls, so that a late rank learns how its call ended.
_KEPT_CALLS = 8
#: After the connections broke, the others are heard of within this time, or they are dead. The
#: others wait for rank 0 that much longer, so that it can tell them who is.
_GRACE_S = 10.0

_made: WeakKeyDictionary[Group, count[int]] = WeakKeyDictionary()

#: The header and the columns of a message.
Message = tuple[dict[str, Any], list[memoryview]]


class Calls:
    """The calls that the ranks of a group make together, one after another.

    Every rank makes the same calls in the same order, so a number names one.

    Args:
        group: The ranks.

    Attributes:
        group: The ranks.
        links: The name of the connections; they are made again after a call that failed.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # Every rank makes those of a group in the same order, so the number is the same on all.
        name = self._name = str(next(_made.setdefault(group, count())))
        self._calls = 0
        self._sent: deque[list[str]] = deque()
        self.links = f"{name}/0"

    def begin(self) -> Talk:
        """Begin the next call."""
        self._calls += 1
        sent: list[str] = []
        self._sent.append(sent)
        if len(self._sent) > _KEPT_CALLS:
            for name in self._sent.popleft():
                self.group.forget(name)
        return Talk(self.group, f"{self._name}/{self._calls}", sent)

    @contextmanager
    def once(self) -> Iterator[Talk]:
        """Make the next call with connections of its own; if it fails here, the others hear it."""
        talk = self.begin()
        try:
            yield talk
        except BaseException as error:
            try:
                talk.fail(error)
            finally:
                self.break_links()
            raise
        self.break_links()

    def break_links(self) -> None:
        """End the connections; the next exchange makes new ones, on every rank."""
        self.group.break_links(self.links)
        self.links = f"{self._name}/{self._calls}"


class Talk:
    """One call, as one rank takes part in it.

    Attributes:
        name: The name of the call.
        is_broken: Whether the connections broke, so that a silent rank is probably dead.
    """

    def __init__(self, group: Group, name: str, sent: list[str]) -> None:
        self._group = group
        self._sent = sent
        self._parts: list[str] = []
        self._orders = self._reports = 0
        self.name = name
        self.is_broken = False

    @property
    def _grace_s(self) -> float:
        return min(self._group.deadline_s, _GRACE_S)

    def _send(self, to: list[int], name: str, data: bytes) -> None:
        self._sent.append(name)
        self._group.send(to, name, data)

    # Of rank 0

    def order(self, header: dict[str, Any], *columns: Buffer) -> None:
        """Tell all ranks what comes next."""
        self._orders += 1
        others = list(range(1, self._group.size))
        self._send(others, f"{self.name}/order/{self._orders}", join(header, *columns))

    def order_one(self, rank: int, header: dict[str, Any], *columns: Buffer) -> None:
        """Tell a rank its own part of the last order."""
        name = f"{self.name}/order/{self._orders}/{rank}"
        self._parts.append(name)
        self._group.send([rank], name, join(header, *columns))

    def gather(self, own: bytes, doing: str) -> list[Message]:
        """Return what each rank reports, in their order.

        Raises:
            RankFailed: A rank was not heard of in time.
            RegistryError: A rank has failed; it is the error of that rank.
        """
        self._reports += 1
        group, others = self._group, range(1, self._group.size)
        limit_s = self._grace_s if self.is_broken else group.deadline_s
        found = group.receive(f"{self.name}/report/{self._reports}", others, limit_s)
        made = {rank: split(data) for rank, data in found.items()}
        made[0] = split(own)
        failures = _failures(made)
        _raise_reason(failures)
        missing = [rank for rank in others if rank not in made]
        if missing:
            raise lost(missing, group.deadline_s, doing)
        if failures:
            # A rank that reported, and then gave up waiting for another one, has told why.
            later = group.receive(f"{self.name}/report/{self._reports + 1}", others, 0)
            _raise_reason(_failures({rank: split(data) for rank, data in later.items()}))
            raise unlinked([one["rank"] for one in failures], failures[0]["what"])
        for name in self._parts:  # they are long, and every rank has read its own
            group.forget(name)
        self._parts.clear()
        return [made[rank] for rank in range(group.size)]

    def say_why(self, error: BaseException, doing: str) -> NoReturn:
        """Raise why the connections of rank 0 broke, once the others were heard.

        Raises:
            RankFailed: A rank is dead or late, or the connections broke and all ranks are there.
            RegistryError: A rank has failed; it is the error of that rank.
        """
        self.is_broken = True
        self.gather(broken(error, 0), doing)
        raise AssertionError("a report that tells of broken connections is raised")

    # Of the others

    def hear(self, doing: str) -> Message:
        """Return the next order of rank 0.

        Raises:
            RankFailed: Rank 0 was not heard of in time.
        """
        self._orders += 1
        return self._from_first(f"{self.name}/order/{self._orders}", doing)

    def hear_own(self, doing: str) -> Message:
        """Return this rank's own part of the last order.

        Raises:
            RankFailed: Rank 0 was not heard of in time.
        """
        return self._from_first(f"{self.name}/order/{self._orders}/{self._group.rank}", doing)

    def _from_first(self, name: str, doing: str) -> Message:
        found = self._group.receive(name, [0], self._group.deadline_s + self._grace_s)
        if not found:
            raise lost([0], self._group.deadline_s, doing)
        return split(found[0])

    def report(self, data: bytes) -> None:
        """Report to rank 0."""
        self._reports += 1
        self._send([0], f"{self.name}/report/{self._reports}", data)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed: rank 0 tells all ranks, others rank 0."""
        failure = describe(error, self._group.rank)
        if self._group.rank == 0:
            self.order({"kind": "outcome", "failure": failure})
        else:
            self.report(join({"failure": failure}))


def _failures(reports: Mapping[int, Message]) -> list[dict[str, Any]]:
    found = (header.get("failure") for _, (header, _) in sorted(reports.items()))
    return [one for one in found if one]


def _raise_reason(failures: Sequence[dict[str, Any]]) -> None:
    """Raise the first error that is more than that connections broke."""
    for failure in failures:
        if not failure.get("is_broken"):
            raise rebuild(failure)
