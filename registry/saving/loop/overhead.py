"""The time for which training waited for saves, measured and stored in the meta of each save."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
