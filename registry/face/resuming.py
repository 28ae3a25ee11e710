"""The part of a run that training begins and continues with: start, restore, transition, pivot.

`holdfast.registry.saving.restoring` finds the checkpoint, `holdfast.registry.deriving.transitions`
carries out the tables of a preset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from holdfast.registry.curation import pins
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.face import rooms
from holdfast.registry.face.curation import CuratedRun
from holdfast.registry.history import check_not_dropped
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, Stored, load_to_train
from holdfast.registry.saving import Restored, RunHandle, check_source, restore_newest

_LOGGER = logging.getLogger("holdfast")

if TYPE_CHECKING:
    from holdfast.registry.face.rooms import Initialise, Mode, Sources, Started, Transitioned
    from holdfast.registry.saving.collective import Group


class ResumableRun(CuratedRun):
    """A run that training can start in, come back to, and take from phase to phase."""

    def __init__(
        self, handle: RunHandle, compared: frozenset[str], group: Group | None = None
    ) -> None:
        super().__init__(handle)
        self._trainer = handle.saver
        self._compared = compared
        self._group = group

    @property
    def group(self) -> Group | None:
        """The ranks of a job that save together; `None` if this process saves alone."""
        return self._group

    # Coming back

    def restore(
        self,
        at: Checkpoint | None = None,
        *,
        sources: Sources | None = None,
        map_location: object = "cpu",
    ) -> Restored | None:
        """Return the newest state that can be loaded whole, and continue the run from there.

        The next save takes the run over, and everything after the checkpoint that was restored is
        superseded: never latest or best, still readable by its digest. A pivot after the newest
        checkpoint stays, and the state is changed as it says (`Restored.pivot`); parts that it
        resets are not in the state.

        Args:
            at: Exactly this checkpoint, without falling back; pivots after it are superseded too.
                Default: the newest sound one.
            sources: The names of the sources that exist, by the place where the state has a key for
                each: `{"bandit/arms": ["wiki", "books"]}`, or `"streams/state/arms"` for the last
                entry of a stream. Keys without a source are reported and warned of, not removed.
            map_location: Device for the tensors.

        Returns:
            The state, its checkpoint and the skipped ones; `None` if nothing was saved yet.
            Tensors that were saved with less precision have the types that they had before, and a
            warning names them.

        Raises:
            InvalidInput: `at` is another run's; a place of `sources` has no keys; or the preset
                demands a configuration or an input hash (`must_match`), and the run was opened
                without.
            Conflict: `at` is superseded or evicted, or the run was dropped.
            RestoreFailed: Every checkpoint is damaged; the message lists each one with the reason.
        """
        return self._restore(at, None, sources, map_location)

    def restore_into(
        self,
        target: object,
        at: Checkpoint | None = None,
        *,
        component: str | None = None,
        strict: bool = True,
    ) -> Checkpoint | None:
        """Fill the tensors of a model from the newest checkpoint, and continue the run from there.

        For models of which no process has memory for a copy: nothing but the target's tensors is
        loaded, and no older checkpoint is tried. On a handle with a `group` every rank calls it;
        sharded tensors may have any layout, and each rank fetches about its share. With a journal
        the newest checkpoint may be one that is only on this machine. Plain values, such as a step
        or a generator, are read with `checkpoint.load(only=...)`.

        Args:
            target: An object with `state_dict()`, or a dict of tensors.
            at: Exactly this checkpoint. Default: the newest one.
            component: The component for the target; by default the target's top-level keys are
                components.
            strict: Whether a path on only one side is an error.

        Returns:
            The checkpoint; `None` if nothing was saved yet.

        Raises:
            IncompatibleState: Paths, shapes or dtypes differ; nothing was read.
            Conflict: `at` is superseded or evicted, the run was dropped, or a pivot came after the
                checkpoint: `restore` applies it.
            IntegrityError: An object is damaged; do not use the target's tensors then.
            RankFailed: With a group: another rank is dead or late.
        """
        self._trainer.settle()
        run = self._trainer.refresh()
        check_not_dropped(run)
        self._trainer.looks_for_a_state()
        self._check_compared(run)
        if at is None:
            kept = (one for one in self._trainer.newest_first() if not one.record.held_back)
            newest = next(kept, None)
        else:
            if isinstance(at, Checkpoint) and at.run_id == self.id:
                at = self.find(pins.own(self._committer, at, "run.restore_into"))
            check_source(self.id, at)
            newest = at
        if newest is None:
            return None
        # A pivot waits until the registry has every save, so none is after one that it has not.
        is_carried = newest.durable_in == "registry"
        if at is None and is_carried and run.pivots_after(newest.n):
            raise Conflict(
                "a pivot came after the newest checkpoint, and changes more than tensors",
                where=newest.ref,
                hint="Call `run.restore()`, which applies it.",
            )
        self._trainer.fill(newest, target, component, strict=strict)
        self._trainer.resume_at(newest)
        return newest

    def _restore(
        self,
        at: Checkpoint | None,
        check: Callable[[Checkpoint], None] | None,
        sources: Sources | None,
        map_location: object,
    ) -> Restored | None:
        self._trainer.settle()
        run = self._trainer.refresh()
        check_not_dropped(run)
        self._trainer.looks_for_a_state()
        self._check_compared(run)
        if run.status == "completed":
            _LOGGER.warning(
                "%s: the run is completed and refuses saves; to train it further, call "
                "`run.set_status('running')`",
                self.id,
            )
        if at is None:
            restored = restore_newest(
                self._trainer, self._trainer.newest_first, map_location, check
            )
            if restored is None:
                return None
        else:
            restored = self._restore_at(at, check, map_location)
        if restored.pivot is not None:
            changed = rooms.pivoted(self._committer, restored.checkpoint, restored.state, None)
            restored = replace(restored, state=changed.state)
        if sources is None and not self.spec.sources:
            return restored
        stale = rooms.find_stale(self._handle, restored.checkpoint, restored.state, sources)
        return replace(restored, stale=stale)

    def _restore_at(
        self, at: Checkpoint, check: Callable[[Checkpoint], None] | None, map_location: object
    ) -> Restored:
        if isinstance(at, Checkpoint) and at.run_id == self.id:
            at = self.find(pins.own(self._committer, at, "run.restore"))
        check_source(self.id, at)
        if check is not None:
            check(at)
        loaded = load_to_train(at, map_location)
        self._trainer.resume_at(at)
        return Restored(loaded, at, ())

    def _check_compared(self, run: RunManifest) -> None:
        """Refuse to resume if something that must match was not given to `Registry.run`."""
        missing = [name for name in self.spec.must_match or () if name not in self._compared]
        if missing and run.has_checkpoints:
            raise InvalidInput(
                "the run's preset demands that a resume is given what the run was created with",
                where=self.id,
                expected=", ".join(f"{name}=..." for name in missing),
                hint="Pass it to `registry.run`, which compares it.",
            )

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
    ) -> Started:
        """Start training in a mode: from nothing, from another run's checkpoint, or where it was.

        - `fresh`: nothing is carried; random numbers come from the run's seed.
        - `warm_start`: the preset's `warm_start` rows say what is carried from another run's
          checkpoint; random numbers come from the run's seed, and steps begin again.
        - `resume`: everything is carried, and training continues exactly where it was.

        A warm start is recorded in the log with its source and its rows; it can be repeated until
        the first save. Every check is made before anything is loaded or committed.

        Args:
            mode: `fresh`, `warm_start` or `resume`.
            source: For `warm_start` a checkpoint or a release of any run. For `resume` exactly this
                checkpoint of the run; default: the newest sound one.
            expected: Plain values that the checkpoint must have, by path, such as
                `{"state_dimension": 12}`. Those that the preset lists as `compatible_keys` must be
                given.
            carry: For `warm_start`: the top-level keys that are carried, in place of the preset's
                rows. Without either they are the keys that inference needs.
            sources: For `resume`, as for `restore`; places that the preset lists must be given.
            initialise: For `warm_start`: functions that make the reset parts, as for `transition`.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state, the seeds, the source, and the rows that were applied.

        Raises:
            InvalidInput: An argument is missing or does not belong to the mode, or the preset
                demands a configuration or an input hash, and the run was opened without.
            IncompatibleState: A value differs from the expected one, or a row fits nothing; the
                message lists all.
            NotFound: There is nothing to resume from.
            Conflict: The run has checkpoints and the mode is not `resume`, or the run is over.
            RestoreFailed: Every checkpoint is damaged.
        """
        rooms.check_mode(mode)
        self._trainer.looks_for_a_state()
        if (carry or initialise) and mode != "warm_start":
            raise InvalidInput("`carry` and `initialise` belong to mode warm_start", found=mode)
        self._trainer.settle()
        if mode == "fresh":
            if source is not None:
                raise InvalidInput("mode fresh starts from nothing", where="source")
            return rooms.start_fresh(self._handle)
        if mode == "warm_start":
            if isinstance(source, Stored):
                rooms.check_expected(self.spec, source, expected)
            return rooms.start_warm(self._handle, source, carry, initialise, map_location)
        rooms.check_given(self.spec.sources or (), sources)
        at = None if source is None else cast("Checkpoint", source)  # `check_source` refuses others
        restored = self._restore(
            at, lambda one: rooms.check_expected(self.spec, one, expected), sources, map_location
        )
        if restored is None:
            raise NotFound(
                "the run has no checkpoint to resume from",
                where=self.id,
                hint="Start it in mode fresh or warm_start.",
            )
        return rooms.Started(
            "resume", restored.state, restored.checkpoint, {}, (), restored.report, restored.stale
        )

    # From phase to phase

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
        call before the first save in the phase returns the same and commits nothing. Like a save it
        takes the run over; after `restore` it supersedes the checkpoints after the restored one.

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
            IncompatibleState: The source does not fit: it differs from a target, a part that must
                be zero is not, a metric has not reached its bound, or rows and parts do not cover
                each other. The message lists everything.
            InvalidInput: No such transition is declared, or an argument names nothing.
            NotFound: The source, or an anchor of the pool, does not exist.
            IntegrityError: The source, or an anchor, is damaged; no other one is used instead.
            Conflict: The phase has begun already, or the run is over.
            Fenced: Another trainer has taken the run over.
        """
        options = rooms.TransitionOptions(targets, metrics, enable, initialise, zero, map_location)
        return rooms.transition(self._handle, to, options)

    def pivot(
        self,
        name: str,
        *,
        initialise: Initialise | None = None,
        map_location: object = "cpu",
    ) -> Transitioned:
        """Change the policy of training within its phase, in one commit; as often as wanted.

        The newest checkpoint is loaded and changed by the preset's `pivot` table: parts without a
        row are carried. Resettable streams are archived under the name of the pivot, `forever`
        ones continue, and `best` begins again. Like a save it takes the run over; after `restore`
        it supersedes the checkpoints after the restored one. A pivot of the same name again
        commits nothing and continues where the run is, so a job script may repeat it.

        Args:
            name: Its name.
            initialise: Functions that make the reset parts, as for `transition`.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The state that training continues with, the seeds, the source, and every row that was
            applied: none if the run has saved since it pivoted under this name.

        Raises:
            NotFound: The present phase has no checkpoint yet.
            IncompatibleState: A row of the table names a part that the state does not have.
            InvalidInput: The name is not legal, or `initialise` names a part that is not reset.
            IntegrityError: The checkpoint is damaged: call `restore` first, to pivot from an older
                one.
            Conflict: The run is over.
            Fenced: Another trainer has taken the run over.
        """
        self._trainer.looks_for_a_state()
        found = rooms.pivot(self._handle, name, initialise, map_location)
        if found is not None:
            return found
        restored = restore_newest(self._trainer, self._trainer.newest_first, map_location)
        assert restored is not None  # a run that pivoted has a checkpoint
        if restored.pivot is None:
            return rooms.Transitioned(restored.state, {}, {}, restored.checkpoint, ())
        return rooms.pivoted(self._committer, restored.checkpoint, restored.state, initialise)
