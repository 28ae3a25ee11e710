"""Monitors: a metric, or a sum of metrics such as `mu - 3*sigma`, decides what is best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import InvalidRecord, Record

_OPERATOR = re.compile(r"\s+([+-])\s+")
_TERM = re.compile(r"(?:(?P<factor>\d+(?:\.\d+)?)\s*\*\s*)?(?P<metric>\S+)")


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
    first, *rest = _OPERATOR.split(expression)
    terms = []
    for sign, text in zip(["+", *rest[0::2]], [first, *rest[1::2]], strict=True):
        found = _TERM.fullmatch(text.strip())
        if found is None:
            return ((1.0, expression),)
        factor = float(found["factor"] or 1)
        terms.append((-factor if sign == "-" else factor, found["metric"]))
    return tuple(terms)
