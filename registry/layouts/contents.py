"""The contents of a run for layouts: the states that it keeps now, by name."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from holdfast.registry.curation import Release, Releases
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.curation.streams import Stream
from holdfast.registry.history import decode_plain
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
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
        self._at = committer.store, committer.log

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The live checkpoints, oldest first."""
        return [Checkpoint(*self._at, record) for record in self.run.live(None)]

    @property
    def phases(self) -> list[str]:
        """The phases that have checkpoints."""
        return list(dict.fromkeys(one.handle.record.phase for one in self.checkpoints))

    def latest(self, phase: str | None = None) -> Checkpoint | None:
        """Return the newest checkpoint."""
        return self._of(self.run.latest(phase))

    def monitors(self, phase: str) -> tuple[Monitor, ...]:
        """Return the monitors of a phase, or of the run if it declares no phases."""
        return self.run.spec.phase(phase).monitors or self.run.monitors

    def best(self, phase: str) -> Checkpoint | None:
        """Return the best checkpoint of a phase, by its first monitor."""
        for monitor in self.monitors(phase)[:1]:
            return self._of(self.run.best(monitor, phase))
        return None

    def _of(self, record: CheckpointRecord | None) -> Checkpoint | None:
        return next((one for one in self.checkpoints if record and one.handle.n == record.n), None)

    @property
    def gates(self) -> dict[str, Checkpoint]:
        """The gates by name."""
        log = self._committer.log
        return {
            pin.name: Checkpoint(*self._at, log.knowing(pin.checkpoint).by_n[pin.checkpoint])
            for pin in self.run.pins_of("gate")
            if pin.checkpoint is not None
        }

    @property
    def artifacts(self) -> dict[str, Stored]:
        """The artifacts by name."""
        return {
            pin.name: Stored(StateHandle(*self._at, pin.manifest, pin.ref))
            for pin in self.run.pins_of("artifact")
        }

    @property
    def releases(self) -> list[Release]:
        """The releases, in the order of publication."""
        return Releases(self._committer).list()

    @property
    def pool(self) -> list[PoolEntry]:
        """The playing entries of the pool, oldest first."""
        return [PoolEntry(*self._at, record) for record in self.run.roster()]

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams by name."""
        return {one.name: Stream(self._committer, one.name) for one in self.run.streams}


def imported_as(checkpoint: Checkpoint, layout: str) -> dict[str, str]:
    """Return the notes of an import about the file of a checkpoint; empty without any.

    The values come from a log; the caller checks them.
    """
    noted = import_notes(checkpoint.handle.record, layout)
    return {key: value for key, value in noted.items() if isinstance(value, str)}


def import_notes(record: CheckpointRecord, layout: str) -> dict[str, Any]:
    """Return all notes of an import about the file of a checkpoint; see `imported_as`."""
    meta = decode_plain(record.meta)
    noted = meta.get(IMPORT) if isinstance(meta, dict) else None
    return noted if isinstance(noted, dict) and noted.get("layout") == layout else {}


def noted_files(record: CheckpointRecord, layout: str) -> dict[str, str]:
    """Return the digests, by name, of the files from which a checkpoint and companions came.

    The program of ADR-004 removes a training file before its milestones, which then stand alone.
    """
    noted = import_notes(record, layout)
    if not noted:
        return {}
    beside = noted.get("companions")
    files = {noted.get("file"): noted.get("sha256"), **(beside if isinstance(beside, dict) else {})}
    return {str(path): str(sha256) for path, sha256 in files.items()}
