"""Policies: which checkpoints a phase or a tier keeps; `history/retention.py` applies them."""

from __future__ import annotations

from typing import Annotated, Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import Field, InvalidRecord, Name, Record

_Count = Annotated[int, Field(ge=1, le=2**53)]


class Retention(Record):
    """Which checkpoints are kept: a checkpoint stays if any of these rules keeps it.

    Some are always kept: the newest of a phase, the best by each monitor, and those that a pin
    names or a follower holds.

    Attributes:
        last: Keep this many of the newest.
        best: Keep this many of the best by the first monitor.
        every: Keep each checkpoint whose step is a multiple of this number.
        for_days: Keep checkpoints younger than this many days, by the clock of their writer.
        all: Keep everything.
        counts_protected: Whether the checkpoints that are always kept count towards `last`: at most
            `last` files in all (seeds: FIFO), instead of `last` besides the protected ones.
        wait: A checkpoint without its monitored metrics is kept until it has this many newer ones.
    """

    last: _Count | None = None
    best: _Count | None = None
    every: _Count | None = None
    for_days: _Count | None = None
    all: bool = False
    counts_protected: bool = False
    wait: Annotated[int, Field(ge=0)] = 0

    def __init__(
        self,
        *,
        last: int | None = None,
        best: int | None = None,
        every: int | None = None,
        for_days: int | None = None,
        all: bool = False,  # noqa: A002 - the word of the policy
        counts_protected: bool = False,
        wait: int = 0,
    ) -> None:
        # Users make policies by hand; their mistakes get an error of this project's tree.
        given: dict[str, Any] = {
            "last": last,
            "best": best,
            "every": every,
            "for_days": for_days,
            "all": all,
            "counts_protected": counts_protected,
            "wait": wait,
        }
        try:
            super().__init__(**given)
        except InvalidRecord as error:
            wrong = error.problems[0]
            raise InvalidInput(
                "not a retention policy",
                where=".".join(map(str, wrong.path)) or None,
                expected="last, best, every or for_days: whole numbers from 1; or all=True",
                found=wrong.text,
            ) from error

    def _agree(self) -> None:
        chosen = [self.last, self.best, self.every, self.for_days]
        if self.all and any(chosen):
            raise ValueError("contradictory: `all` keeps everything, so no other rule can count")
        if not self.all and not any(chosen):
            raise ValueError("empty: it would keep nothing; use all=True to keep everything")
        if self.counts_protected and self.last is None:
            raise ValueError("contradictory: counts_protected is about `last`, which is absent")


class Tier(Record):
    """A retention class within a phase."""

    name: Name  # its name, for example `milestone`
    retention: Retention  # which of its checkpoints are kept
    every: _Count | None = None  # a checkpoint belongs to it if its counter is a multiple of this
    #: Name of that counter: the phase's own, or an integer of the state or of `meta`.
    counter: str | None = None
    #: Monitors; a checkpoint belongs to it if it is the best so far by one of them.
    improves: tuple[str, ...] = ()
