"""A clock that the followers of a run read."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """A time that passes only while somebody sleeps; `then` is what happens meanwhile."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.slept: list[float] = []
        self.then: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        assert len(self.slept) < 1000, "waits for ever"
        self.slept.append(seconds)
        self.now_s += seconds
        self.then()
