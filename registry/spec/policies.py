"""Policies: which checkpoints a phase or a tier keeps; `registry/history/retention.py` plans."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.records import Name, NamedFields, Record

_Count = Annotated[int, Field(ge=1, le=2**53)]


class Retention(NamedFields):
    """What is kept; a checkpoint stays if any of these keeps it.

    The newest checkpoint of a phase, the best by each monitor, whatever a pin names and whatever a
    follower holds stay in any case.

    Attributes:
        last: The newest so many.
        best: The best so many by the first monitor.
        every: Those whose step is a multiple of this.
        for_days: Those younger than this, by the clock of whoever saved them.
        all: Everything.
        counts_protected: Whether `last` counts what is protected anyway: a folder of at most so
            many files (seeds: FIFO), instead of so many beside the protected ones.
        wait: How many newer checkpoints one without its monitored metrics waits for them before it
            may go.
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
        except ValidationError as error:
            detail = error.errors(include_url=False, include_context=False)[0]
            raise InvalidInput(
                "not a retention policy",
                where=".".join(map(str, detail["loc"])) or None,
                expected="last, best, every or for_days: whole numbers from 1; or all=True",
                found=detail["msg"].removeprefix("Value error, "),
            ) from error

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        chosen = [self.last, self.best, self.every, self.for_days]
        if self.all and any(chosen):
            raise ValueError("contradictory: `all` keeps everything, beside it nothing counts")
        if not self.all and not any(chosen):
            raise ValueError("empty: it would keep nothing; say all=True to keep everything")
        if self.counts_protected and self.last is None:
            raise ValueError("contradictory: counts_protected is about `last`, which is absent")
        return self


class Tier(Record):
    """A retention class within a phase.

    Attributes:
        name: For example `milestone`.
        retention: What of it is kept.
        every: A checkpoint whose counter is a multiple of this belongs to it.
        counter: Name of that counter: the phase's own, or an integer of the state or of `meta`.
        improves: Monitors; a checkpoint that is the best yet by one of them belongs to it.
    """

    name: Name
    retention: Retention
    every: _Count | None = None
    counter: str | None = None
    improves: tuple[str, ...] = ()
