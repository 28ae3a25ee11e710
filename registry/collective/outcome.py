"""How a save ended, from the log alone."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.registry.history.actions import ReportMetrics
from holdfast.registry.history.replay import Slot


def find_write(slots: Iterable[Slot], write: str) -> int | None:
    """Return the number of the checkpoint that a write has added or repeated; `None` if none."""
    for slot in slots:
        for _, commit in slot.commits:
            if commit.write != write:
                continue
            repeated = (one.checkpoint for one in commit.actions if isinstance(one, ReportMetrics))
            return next(repeated, commit.n)
    return None
