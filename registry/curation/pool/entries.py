"""An entry of the pool: an inference-only state with its rating.

Nothing here commits; `holdfast.registry.curation.pool.league` adds, rates and draws entries.
"""

from __future__ import annotations

from datetime import datetime

from holdfast.backends.escape import shown
from holdfast.registry.errors import Hint, NotFound
from holdfast.registry.history import RunLog, moment, phase_value
from holdfast.registry.history.replay import NeedsHistory, PoolRecord, RunManifest, has_bit
from holdfast.registry.loading import StateHandle, Stored
from holdfast.registry.store import Store


class PoolEntry(Stored):
    """A model in the pool. Nothing is read from the store before it is needed.

    Ratings and counts are as this handle of the run read them last.
    """

    def __init__(self, store: Store, log: RunLog, record: PoolRecord) -> None:
        super().__init__(StateHandle(store, log, record.manifest, name_of(record.version)))
        self._version = record.version
        self._record = record

    @property
    def record(self) -> PoolRecord:
        """Its record in the run's log, as far as this handle has read."""
        run = self._handle.log.knowing_entry(self._version)
        return find_record(run, self._version) or self._record

    @property
    def version(self) -> int:
        """Its number. Numbers only grow, and a run never uses one twice."""
        return self._version

    @property
    def mu(self) -> float:
        """Its rating: the estimated skill in points."""
        return self.record.mu

    @property
    def sigma(self) -> float:
        """The uncertainty of its rating, in points."""
        return self.record.sigma

    @property
    def conservative(self) -> float:
        """A low estimate of its skill: mu - 3 sigma."""
        return self.record.conservative

    @property
    def games(self) -> int:
        """Games that were recorded with it."""
        return self.record.games

    @property
    def wins(self) -> int:
        """Games in which it alone came first."""
        return self.record.wins

    @property
    def win_rate(self) -> float | None:
        """Wins divided by games, from 0 to 1; `None` before any game."""
        record = self.record
        return record.wins / record.games if record.games else None

    @property
    def frozen(self) -> bool:
        """Whether it is never evicted and never rated again."""
        return self._record.frozen

    @property
    def gate(self) -> str | None:
        """The gate of its source; a frozen entry is drawn by this name."""
        return self._record.gate

    @property
    def checkpoint(self) -> int | None:
        """Commit number of its checkpoint, or `None` where a fork inherited it."""
        return self._record.checkpoint

    @property
    def phase(self) -> int | str:
        """The phase of its checkpoint; a number where it was given as one."""
        return phase_value(self._record.phase)

    @property
    def step(self) -> int:
        """The step of its checkpoint."""
        return self._record.step

    @property
    def promoted(self) -> datetime:
        """When it was promoted, by the promoter's clock; limited to the years 1 to 9999."""
        return moment(self._record.time_ms)

    @property
    def evicted(self) -> str | None:
        """Why it left the pool; `None` while it plays."""
        return self.record.evicted


def name_of(version: int) -> str:
    """Return the ref of an entry within its run."""
    return f"pool/v{version:04d}"


def find_record(run: RunManifest, version: int) -> PoolRecord | None:
    """Return the entry of a version, evicted or not."""
    found = run.by_version.get(version)
    if found is None and run.gone is not None and has_bit(run.gone.versions, version):
        raise NeedsHistory
    return found


def require_record(run: RunManifest, version: int) -> PoolRecord:
    """Return the entry of a version, evicted or not."""
    record = find_record(run, version)
    if record is None:
        known = [entry.version for entry in run.roster()]
        raise NotFound(
            "the pool never had this version",
            where=f"{run.run_id}/pool/v{shown(version).zfill(4)}",
            expected=f"1 to {run.next_version - 1}"
            if run.next_version > 1
            else "none: the pool is empty",
            hint=f"Playing now: {', '.join(map(str, known))}." if known else None,
        )
    return record


def require_playing(run: RunManifest, version: int) -> PoolRecord:
    """Return the entry of a version that plays."""
    record = require_record(run, version)
    if record.evicted is not None:
        raise NotFound(
            "this version left the pool",
            where=f"{run.run_id}/{name_of(version)}",
            found=record.evicted,
            hint=Hint(
                f"Its ratings stay: `run.pool.history({version})`.",
                "Its ratings stay in `holdfast log`.",
            ),
        )
    return record
