"""The phases of a run, as users hold them: `run.phases`.

Training begins in a mode, goes from phase to phase by the transitions that the preset declares, and
pivots within a phase. `resuming` and `holdfast.registry.deriving.transitions` do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.face.resuming import Resuming
from holdfast.registry.history import RunOptions, check_phase, decode_plain, differing, phase_value
from holdfast.registry.history.actions import Action, RaiseVersion
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.saving import RunHandle, restore_newest
from holdfast.registry.spec import Monitor, child, phase_number, register_migration
from holdfast.registry.values import Digest

#: A function that converts a state from one schema version to another.
Migrate = Callable[[dict[str, Any]], dict[str, Any]]

if TYPE_CHECKING:
    from numpy.random import SeedSequence

    from holdfast.registry.deriving.transitions import (
        Initialise,
        Mode,
        Sources,
        Started,
        Transitioned,
    )


@dataclass(frozen=True, slots=True)
class PivotInfo:
    """A pivot.

    Attributes:
        name: Its name.
        source: Id of the checkpoint after which it came.
        config: The configuration that it gave; `None` if it gave none.
        meta: The values that were noted with it.
    """

    name: str
    source: Digest
    config: Any
    meta: Any


class RunPhases:
    """The phases of a run: how training starts, goes on to the next phase, or pivots within one."""

    def __init__(self, handle: RunHandle, resuming: Resuming) -> None:
        self._handle = handle
        self._resuming = resuming

    @property
    def current(self) -> int | str | None:
        """The phase that training is in, as far as this handle has read; `None` before any."""
        found = self._handle.log.run.phase
        return None if found is None else phase_value(found)

    @property
    def pivots(self) -> list[PivotInfo]:
        """The pivots of the present line of training, oldest first."""
        return [
            PivotInfo(one.name, one.manifest, decode_plain(one.config), decode_plain(one.meta))
            for one in self._handle.log.refresh().pivots
            if one.name is not None
        ]

    def start(
        self,
        mode: Mode,
        source: Stored | None = None,
        *,
        expected: Mapping[str, object] | None = None,
        carry: str | Iterable[str] = (),
        sources: Sources | None = None,
        initialise: Initialise | None = None,
        map_location: object = "cpu",
        config: object = None,
        input_hash: str | None = None,
    ) -> Started:
        """Start training in a mode: from nothing, from another run's checkpoint, or where it was.

        - `fresh`: nothing is carried; random numbers come from the run's seed.
        - `warm_start`: as `fresh`, but the preset's `warm_start` rows say what is carried from
          another run's checkpoint. The log records it; it can be repeated until the first save.
        - `resume`: everything is carried, and training continues exactly where it was.

        Every check is made before anything is loaded or committed.

        Args:
            mode: `fresh`, `warm_start` or `resume`.
            source: For `warm_start` a checkpoint or a release of any run. For `resume` exactly this
                checkpoint of the run; default: the newest sound one.
            expected: Plain values that the checkpoint must have, by path, such as
                `{"state_dimension": 12}`; those in the preset's `compatible_keys` must be given.
            carry: For `warm_start`: the top-level keys that are carried, in place of the preset's
                rows. Without either they are the keys that inference needs.
            sources: For `resume`, as for `restore`; places that the preset lists must be given.
            initialise: For `warm_start`: functions that make the reset parts, as for `transition`.
            map_location: Device for the tensors, as `torch.device` or its name.
            config: For `resume`: the configuration of this program, if `Registry.run` was not given
                it.
            input_hash: For `resume`: a hash of the input data, in the same way.

        Returns:
            The state, the seeds, the source, and the rows that were applied.

        Raises:
            InvalidInput: An argument is missing or does not belong to the mode, or the preset
                demands a configuration or an input hash that nobody has given.
            IncompatibleState: A value differs from the expected one, the configuration or the input
                hash from that of the run or of an imported file, or a row fits nothing; the message
                lists all.
            NotFound: There is nothing to resume from.
            Conflict: The run has checkpoints and the mode is not `resume`, or the run is over.
            RestoreFailed: Every checkpoint is damaged.
        """
        from holdfast.registry.deriving.transitions import (
            Started,
            check_expected,
            check_given,
            check_mode,
            of_another_run,
            start_fresh,
            start_warm,
        )

        run = self._handle.log.run
        spec = run.spec
        check_mode(mode)
        self._handle.ownership.asks()
        if (carry or initialise) and mode != "warm_start":
            raise InvalidInput("`carry` and `initialise` belong to mode warm_start", found=mode)
        given = RunOptions(config=config, input_hash=input_hash)
        if given.compared and mode != "resume":
            raise InvalidInput(
                "a configuration and an input hash belong to mode resume", found=mode
            )
        self._handle.saver.pipeline.settle()
        if mode == "fresh":
            if source is not None:
                raise InvalidInput("mode fresh starts from nothing", where="source")
            return start_fresh(self._handle)
        if mode == "warm_start":
            if isinstance(source, Stored):
                check_expected(spec, source, expected)
            return start_warm(self._handle, source, carry, initialise, map_location)
        check_given(spec.sources or (), sources)
        at = None if source is None else cast("Checkpoint", source)  # `check_source` refuses others
        resuming = replace(self._resuming, compared=self._resuming.compared | given.compared)
        wrong = differing(run, given)
        restored = resuming.restore(
            at,
            sources,
            map_location,
            lambda one: check_expected(spec, one, expected, [*wrong, *of_another_run(run, one)]),
        )
        if restored is None:
            raise NotFound(
                "the run has no checkpoint to resume from",
                where=self._handle.log.run_id,
                hint="Start it in mode fresh or warm_start.",
            )
        return Started(
            "resume", restored.state, restored.checkpoint, {}, (), restored.report, restored.stale
        )

    def transition(
        self,
        to: int | str,
        *,
        targets: Mapping[str, Any] | None = None,
        metrics: Mapping[str, object] | None = None,
        enable: str | Iterable[str] = (),
        initialise: Initialise | None = None,
        zero: str | Iterable[str] | None = None,
        map_location: object = "cpu",
    ) -> Transitioned:
        """Begin a phase by the transition that the preset declares, in one commit.

        The source is loaded whole and verified; every check is made before the commit. A second
        call before the first save in the phase returns the same. Like a save it takes the run over,
        and supersedes the checkpoints after the restored one.

        Args:
            to: The phase.
            targets: Modules or states, by part, that the strictly checked parts must fit.
            metrics: Metrics that decide whether the source is ready; they override its own.
            enable: Conditions of the preset that hold.
            initialise: Functions that make the reset parts, by part. For a pattern, the function
                returns new values by their paths below the key. A part without one is left out.
            zero: Patterns of the paths that must be zero, if the state has other names for them
                than the preset; each must match something.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state that the phase begins with, the frozen companions, the seeds, the source, and
            every row of the transition that was applied.

        Raises:
            IncompatibleState: The source does not fit: it differs from a target, a part is not
                zero, a metric has not reached its bound, or rows and parts do not cover each other.
            InvalidInput: No such transition is declared, or an argument names nothing.
            NotFound: The source, or an anchor of the pool, does not exist.
            IntegrityError: The source, or an anchor, is damaged; no other one is used instead.
            Conflict: The phase has begun already, or the run is over.
            Fenced: Another trainer has taken the run over.
        """
        from holdfast.registry.deriving.transitions import TransitionOptions, transition

        options = TransitionOptions(targets, metrics, enable, initialise, zero, map_location)
        return transition(self._handle, to, options)

    def pivot(
        self,
        name: str,
        *,
        config: object = None,
        meta: object = None,
        initialise: Initialise | None = None,
        map_location: object = "cpu",
    ) -> Transitioned:
        """Change the policy of training within its phase, in one commit; as often as wanted.

        The newest checkpoint is loaded and changed by the preset's `pivot` table: parts without a
        row are carried. Resettable streams are archived under the name of the pivot, and `best`
        begins again. Like a save it takes the run over, and supersedes the checkpoints after the
        restored one. The same name again commits nothing, so a job script may repeat it.

        Args:
            name: Its name.
            config: The whole configuration of the new policy, plain values; `run.config` from here
                on. Default: it stays as it is.
            meta: Plain values to note with the pivot, such as its reason; `pivots` returns them.
            initialise: Functions that make the reset parts, as for `transition`.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state that training continues with, the seeds, the source, and every row that was
            applied: none if the run has saved since it pivoted under this name.

        Raises:
            NotFound: The present phase has no checkpoint yet.
            IncompatibleState: A row of the table names a part that the state does not have.
            InvalidInput: The name is not legal, or `initialise` names a part that is not reset.
            IntegrityError: The checkpoint is damaged; after `restore` an older one is pivoted.
            Conflict: The run is over.
            Fenced: Another trainer has taken the run over.
        """
        from holdfast.registry.deriving.transitions import Policy, Transitioned, pivot, pivoted

        self._handle.ownership.asks()
        found = pivot(self._handle, Policy(name, config, meta), initialise, map_location)
        if found is not None:
            return found
        restored = restore_newest(self._handle, map_location)
        assert restored is not None  # a run that pivoted has a checkpoint
        if restored.pivot is None:
            return Transitioned(restored.state, {}, {}, restored.checkpoint, ())
        return pivoted(self._handle.committer, restored.checkpoint, restored.state, initialise)

    def raise_version(
        self, source: int | str, target: int | str, migrate: Migrate, *, lossy: bool = False
    ) -> None:
        """Raise the schema version of the run's states, with the migration that it needs.

        The migration is registered in this process and tried on the newest checkpoint; then one
        commit gives the run its new version. Every program that loads older states makes this call:
        if the run has the version already, it only registers. Stop trainers of the old version
        before: they can no longer save.

        Args:
            source: The version of the run's states today.
            target: The new version, of the same major version.
            migrate: Returns a state of the new version, which it sets in it, from one of the old.
            lossy: Whether information is lost; loads warn of it then.

        Raises:
            InvalidInput: The versions are malformed or not the run's, or the preset declares none.
            IncompatibleState: The newest checkpoint cannot be migrated.
            IntegrityError: It is damaged.
            Conflict: The run was dropped.
        """
        register_migration(source, target, migrate, lossy=lossy)
        newest = self._handle.log.refresh().latest(None)

        def compose(run: RunManifest) -> Sequence[Action] | None:
            if run.spec.version_key is None or run.spec.version not in (source, target):
                raise InvalidInput(
                    "the run's states have another schema version",
                    where=run.run_id,
                    expected=source,
                    found=run.spec.version or "none: the preset declares no version_key",
                )
            return None if run.spec.version == target else [RaiseVersion(version=target)]

        if compose(self._handle.log.run) and newest is not None:
            committer = self._handle.committer
            Checkpoint(committer.store, committer.log, newest).load(version=target)
        self._handle.committer.commit(compose)

    def is_due(self, step: int, phase: int | str | None = None) -> bool:
        """Return whether the preset's cadence asks for a checkpoint at this step of a phase."""
        run = self._handle.log.run
        name = run.present_phase if phase is None else check_phase(phase)
        every = run.spec.phase(name).save_every
        return every is not None and step > 0 and step % every == 0

    def monitor(self, phase: int | str | None = None) -> Monitor:
        """Return the monitor that decides `best`: the first of the phase, or of the run.

        Raises:
            InvalidInput: There is none.
        """
        return self._handle.log.run.monitor(None if phase is None else check_phase(phase))

    def seed_sequence(self, component: int, phase: int | str | None = None) -> SeedSequence:
        """Return the `numpy.random.SeedSequence` of one component that a phase seeds.

        Args:
            component: Its index among the components that are seeded.
            phase: The phase. Default: the one that the run is in.

        Raises:
            InvalidInput: The phase has no number and is not declared.
        """
        run = self._handle.log.run
        name = run.present_phase if phase is None else check_phase(phase)
        return child(run.seed, phase_number(run.spec, name), component)
