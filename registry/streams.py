"""Streams as users hold them: append-only histories beside the checkpoints of a run."""

from __future__ import annotations

from registry.committer import Committer


class Stream:
    """One stream of a run."""

    def __init__(self, committer: Committer, name: str) -> None:
        self._committer = committer
        self.name = name
