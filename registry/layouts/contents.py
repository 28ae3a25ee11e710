"""The contents of a run for layouts: the states that it keeps now, by name."""

from __future__ import annotations

from functools import cached_property

from holdfast.registry.curation import Release, Releases
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.curation.streams import Stream
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, StateHandle, Stored
from holdfast.registry.spec import Monitor
from holdfast.registry.writing import Committer

#: The key of a checkpoint's meta for the file from which it was imported.
IMPORT = "import"


class RunContents:
    """A run at one moment, with everything that a folder can show."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self.run: RunManifest = committer.log.refresh()  # the run manifest of that moment

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The live checkpoints, oldest first."""
        store, log = self._committer.store, self._committer.log
        return [Checkpoint(store, log, record) for record in self.run.live(None)]

    @property
    def phases(self) -> list[str]:
        """The phases that have checkpoints."""
        return list(dict.fromkeys(one.handle.record.phase for one in self.checkpoints))

    def latest(self, phase: str | None = None) -> Checkpoint | None:
        """Return the newest checkpoint."""
        record = self.run.latest(phase)
        return next((one for one in self.checkpoints if record and one.handle.n == record.n), None)

    def monitors(self, phase: str) -> tuple[Monitor, ...]:
        """Return the monitors of a phase, or of the run if it declares no phases."""
        return self.run.spec.phase(phase).monitors or self.run.monitors

    def best(self, phase: str) -> Checkpoint | None:
        """Return the best checkpoint of a phase, by its first monitor."""
        for monitor in self.monitors(phase)[:1]:
            record = self.run.best(monitor, phase)
            return next(
                (one for one in self.checkpoints if record and one.handle.n == record.n), None
            )
        return None

    @property
    def gates(self) -> dict[str, Checkpoint]:
        """The gates by name."""
        store, log = self._committer.store, self._committer.log
        return {
            pin.name: Checkpoint(store, log, log.knowing(pin.checkpoint).by_n[pin.checkpoint])
            for pin in self.run.pins_of("gate")
            if pin.checkpoint is not None
        }

    @property
    def artifacts(self) -> dict[str, Stored]:
        """The artifacts by name."""
        store, log = self._committer.store, self._committer.log
        return {
            pin.name: Stored(StateHandle(store, log, pin.manifest, pin.ref))
            for pin in self.run.pins_of("artifact")
        }

    @property
    def releases(self) -> list[Release]:
        """The releases, in the order of publication."""
        return Releases(self._committer).list()

    @property
    def pool(self) -> list[PoolEntry]:
        """The playing entries of the pool, oldest first."""
        store, log = self._committer.store, self._committer.log
        return [PoolEntry(store, log, record) for record in self.run.roster()]

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams by name."""
        return {one.name: Stream(self._committer, one.name) for one in self.run.streams}


def imported_as(checkpoint: Checkpoint, layout: str) -> dict[str, str]:
    """Return the notes of an import about the file of a checkpoint; empty without any.

    The values come from a log; the caller checks them.
    """
    meta = checkpoint.meta
    noted = meta.get(IMPORT) if isinstance(meta, dict) else None
    if not isinstance(noted, dict) or noted.get("layout") != layout:
        return {}
    return {key: value for key, value in noted.items() if isinstance(value, str)}
