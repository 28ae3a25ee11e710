"""Figures of this process for a monitoring system: counted where things happen.

To count costs a lock and an addition. No name of a metric and no value of a label comes from a
store or a user, except names of runs, which are shown only where somebody asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.registry.values.process import ProcessLock

Labels = tuple[str, ...]

#: Every metric, without the `holdfast_` of its name: what it counts, and its labels. Each label but
#: `run`, which is the last one, has a small number of values, all of which are in the code; an
#: engine has one `id` at a time.
METRICS: Mapping[str, tuple[str, Labels]] = {
    "saves_total": ("Saves by their end", ("outcome", "run")),
    "saved_bytes_total": ("Bytes of saved states", ("run",)),
    "save_blocked_seconds_total": ("Time in which saves stopped the training", ("run",)),
    "saved_timestamp_seconds": ("When a save last ended well", ("run",)),
    "journal_waiting_saves": ("Saves that only the journal has", ("run",)),
    "journal_waiting_bytes": ("Bytes that only the journal has", ("run",)),
    "journal_oldest_timestamp_seconds": ("When the oldest waiting save was made", ("run",)),
    "journal_outside_saves": ("Saves that cannot enter their run", ("outcome", "run")),
    "follower_waiting_checkpoints": ("Checkpoints that no follower has finished", ("run",)),
    "follower_oldest_timestamp_seconds": ("When the oldest of these was saved", ("run",)),
    "mirror_synced_timestamp_seconds": ("When a mirror was last up to date", ("mirror",)),
    "verified_timestamp_seconds": ("When a verification last found no damage", ()),
    "damaged_findings": ("Errors that the last verification found", ()),
    "dead_bytes": ("Unneeded bytes that the last care left to a later one", ()),
    "freed_bytes_total": ("Bytes that care has deleted", ()),
    "care_timestamp_seconds": ("When a step of care last ended well", ("step",)),
    "failures_total": ("Failures by the class of the error", ("error", "within")),
    "ui_pages_total": ("Answers of holdfast ui", ("status",)),
    "hub_requests_total": ("Answers of holdfast hub", ("status",)),
    "hub_sent_bytes_total": ("Bytes that holdfast hub has sent", ()),
    "hub_broken_answers_total": ("Answers of holdfast hub that broke off", ()),
    "hub_open_requests": ("Requests that holdfast hub is answering", ()),
    "engine_confirmed_info": (
        "The id of the weights that an engine has confirmed",
        ("engine", "id"),
    ),
    "engine_confirmed_timestamp_seconds": ("When an engine last confirmed weights", ("engine",)),
    "engine_failures_total": ("Times that an engine was told in vain", ("engine",)),
    "engine_fetched_bytes_total": ("Bytes that holdfast follow has fetched", ()),
}
#: What is true of a running process alone: the next one that writes the same file starts at zero.
_PASSING = ("journal_", "follower_", "hub_open_", "engine_confirmed_")


class Figures:
    """The values of metrics, by their labels."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._values: dict[tuple[str, Labels], float] = {}

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a figure, which starts at 0."""
        key = _key(name, labels)
        with self._lock.here():
            self._values[key] = self._values.get(key, 0) + amount

    def put(self, name: str, value: float | None, **labels: object) -> None:
        """Set a figure; with `None` there is none."""
        key = _key(name, labels)
        with self._lock.here():
            self._values.pop(key, None)
            if value is not None:
                self._values[key] = value

    def fail(self, error: BaseException, within: str) -> None:
        """Count a failure by the class of its error, if that is a class of Holdfast."""
        kind = type(error)
        name = kind.__name__ if kind.__module__.startswith("holdfast.") else "other"
        self.add("failures_total", error=name, within=within)

    def read(self, *, runs: bool) -> dict[str, dict[Labels, float]]:
        """Return the figures of each metric by their labels; without `runs` all runs are one."""
        found: dict[str, dict[Labels, float]] = {}
        with self._lock.here():
            values = sorted(self._values.items())
        for (name, labels), value in values:
            of = found.setdefault(name, {})
            shown = labels if runs or "run" not in METRICS[name][1] else labels[:-1]
            of[shown] = _joined(name, of[shown], value) if shown in of else value
        return found

    def go_on(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take over a figure of an earlier process, unless it was true of that process alone."""
        is_known = name in METRICS and labels.keys() <= {*METRICS[name][1]}
        if is_known and not name.startswith(_PASSING) and math.isfinite(value):
            self.put(name, value, **labels)


def _key(name: str, labels: Mapping[str, object]) -> tuple[str, Labels]:
    return name, tuple(str(labels.get(one, "")) for one in METRICS[name][1])


def _joined(name: str, one: float, other: float) -> float:
    """Return one figure of two runs."""
    if "_oldest_" in name:
        return min(one, other)
    return max(one, other) if name.endswith("_timestamp_seconds") else one + other


#: The figures of this process.
HERE = Figures()
