"""A notice that this machine will be taken away: a file that appears, or a callable.

Also the last sign of life of a run, and the time for which its training waited for saves: it is
measured, and stored in the meta of each save.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import decode_plain
from holdfast.registry.history.replay import RunManifest

#: Key of the meta of a checkpoint.
META_KEY = "checkpointer"


class Overhead:
    """The time since training started, and the part of it spent waiting for saves."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.waited_s = 0.0

    @property
    def ran_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    @property
    def share(self) -> float:
        """The share of the time in which training waited, 0 to 1."""
        return min(self.waited_s / max(self.ran_s, 1e-9), 1.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began_s

    def meta(self, **said: object) -> dict[str, object]:
        """Return the meta of a save: the given values, and the times."""
        return {**said, "waited_s": self.waited_s, "ran_s": self.ran_s}


def told(meta: object) -> Mapping[str, Any]:
    """Return the values that a `Checkpointer` put into a checkpoint's meta; empty without one."""
    found = meta.get(META_KEY) if isinstance(meta, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def waited_share(meta: object) -> float | None:
    """Return the share of the time in which training waited for saves, 0 to 1, if stored."""
    found = told(meta)
    waited_s, ran_s = found.get("waited_s"), found.get("ran_s")
    if not isinstance(waited_s, float) or not isinstance(ran_s, float) or not ran_s > 0:
        return None
    return min(max(waited_s / ran_s, 0.0), 1.0)


def failed_saves(meta: object) -> int:
    """Return the number of failed saves before a checkpoint after which training continued."""
    found = told(meta).get("failed_saves")
    return found if isinstance(found, int) else 0


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
    due_ms: int | None  # it is overdue after this time; `None`: never


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
    due_ms = None
    if run.shown_status == "running" and run.dropped is None and interval_ms is not None:
        due_ms = time_ms + max(_INTERVALS * interval_ms, _LEAST_MS)
    is_overdue = due_ms is not None and now_ms > due_ms
    return LastHeard(time_ms, interval_ms, is_overdue, due_ms)
