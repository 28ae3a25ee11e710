"""A checkpoint: a stored state with its record in a run.

`holdfast.registry.saving.saver` saves checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from holdfast.backends.escape import shown
from holdfast.registry.errors import NotFound
from holdfast.registry.history import RunLog, decode_plain, moment, phase_value
from holdfast.registry.history.actions import ReportMetrics
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading.state_handle import CheckpointHandle, StateHandle
from holdfast.registry.loading.stored import Stored
from holdfast.registry.store import Store
from holdfast.registry.values import unknown

if TYPE_CHECKING:
    from holdfast.registry.loading.destinations import LoadPrecision


class Checkpoint(Stored):
    """One checkpoint of a run. Its data is read only when it is asked for."""

    _handle: CheckpointHandle

    def __init__(self, store: Store, log: RunLog, record: CheckpointRecord) -> None:
        super().__init__(CheckpointHandle(store, log, record))

    @property
    def handle(self) -> CheckpointHandle:
        """Its inner value, which other parts of Holdfast take; not for programs."""
        return self._handle

    @property
    def _record(self) -> CheckpointRecord:
        return self._handle.record

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        mine, theirs = ((one.run_id, one._record.n, one.digest) for one in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.run_id, self.digest))

    @property
    def durable_in(self) -> Literal["journal", "registry"]:
        """Where it is durable: `journal` until a save with a journal is in the registry."""
        return "registry"

    @property
    def is_evicted(self) -> bool:
        """Whether it was evicted, as far as this handle has read."""
        return self._handle.log.run.is_evicted(self._record.n)

    @property
    def parts(self) -> tuple[str, ...] | None:
        """The components that it holds since it was thinned; `None`: all of them."""
        return self._handle.newest_record().parts

    @property
    def phase(self) -> int | str:
        """The phase that it was saved in; a number if it was given as one."""
        return phase_value(self._record.phase)

    @property
    def step(self) -> int:
        """Its training step, update or epoch."""
        return self._record.step

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each metric."""
        return dict(self._handle.newest_record().metrics)

    @property
    def meta(self) -> Any:
        """The plain values that were saved with the state."""
        return decode_plain(self._record.meta)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors, even if the registry had most of them already."""
        return self._record.size_bytes

    @property
    def created(self) -> datetime:
        """The time of its save by the trainer's clock, limited to the years 1 to 9999."""
        return moment(self._record.time_ms)

    @property
    def superseded(self) -> bool:
        """Whether training went back to an earlier one; then it is never `latest` or `best`."""
        return self._handle.superseded

    def eviction(self) -> str | None:
        """Return the commit, time and reason of its eviction; `None` while it is kept.

        This reads the whole log.
        """
        from holdfast.registry.history import describe_eviction

        return describe_eviction(self._handle.log, self._handle.newest_record())

    @property
    def tier(self) -> str | None:
        """Its retention class within the phase; `None` if the phase has no tiers."""
        return self._handle.newest_record().tier

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Paths of weights that hold NaN or infinity, the first few."""
        return self._record.nonfinite

    @property
    def companions(self) -> dict[str, Stored]:
        """The states that were saved with it, by name."""
        return {
            name: Stored(
                StateHandle(
                    self._handle.store,
                    self._handle.log,
                    digest,
                    f"{self.digest.short}/companions/{name}",
                )
            )
            for name, digest in self._record.companions.items()
        }

    def companion(self, name: str) -> Stored:
        """Return a state that was saved with it.

        Raises:
            NotFound: There is none of this name.
        """
        found = self.companions
        if name not in found:
            raise unknown("no such companion", self.ref, name, found)
        return found[name]

    def load(
        self,
        *,
        only: str | Iterable[str] | None = None,
        map_location: object = "cpu",
        precision: LoadPrecision | None = None,
        version: int | str | None = None,
    ) -> Any:
        """Return the state, byte for byte and type for type as it was saved, every byte verified.

        A whole state is checked against the required keys and dtypes of the run's specification. A
        state of an older schema version is migrated by the migrations that the program registered.

        Args:
            only: One component or path, or several, as for `Stored.load`; by default all. They are
                never migrated.
            map_location: Device for the tensors, as `torch.device` or its name.
            precision: The type of tensors that were saved with less precision: as `stored`, or
                `original`; the lost bits stay lost. Default: that of the preset, or `stored`.
            version: The wanted schema version; by default that of the specification.

        Raises:
            NotFound: A component or path in `only` does not exist.
            IncompatibleState: Keys or dtypes differ from the specification, or no migrations lead
                from its schema version to the wanted one.
            IntegrityError: An object is damaged or missing; nothing is returned.
        """
        from holdfast.registry.spec import MIGRATIONS, check_dtypes, check_keys, manifest_dtypes

        spec, where = self._handle.log.run.spec, self.ref
        wanted_precision = precision or spec.load_precision or "stored"
        state = super().load(only=only, map_location=map_location, precision=wanted_precision)
        if only is not None:
            return state
        found = None if spec.version_key is None else state.get(spec.version_key)
        wanted = spec.version if version is None else version
        if spec.version_key is not None and found is not None and found != wanted:
            assert wanted is not None  # a specification has both or neither
            state = MIGRATIONS.apply(state, spec.version_key, wanted)
        if wanted == spec.version:
            check_keys(spec, self._record.phase, state, where=where)
        if found == spec.version:
            check_dtypes(spec, manifest_dtypes(self.manifest), where=where)
        return state

    def report(self, metrics: Mapping[str, object]) -> None:
        """Add metrics, or replace their values. This needs no writer token.

        Raises:
            InvalidInput: A value is not a number.
            Conflict: The run was dropped.
            OnlyLocal: It is not in the registry yet.
        """
        from holdfast.registry.history import check_metrics, tier_after_report
        from holdfast.registry.writing import Committer, StateWriter

        checked, n = check_metrics(metrics), self.handle.n

        def actions(run: RunManifest) -> list[ReportMetrics]:
            tier = tier_after_report(run, n, checked)
            return [ReportMetrics(checkpoint=n, metrics=checked, tier=tier)]

        Committer(StateWriter(self._handle.store, self._handle.log)).commit(actions)


def find_checkpoint(store: Store, log: RunLog, n: int) -> Checkpoint:
    """Return the checkpoint that commit `n` of a run added, superseded or not."""
    known = log.knowing(n).by_n
    if n not in known:
        raise NotFound("this commit added no checkpoint", where=f"{log.run_id}: commit {shown(n)}")
    return Checkpoint(store, log, known[n])
