"""Policies: which checkpoint is best, and which checkpoints a phase or a tier keeps.

A monitor is a metric, or a sum of metrics such as `mu - 3*sigma`. `history/retention.py` applies
the policies.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import Field, InvalidRecord, Name, Record

_Count = Annotated[int, Field(ge=1, le=2**53)]
_Component = Annotated[str, Field(min_length=1)]
_OPERATOR = r"\s+([+-])\s+"
_TERM = r"(?:(?P<factor>\d+(?:\.\d+)?)\s*\*\s*)?(?P<metric>\S+)"


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
        then: Components that the other checkpoints keep. They are thinned to these, not evicted.
    """

    last: _Count | None = None
    best: _Count | None = None
    every: _Count | None = None
    for_days: _Count | None = None
    all: bool = False
    counts_protected: bool = False
    wait: Annotated[int, Field(ge=0)] = 0
    then: tuple[_Component, ...] | None = None

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
        then: Iterable[str] | None = None,
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
            "then": then if then is None or isinstance(then, str) else tuple(then),
        }
        try:
            super().__init__(**given)
        except InvalidRecord as error:
            wrong = error.problems[0]
            raise InvalidInput(
                "not a retention policy",
                where=".".join(map(str, wrong.path)) or None,
                expected="last, best, every or for_days: whole numbers from 1; then: a list of "
                "components; or all=True",
                found=f"{quoted(wrong.value)}: {wrong.text}",
            ) from error

    def _agree_(self) -> None:
        chosen = [self.last, self.best, self.every, self.for_days, self.then]
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


class Monitor(Record):
    """The metric that decides which checkpoint is best.

    Attributes:
        metric: Name of a metric of `save` or `report`, or a sum of several with factors:
            `mu - 3*sigma`. With spaces around them, `+` and `-` are operators; otherwise they are
            part of a name.
        mode: Whether the lowest (`min`) or the highest (`max`) value is best.
        name: The NAME in `RUN/best/NAME`; the metric without it.
    """

    metric: str
    mode: Literal["min", "max"]
    name: str | None = None

    def __init__(
        self, *, metric: str, mode: Literal["min", "max"], name: str | None = None
    ) -> None:
        # Users make monitors by hand; their mistakes get an error of this project's tree.
        given: dict[str, Any] = {"metric": metric, "mode": mode, "name": name}
        try:
            super().__init__(**given)
        except InvalidRecord as error:
            raise InvalidInput(
                "not a monitor",
                expected="metric: a name or a sum like 'mu - 3*sigma', mode: 'min' or 'max'",
                found=given,
            ) from error

    @property
    def label(self) -> str:
        """Its name in refs and messages."""
        return self.name or self.metric

    @property
    def needs(self) -> tuple[str, ...]:
        """The metrics that a checkpoint must have to be rated."""
        return tuple(metric for _, metric in _terms(self.metric))

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the monitored value; `None` if a metric is missing or the value is NaN."""
        found = self.measured(metrics)
        return None if found is None or math.isnan(found) else found

    def measured(self, metrics: Mapping[str, float]) -> float | None:
        """Return the monitored value, NaN too; `None` if a metric is missing."""
        if self.metric in metrics:
            return metrics[self.metric]
        terms = _terms(self.metric)
        if any(metric not in metrics for _, metric in terms):
            return None
        return sum(factor * metrics[metric] for factor, metric in terms)

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Return a number that is lower for better values; NaN if there is no value."""
        found = self.value(metrics)
        if found is None:
            return math.nan
        return found if self.mode == "min" else -found


@lru_cache(maxsize=256)
def _terms(expression: str) -> tuple[tuple[float, str], ...]:
    """Split a sum into factors and metrics; any other text is the name of one metric."""
    first, *rest = re.split(_OPERATOR, expression)
    terms = []
    for sign, text in zip(["+", *rest[0::2]], [first, *rest[1::2]], strict=True):
        found = re.fullmatch(_TERM, text.strip())
        if found is None:
            return ((1.0, expression),)
        factor = float(found["factor"] or 1)
        terms.append((-factor if sign == "-" else factor, found["metric"]))
    return tuple(terms)
