"""The messages of one save or load: reports of every rank to rank 0, orders of rank 0 to all."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from holdfast.backends import Buffer
from holdfast.registry import errors
from holdfast.registry.errors import IncompatibleState, RankFailed, RegistryError
from holdfast.registry.saving.collective.group import Group, LinksBroken
from holdfast.registry.values import abridged

# Messages between ranks: a line of JSON, then columns of bytes. Errors are sent as their parts.


_CLASSES: dict[str, type[RegistryError]] = {name: getattr(errors, name) for name in errors.__all__}
_PARTS = ("expected", "found", "hint")


def join(header: dict[str, Any], *columns: Buffer) -> bytes:
    """Return a message."""
    line = json.dumps([header, [len(column) for column in columns]]).encode()
    return b"".join([line, b"\n", *columns])


def split(data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the header and the columns of a message."""
    line, _, _ = data.partition(b"\n")
    header, lengths = json.loads(line)
    columns, start, view = [], len(line) + 1, memoryview(data)
    for length in lengths:
        columns.append(view[start : start + length])
        start += length
    return header, columns


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """Return an error of a rank as JSON; one that came from another rank keeps that rank."""
    earlier = {"is_earlier": getattr(error, "is_earlier", False)}  # of a save before this call
    if not isinstance(error, RegistryError):
        return {"class": "", "rank": rank, "what": f"{type(error).__name__}: {error}", **earlier}
    parts = {name: getattr(error, name) for name in ("what", "where", *_PARTS)}
    name = type(error).__name__
    known = name if _CLASSES.get(name) is type(error) else ""
    return {"class": known, "rank": getattr(error, "rank", rank), **parts, **earlier}


def rebuild(failure: dict[str, Any]) -> RegistryError:
    """Return the error of another rank: of its own class if it is ours, else `RankFailed`."""
    place = f"rank {failure['rank']}"
    where = failure.get("where")
    if failure["class"] in ("", RankFailed.__name__):
        kind: type[RegistryError] = RankFailed
    else:
        kind = _CLASSES[failure["class"]]
    if where is None or not where.startswith(place):
        where = place if where is None else f"{place}: {where}"
    made = kind(failure["what"], where=where, **{part: failure.get(part) for part in _PARTS})
    made.rank = failure["rank"]  # type: ignore[attr-defined]
    made.is_earlier = failure.get("is_earlier", False)  # type: ignore[attr-defined]
    return made


def broken_report(error: BaseException, rank: int) -> bytes:
    """Return the report of a rank that only lost its connections."""
    return join({"failure": {**describe(error, rank), "is_broken": True}})


def lost_error(ranks: Sequence[int], deadline_s: float, doing: str) -> RankFailed:
    """Return the error for ranks that were not heard of in time."""
    named = abridged([*map(str, ranks)], ", ")
    made = RankFailed(
        f"no word from rank {named}" if len(ranks) == 1 else f"no word from ranks {named}",
        where=f"rank {named}",
        found=f"dead, or later than {deadline_s:g} s, while {doing}",
        hint="Nothing was committed. Look at the log of that rank; then save again, or requeue.",
    )
    made.rank = ranks[0]
    return made


def unlinked_error(ranks: Sequence[int], found: str) -> RankFailed:
    """Return the error for ranks that answer but have lost their connections."""
    made = RankFailed(
        "the connections between the ranks broke",
        where=", ".join(f"rank {one}" for one in ranks),
        found=found,
        hint="Nothing was committed. Save again: new connections are made.",
    )
    made.rank = ranks[0]
    return made


#: Messages are kept for this many later calls, so that a late rank learns how its call ended.
_KEPT_CALLS = 8
#: After the connections broke, a rank that sends nothing for this time counts as dead. The other
#: ranks wait for rank 0 that much longer, so that it can name the dead rank. A rank that is ahead
#: of the others waits this long for them.
_GRACE_S = 10.0

#: The name of the calls that load.
LOADS = "load"

#: The header and the columns of a message.
Message = tuple[dict[str, Any], list[memoryview]]
#: The subject of a call: the step of a save, the digest of a load.
Label = int | str | None

_T = TypeVar("_T")


@dataclass
class _Said:
    """The messages of one call: their names, and whether nobody needs those of earlier calls."""

    names: list[str] = field(default_factory=list)
    is_met: bool = False


@dataclass
class _Series:
    """A rank's memory of the calls of one name; it does not keep the group alive."""

    links: str
    calls: int = 0
    breaks: int = 0
    said: deque[_Said] = field(default_factory=deque)


_series: WeakKeyDictionary[Group, dict[str, _Series]] = WeakKeyDictionary()


class Calls:
    """The calls of one name that the ranks of a group make together, one after another.

    Each rank counts its calls. A rank that has missed calls learns at once how they ended, and
    continues with the present call of the others; so does a rank that has made calls alone.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.group = group  # the ranks
        self._name = name
        self._series = _series.setdefault(group, {}).setdefault(name, _Series(f"{name}/0"))

    @property
    def made(self) -> int:
        """How many calls this rank has made."""
        return self._series.calls

    @property
    def links(self) -> str:
        """The name of the connections; a failed call is followed by new connections."""
        return self._series.links

    @links.setter
    def links(self, name: str) -> None:
        self._series.links = name

    def begin(self, label: Label = None, limit_s: float | None = None) -> Talk:
        """Begin the next call."""
        mine = self._series
        mine.calls += 1
        said = mine.said
        said.append(_Said())
        while len(said) > _KEPT_CALLS and any(one.is_met for one in islice(said, 1, None)):
            for name in said.popleft().names:
                self.group.forget(name)
        return Talk(self.group, f"{self._name}/{mine.calls}", said[-1], label, limit_s)

    def make(self, act: Callable[[Talk], _T], label: Label = None) -> _T:
        """Make the next call; if it fails here, tell the others, and choose how to go on.

        - If the others ended an earlier subject before this rank came, it has missed that call:
          make the next one, and wait `deadline_s` for them.
        - If the ranks are out of step, and this one has the highest step: make the next call, and
          wait `_GRACE_S` for those behind, which raise. If nobody comes, raise that error.
        - Otherwise raise the error: all ranks were in this call, or this one was late.
        """
        limit_s, earlier = None, None
        while True:
            talk = self.begin(label, limit_s)
            try:
                return act(talk)
            except BaseException as error:
                self.end(talk, error)
                if talk.again_s is None:
                    if earlier is not None and not talk.said.is_met:
                        raise earlier from error
                    raise
                limit_s, earlier = talk.again_s, error if talk.is_out_of_step else None

    def make_apart(self, act: Callable[[Talk], _T]) -> _T:
        """Make the next call with connections of its own."""

        def act_apart(talk: Talk) -> _T:
            self.links = talk.name
            return act(talk)

        made = self.make(act_apart)
        self.break_links()
        return made

    def linked(self, talk: Talk, doing: str, act: Callable[[], None]) -> None:
        """Exchange bytes; if the connections break, find out why, and raise that on every rank."""
        group = self.group
        try:
            act()
        except LinksBroken as error:
            group.break_links(self.links)
            if not group.rank:
                talk.say_why(error, doing)
            talk.report(broken_report(error, group.rank))
            talk.listen("leading the load")
            raise unlinked_error([group.rank], str(error)) from error

    def end(self, talk: Talk, error: BaseException) -> None:
        """Tell the other ranks that this one has failed."""
        try:
            talk.tell_failure(error)
        finally:
            self.break_links()

    def break_links(self) -> None:
        """End the connections; the next exchange makes new ones, on every rank."""
        mine = self._series
        self.group.break_links(mine.links)
        mine.breaks += 1
        mine.links = f"{self._name}/{mine.calls}-{mine.breaks}"


class Talk:
    """One rank's side of a call."""

    def __init__(
        self, group: Group, name: str, said: _Said, label: Label, limit_s: float | None
    ) -> None:
        self._group = group
        self._own_orders: list[str] = []
        self._orders = self._reports = 0
        self._limit_s = group.deadline_s if limit_s is None else limit_s
        self.name, self.said = name, said  # of the call, and this rank's messages in it
        self.is_about(label)
        self.is_broken = False  # whether the connections broke: a silent rank is probably dead
        self.is_out_of_step = False  # whether it failed since the ranks are at different steps
        #: Seconds to wait for the others in the next call, if they ended an earlier call than this
        #: rank's; `None` if all are in the same call.
        self.again_s: float | None = None

    def is_about(self, label: Label) -> None:
        """Note the subject of the call; ranks that do not join in time have missed the call."""
        self.label = label
        # Told with a failure: a rank whose subject is later goes on with its next call.
        self._ended: Label = label

    @property
    def _grace_s(self) -> float:
        return min(self._group.deadline_s, _GRACE_S)

    def _send(self, to: list[int], name: str, data: bytes) -> None:
        self.said.names.append(name)
        self._group.send(to, name, data)

    def _others_ended(self, past: Label) -> None:
        """Note that the others have ended a call; this rank goes on if its own subject is later."""
        mine = self.label
        is_later = mine > past if isinstance(mine, int) and isinstance(past, int) else mine != past
        if past is not None and mine is not None and is_later:
            self.again_s = self._grace_s if self.is_out_of_step else self._group.deadline_s

    # Of rank 0

    def order(self, header: dict[str, Any], *columns: Buffer) -> None:
        """Send the next order to all ranks."""
        self._orders += 1
        others = list(range(1, self._group.size))
        self._send(others, f"{self.name}/order/{self._orders}", join(header, *columns))

    def order_one(self, rank: int, header: dict[str, Any], *columns: Buffer) -> None:
        """Send a rank its own part of the last order."""
        name = f"{self.name}/order/{self._orders}/{rank}"
        self._own_orders.append(name)
        self._group.send([rank], name, join(header, *columns))

    def gather(self, own: bytes, doing: str) -> list[Message]:
        """Return the reports of all ranks, in the order of the ranks."""
        self._reports += 1
        group, others = self._group, range(1, self._group.size)
        limit_s = self._grace_s if self.is_broken else self._limit_s
        self._limit_s = group.deadline_s
        found = group.receive(f"{self.name}/report/{self._reports}", others, limit_s)
        made = {rank: split(data) for rank, data in found.items()}
        made[0] = split(own)
        missing = [rank for rank in others if rank not in made]
        if self._reports == 1 and not missing:
            self.said.is_met, self._ended = True, None
            self._check_steps(made)
        failures = _failures(made)
        _raise_reason(failures)
        if missing:
            raise lost_error(missing, group.deadline_s, doing)
        if failures:
            # A rank that gave up waiting after its report has sent the reason.
            later = group.receive(f"{self.name}/report/{self._reports + 1}", others, 0)
            _raise_reason(_failures({rank: split(data) for rank, data in later.items()}))
            raise unlinked_error([one["rank"] for one in failures], failures[0]["what"])
        for name in self._own_orders:  # long messages, which their ranks have read
            group.forget(name)
        self._own_orders.clear()
        return [made[rank] for rank in range(group.size)]

    def _check_steps(self, reports: Mapping[int, Message]) -> None:
        """Refuse reports of different steps: some ranks have missed a save, or are late."""
        found = {rank: header.get("step") for rank, (header, _) in sorted(reports.items())}
        steps = {rank: step for rank, step in found.items() if step is not None}
        highest = max(steps.values(), default=0)
        behind = [rank for rank, step in steps.items() if step < highest]
        if behind:
            self.go_on(highest - 1)
            ahead = next(rank for rank, step in steps.items() if step == highest)
            raise IncompatibleState(
                "the ranks are out of step: they save different steps",
                where=f"rank {behind[0]}",
                expected=f"step {highest}, as on rank {ahead}",
                found=f"step {steps[behind[0]]}",
                hint=f"Nothing was committed. Rank {ahead} may have missed a save by an error that "
                "the program caught: look at its log; the next save works again. Or the steps are "
                "wrong.",
            )

    def go_on(self, past: Label) -> None:
        """Continue with the next call on every rank whose call is later than `past`, here too."""
        self._ended, self.is_out_of_step = past, True
        self._others_ended(past)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has given up this call since its last report."""
        later = self._group.receive(f"{self.name}/report/{self._reports + 1}", [rank], 0)
        return rank in later

    def say_why(self, error: BaseException, doing: str) -> NoReturn:
        """Raise the reason for rank 0's broken connections, once the others have reported."""
        self.is_broken = True
        self.gather(broken_report(error, 0), doing)
        raise AssertionError("a report that tells of broken connections is raised")

    # Of the others

    def hear(self, doing: str) -> Message:
        """Return the next order of rank 0."""
        self._orders += 1
        return self._from_first(f"{self.name}/order/{self._orders}", doing)

    def hear_own(self, doing: str) -> Message:
        """Return this rank's own part of the last order."""
        return self._from_first(f"{self.name}/order/{self._orders}/{self._group.rank}", doing)

    def _from_first(self, name: str, doing: str) -> Message:
        found = self._group.receive(name, [0], self._limit_s + self._grace_s)
        if not found:
            raise lost_error([0], self._limit_s, doing)
        self.said.is_met, self._limit_s = True, self._group.deadline_s
        return split(found[0])

    def hear_failure(self, outcome: Mapping[str, Any]) -> RegistryError:
        """Return the error of a failed call from rank 0's message, and note whether to go on."""
        self.is_out_of_step = outcome.get("is_out_of_step", False)
        self._others_ended(outcome.get("ended"))
        return rebuild(outcome["failure"])

    def listen(self, doing: str) -> Message:
        """Return the next order of rank 0; raise its error if the call has failed."""
        found = self.hear(doing)
        if found[0]["failure"] is not None:
            raise self.hear_failure(found[0])
        return found

    def report(self, data: bytes) -> None:
        """Report to rank 0."""
        self._reports += 1
        self._send([0], f"{self.name}/report/{self._reports}", data)

    def tell_failure(self, error: BaseException) -> None:
        """Tell the others that this rank has failed: rank 0 tells all ranks, others rank 0."""
        failure = describe(error, self._group.rank)
        if self._group.rank == 0:
            ended = {"ended": self._ended, "is_out_of_step": self.is_out_of_step}
            self.order({"kind": "outcome", "failure": failure, **ended})
        else:
            self.report(join({"failure": failure, "step": self.label}))


def _failures(reports: Mapping[int, Message]) -> list[dict[str, Any]]:
    found = (header.get("failure") for _, (header, _) in sorted(reports.items()))
    return [one for one in found if one]


def _raise_reason(failures: Sequence[dict[str, Any]]) -> None:
    """Raise the first error that is not a broken connection."""
    for failure in failures:
        if not failure.get("is_broken"):
            raise rebuild(failure)
