"""When a training saves: at a cadence of steps or seconds, and when a metric is the best so far."""

from __future__ import annotations

import time
from collections.abc import Mapping

from holdfast.registry.spec.monitors import Monitor


class Cadence:
    """The cadence of one training.

    Args:
        every_steps: Steps from save to save.
        every_s: Seconds from the beginning of a save to that of the next.
        after: The step that training resumed from.
    """

    def __init__(self, every_steps: int | None, every_s: float | None, after: int | None) -> None:
        self.every_steps, self.every_s = every_steps, every_s
        self._before = after
        self._began_s = time.monotonic()

    def reaches(self, step: int) -> bool:
        """Return whether a multiple of `every_steps` was reached since the step before."""
        before, self._before = self._before, step
        if self.every_steps is None or step == 0:
            return False
        if before is None or before >= step:
            return step % self.every_steps == 0
        return step // self.every_steps > before // self.every_steps

    def is_time(self) -> bool:
        """Return whether the last save, or the beginning, is `every_s` seconds ago."""
        return self.every_s is not None and time.monotonic() - self._began_s >= self.every_s

    def saves(self) -> None:
        """Note that a save begins."""
        self._began_s = time.monotonic()


class BestSoFar:
    """Whether a metric is better than ever before.

    Args:
        monitor: The metric.
        metrics: The metrics of the best checkpoint of the run.
    """

    def __init__(self, monitor: Monitor, metrics: Mapping[str, float]) -> None:
        self._monitor = monitor
        self._rank = monitor.rank(metrics)

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the value is the best one so far, and remember it."""
        rank = self._monitor.rank(metrics)
        # NaN is a missing value, and every value is better than none.
        if not (rank < self._rank or (rank == rank and self._rank != self._rank)):
            return False
        self._rank = rank
        return True
