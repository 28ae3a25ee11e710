"""When a run was last heard of, and whether the next checkpoint is overdue."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from holdfast.registry.history.log_values import decode_plain
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loop.overhead import told

#: A running run is overdue after this many intervals, and never before the second number.
_INTERVALS = 3
_LEAST_MS = 60_000


@dataclass(frozen=True, slots=True)
class LastHeard:
    """When a run was last heard of.

    Attributes:
        time_ms: Time of its newest takeover or checkpoint, or of its creation, by its writer's
            clock.
        interval_ms: Expected time between two checkpoints; `None` if nothing tells it.
        is_overdue: Whether the run is `running`, and was silent for much longer than that.
    """

    time_ms: int
    interval_ms: int | None
    is_overdue: bool


def last_heard(run: RunManifest, now_ms: int) -> LastHeard:
    """Return when a run was last heard of, as of a time in milliseconds since the epoch."""
    newest = list(islice(reversed(run.checkpoints), 2))
    times = [run.created_ms, *(one.time_ms for one in newest)]
    if run.writer is not None:
        times.append(run.writer.time_ms)
    time_ms, interval_ms = max(times), None
    if newest:
        every_s = told(decode_plain(newest[0].meta)).get("every_s")
        if isinstance(every_s, int | float) and every_s > 0:
            interval_ms = int(every_s * 1000)
        elif len(newest) > 1:
            interval_ms = max(newest[0].time_ms - newest[1].time_ms, 0)
    silent_ms = now_ms - time_ms
    is_overdue = (
        run.status == "running"
        and run.dropped is None
        and interval_ms is not None
        and silent_ms > max(_INTERVALS * interval_ms, _LEAST_MS)
    )
    return LastHeard(time_ms, interval_ms, is_overdue)
