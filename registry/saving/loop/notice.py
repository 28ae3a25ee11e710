"""A notice that this machine will be taken away: a file that appears, or a callable."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import decode_plain
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.saving.loop.overhead import told

_LOGGER = logging.getLogger("holdfast")
_EVERY_S = 1.0

#: A path, or a function that returns a true value once the end is announced.
NoticeSource = Callable[[], object] | str | os.PathLike[str]


class Notice:
    """Asks a source, at most once a second."""

    def __init__(self, source: NoticeSource | None) -> None:
        if (
            source is not None
            and not callable(source)
            and not isinstance(source, str | os.PathLike)
        ):
            raise InvalidInput(
                "not a source of notices",
                where="notice",
                expected="a path, or a callable without arguments",
                found=quoted(source),
            )
        self._source = source
        self._asked_s = -_EVERY_S
        self._has_failed = False

    def has_come(self) -> bool:
        """Return whether the notice has come; an error of the callable counts as no."""
        now_s = time.monotonic()
        if self._source is None or now_s - self._asked_s < _EVERY_S:
            return False
        self._asked_s = now_s
        if not callable(self._source):
            return Path(self._source).exists()
        try:
            return bool(self._source())
        except Exception as error:
            if not self._has_failed:
                _LOGGER.warning("the notice of preemption cannot be asked: %r", error)
            self._has_failed = True
            return False


#: A running run is overdue after this many intervals, and never before the second number.
_INTERVALS = 3
_LEAST_MS = 60_000


@dataclass(frozen=True, slots=True)
class LastHeard:
    """The last sign of life of a run."""

    #: Time of its newest takeover or checkpoint, or of its creation, by its writer's clock.
    time_ms: int
    interval_ms: int | None  # expected time between two checkpoints; `None` if unknown
    is_overdue: bool  # whether the run is `running` but silent for much longer than that


def last_heard(run: RunManifest, now_ms: int) -> LastHeard:
    """Return a run's last sign of life, at a time in milliseconds since the epoch."""
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
