"""The opponent pool of a run as users hold it: promoting, rating, drawing, loading."""

from __future__ import annotations

from registry.committer import Committer
from registry.log import RunLog
from registry.state import PoolRecord
from registry.store import Store
from registry.stored import Stored


class PoolEntry(Stored):
    """A model in the pool."""

    def __init__(self, store: Store, log: RunLog, record: PoolRecord) -> None:
        super().__init__(store, log, record.manifest, f"pool/v{record.version:04d}")
        self._version = record.version
        self._record = record


class OpponentPool:
    """The pool of a run."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def entry(self, version: int) -> PoolEntry:
        """Return an entry."""
        raise NotImplementedError
