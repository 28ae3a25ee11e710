"""Marks of checkpoints, such as the names that point at them, and remarks on runs."""

from __future__ import annotations

import math
from typing import NamedTuple

from holdfast.registry.history import format_time
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.values import counted, duration, number, share

#: Why runs have a status that no program sets in these words.
STATUS_REASONS = {
    "interrupted": "its program ended, or got a signal, before it said that the run is complete",
    "forked": "nobody has trained this fork yet",
}

#: The newest checkpoints that show how fast a run trains.
_RATED = 10


class Progress(NamedTuple):
    """How far training has come towards its planned end."""

    step: int  # of its latest checkpoint
    total_steps: int  # the step at which training is planned to end
    rate: float | None  # steps a second between its newest checkpoints, pauses included
    status: str  # the status of the run

    def __str__(self) -> str:
        """Return it in words; a completed run has nothing left."""
        steps = self.total_steps - self.step
        words = f"{self.step:,} of {counted(self.total_steps, 'step')}, "
        words += share(min(1, self.step / self.total_steps))
        if steps <= 0 or self.status == "completed":
            return words
        words += f"; {counted(steps, 'step')} left"
        if not self.rate:
            return words
        until = "" if self.status == "running" else ", the rate before it stopped"
        rate = f"{number(self.rate)} steps a second{until}"
        return f"{words}, about {duration(steps / self.rate)} at {rate}"


def progress_of(run: RunManifest) -> Progress | None:
    """Return the progress of a run; `None` without a planned end, or before it was trained."""
    latest, total = run.latest(), run.created.total_steps if run.created else None
    if latest is None or total is None or run.shown_status == "forked":
        return None
    some, rate = run.live(latest.phase)[-_RATED:], None
    steps = some[-1].step - some[0].step if some else 0
    if steps > 0 and (took_ms := some[-1].time_ms - some[0].time_ms) > 0:
        rate = 1000 * steps / took_ms
    return Progress(latest.step, total, rate, run.shown_status)


def run_remarks(run: RunManifest) -> list[str]:
    """Return a sentence for each problem with the monitored metrics of a run.

    The newest value of the first monitor is NaN or infinite; or checkpoints were evicted, and none
    that is left has a value by which it could be the best.
    """
    monitors = run.monitors if run.dropped is None else ()
    found = []
    for monitor in monitors[:1]:
        values = (monitor.measured(one.metrics) for one in run.newest_first())
        newest = next((value for value in values if value is not None), 0.0)
        if not math.isfinite(newest):
            found.append(f"{monitor.label} is {number(newest)}")
    if monitors and run.evicted_count and not any(map(run.best, monitors)):
        names = " or ".join(monitor.label for monitor in monitors)
        evicted = counted(run.evicted_count, "checkpoint")
        found.append(f"no best: none has a value of {names}, and {evicted} went without one")
    return found


def checkpoint_marks(manifest: RunManifest) -> dict[int, list[str]]:
    """Return the marks of each checkpoint: the names that point at it, and why it may not count.

    That is `latest`, `best`, `best/METRIC`, `gates/NAME`, `tags/NAME`, `superseded`, `evicted`,
    `held back`, `only` with the components of a thinned checkpoint, `held until` a time.
    """
    found: dict[int, list[str]] = {}
    latest = manifest.latest()
    if latest is not None:
        found.setdefault(latest.n, []).append("latest")
    for index, monitor in enumerate(manifest.monitors):
        best = manifest.best(monitor)
        if best is not None:
            name = f"best/{monitor.metric}" if index else "best"
            found.setdefault(best.n, []).append(name)
    for kind in ("gate", "tag"):
        for pin in sorted(manifest.pins_of(kind), key=lambda pin: pin.name):
            if pin.checkpoint is not None:
                found.setdefault(pin.checkpoint, []).append(pin.ref)
    for record in manifest.checkpoints:
        if record.superseded:
            found.setdefault(record.n, []).append("superseded")
        if record.evicted is not None:
            found.setdefault(record.n, []).append("evicted")
        if record.held_back:
            found.setdefault(record.n, []).append("held back")
        if record.parts is not None:
            found.setdefault(record.n, []).append(f"only {', '.join(record.parts)}")
    for hold in manifest.holds or ():
        if hold.checkpoint is not None:
            found.setdefault(hold.checkpoint, []).append(f"held until {format_time(hold.until_ms)}")
    return found
