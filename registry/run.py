"""One training run as its users hold it: saving into it, coming back to it, naming, letting go."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Self, Unpack, get_args

from backends.escape import quoted
from registry import pins, pruning
from registry.actions import Evict, RunStatus, SetStatus
from registry.charge import check_not_dropped
from registry.checkpoint import Checkpoint
from registry.committer import Committer
from registry.errors import InvalidInput, RegistryError
from registry.log import RunLog
from registry.merging.merge import MergeOptions, merge
from registry.restoring import Restored, check_source, restore_newest
from registry.resuming import load_to_train
from registry.retention import RetentionPlan
from registry.run_view import RunView
from registry.spec import Retention
from registry.store import Store
from registry.stored import Stored
from registry.trainer.pending import PendingSave
from registry.trainer.save_request import SaveOptions, SaveRequest
from registry.trainer.trainer import Trainer
from registry.transitions import Transitioned, TransitionOptions, transition

_LOGGER = logging.getLogger("holdfast")


class Run(RunView):
    """A run of a registry. One handle trains; any number of others read and annotate.

    As a context manager the handle that trains sets the run's status: `completed` at the end of
    the block, `interrupted` when it is left by a signal or `sys.exit`, `failed` by any other
    exception. A handle that only reads, or that was fenced, leaves the status alone.
    """

    def __init__(self, store: Store, log: RunLog) -> None:
        super().__init__(Committer(store, log))
        self._trainer = Trainer(self.committer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                self._trainer.settle()
            except BaseException:
                self._trainer.leave("failed")
                raise
            self._trainer.leave("completed")
            return
        # The caller's own error must be raised; an error of the store is only logged.
        try:
            self._trainer.settle()
        except RegistryError as said:
            _LOGGER.error("%s: the running save failed: %s", self.id, said)
        left: RunStatus = "failed" if issubclass(kind, Exception) else "interrupted"
        try:
            self._trainer.leave(left)
        except RegistryError as said:
            _LOGGER.warning("%s: the status could not be set to %s: %s", self.id, left, said)

    # Saving

    def save(self, state: object, *, step: int, **options: Unpack[SaveOptions]) -> Checkpoint:
        """Keep a state; return when it is durable.

        Args:
            state: A dict of whatever the training program wants back, tensors and plain values
                nested at will; objects with `state_dict()` are taken by it. If parts of it change
                before this returns, each is stored as it was at some moment during the call.
            step: Training step, update or epoch that the state belongs to.
            **options: Any of

                - `phase`: phase of the run; without it the one that the run is in, `main` where
                  none are declared.
                - `metrics`: numbers that describe the state; more can follow by
                  `Checkpoint.report`.
                - `meta`: anything plain to keep beside the state, outside its id.
                - `tier`: retention class; by the phase's rules without it.
                - `companions`: states that are kept and evicted with this one, by name. One that
                  the phase declares is carried on from the last checkpoint where it is not given.
                - `streams`: entries for streams, by name: they become visible with the checkpoint,
                  and a resume from it goes on after them.
                - `compression`: `none`, `zstd` or `lz4`, instead of the registry's own: how chunks
                  are stored that are not there yet; no id depends on it.
                - `keyframe_every`: 1 to 32, instead of the registry's own: how often a chunk that
                  changes from save to save is stored whole; in between it is stored as a difference
                  where that is clearly shorter. 1 for no deltas.
                - `precision`: which tensors of float32 and float64 are stored in fewer bits, by
                  patterns of paths, the first that matches: `{"model/*": "bf16", "*": "auto"}`; or
                  one policy for all. `bf16`, `fp16`, `auto` (bf16 from 1 MiB on) or `keep`.
                  Recorded, and shown as lossy; companions stay as they are.
                - `allow_lossy_optimizer`: let `precision` at optimizer state, which it passes
                  over without, and refuses where a pattern asks for nothing else.
                - `allow_nonfinite`: let the checkpoint be latest although weights that the preset
                  watches hold NaN or infinity.

        Returns:
            The checkpoint; where the same state was saved at this step already, that one, with
            `metrics` added to it; its streams, meta and companions are those of the first save.

        Raises:
            InvalidInput: Something cannot be stored, the message names its path; the run has no
                such phase, tier or stream; or `precision` would make infinity of a number, matches
                nothing, or asks for optimizer state.
            IncompatibleState: Keys that the phase requires are missing, or tensors have another
                dtype than the preset demands.
            Fenced: Another trainer has taken the run over.
            Conflict: The step holds another state already, the phase is over, or the run is.
            StorageError: The store failed; nothing is visible, except that StoreUnavailable
                leaves that open. Repeating the save is safe either way.
        """
        return self._trainer.save(state, SaveRequest.check(step, **options))

    def push(self, state: object, *, step: int, **options: Unpack[SaveOptions]) -> Checkpoint:
        """Keep a state that another program made; its trainer stays in charge of the run.

        Args, result and errors are those of `save`; nobody is fenced.
        """
        return self._trainer.save(state, SaveRequest.check(step, takes_over=False, **options))

    def merge(
        self, sources: Iterable[Stored], *, step: int, **options: Unpack[MergeOptions]
    ) -> Checkpoint:
        """Keep a state that is made of others: averages of some tensors, the rest picked.

        Committed like `push`: the run's trainer stays in charge. What is picked, or equal in all
        sources, is not stored again; the rest is computed chunk by chunk, in less than 256 MiB
        whatever the size. What it was made of stands in its meta, under `merge`.

        Args:
            sources: Checkpoints, or other stored states, of any run of this registry: one
                structure, and equal in everything that is neither averaged nor picked.
            step: Step of the new checkpoint.
            **options: Any of

                - `average`: the components that are averaged, or patterns of tensors' paths; all
                  floating tensors that differ, without it, other than optimizer state. Sums are
                  those of float32 (float64 of float64), rounded once to the stored type; elements
                  that are equal in all sources stay as they are, bit for bit.
                - `weights`: a number for each source, whose sum is 1; equal ones without it.
                - `pick`: by name of a component, or pattern of tensors' paths, the stored state
                  that it is taken from, one of the sources or any other.
                - `meta`: as for `save`, but a dict.
                - `phase`, `metrics`, `tier`, `allow_nonfinite`, `compression`: as for `save`.

        Raises:
            InvalidInput: The weights are none, or an argument names nothing, or nothing that
                another one does not name before it.
            UnsupportedValue: An average of finite numbers is not finite in the stored type.
            NotFound: A component, path or source is not there.
            IncompatibleState: The sources are not built alike, or differ in what is neither
                averaged nor picked, or has no average; the message names the paths.
            Conflict: A source was evicted, or the step holds another state already.
            IntegrityError: A source is damaged or gone.
        """
        self._trainer.settle()
        return merge(self.committer, sources, step, **options)

    def save_async(
        self, state: object, *, step: int, **options: Unpack[SaveOptions]
    ) -> PendingSave:
        """Keep a state in the background; return once it has been copied.

        The copy goes to host memory that is used again from save to save. One save is under way
        at a time: the next one waits for it, and raises its error. The end of the program waits for
        it, too, for up to `HOLDFAST_EXIT_WAIT_S` seconds (600); a save that is lost then is logged
        as an error on the logger `holdfast`, and the exit status is 120.

        Args and errors are those of `save`.
        """
        return self._trainer.save_async(state, SaveRequest.check(step, **options))

    # Coming back

    def restore(
        self, at: Checkpoint | None = None, *, map_location: object = "cpu"
    ) -> Restored | None:
        """Return the newest state that can be loaded whole, and continue the run from there.

        The next save takes the run over, and everything after the checkpoint that was restored is
        superseded: never latest or best, still readable by its digest.

        Args:
            at: Exactly this checkpoint, without falling back; the newest sound one without it.
            map_location: Device for the tensors.

        Returns:
            The state, its checkpoint and what was passed over; `None` when nothing was saved yet.
            Tensors that were saved with less precision have the types that they had before, and a
            warning names them.

        Raises:
            InvalidInput: `at` is another run's.
            Conflict: `at` is superseded or evicted, or the run was dropped.
            RestoreFailed: Every checkpoint is damaged; the message lists each one and why.
        """
        self._trainer.settle()
        check_not_dropped(self._log.refresh())
        if at is None:
            return restore_newest(self._trainer, self._newest_first, map_location)
        if isinstance(at, Checkpoint) and at.run_id == self.id:
            at = self.find(pins.own(self.committer, at, "run.restore"))
        check_source(self.id, at)
        loaded = load_to_train(at, map_location)
        self._trainer.resume_at(at)
        return Restored(loaded, at, ())

    def _newest_first(self) -> list[Checkpoint]:
        return [self._checkpoint(record) for record in reversed(self._log.state.live())]

    # From phase to phase

    def transition(self, to: int | str, **options: Unpack[TransitionOptions]) -> Transitioned:
        """Begin a phase by the way that the preset declares: checked, and in one commit.

        The source is loaded whole and verified; every check is made before anything is committed.
        Called again before anything was saved in the phase, it returns the same and commits
        nothing. Like a save it takes the run over, and after `restore` it supersedes what came
        after the restored checkpoint.

        Args:
            to: The phase.
            **options: Any of

                - `targets`: what the parts that are checked strictly are to be loaded into:
                  modules, or states, by part.
                - `metrics`: metrics for the readiness of the source, before those that it has.
                - `enable`: conditions of the preset that hold.
                - `initialise`: functions that make parts which are reset, by part; of a pattern,
                  new values by the paths below the key. What nothing makes is left out.
                - `map_location`: device for the tensors.

        Returns:
            The state that the phase begins with, the frozen companions, the seeds, the source, and
            every row as it was applied.

        Raises:
            IncompatibleState: The source is not fit: it differs from a target, something is not
                zero, a metric has not got there, or rows and parts do not cover each other. The
                message lists everything.
            InvalidInput: No such way is declared, or an argument names nothing.
            NotFound: The source, or an anchor of the pool, is not there.
            IntegrityError: The source, or an anchor, is damaged; nothing is fallen back to.
            Conflict: The phase is under way, or the run is over.
            Fenced: Another trainer has taken the run over.
        """
        return transition(self._trainer, self.committer, to, **options)

    # Names that keep

    def tag(self, name: str, checkpoint: Checkpoint) -> None:
        """Point a movable name at a checkpoint of this run; `RUN/tags/NAME` finds it.

        Raises:
            InvalidInput: The checkpoint is another run's, or the name is not legal.
            Conflict: The checkpoint was evicted.
        """
        pins.set_tag(self.committer, name, checkpoint)

    def set_gate(self, name: str, checkpoint: Checkpoint | None = None) -> Checkpoint:
        """Make a checkpoint a gate: immutable, never evicted; `RUN/gates/NAME` finds it.

        Args:
            name: The gate's name, one of the preset's where it declares any.
            checkpoint: The checkpoint; the best one of the gate's phase without it.

        Raises:
            Conflict: The gate is set to another checkpoint, and that one is sound: only a gate
                that fails verification may be replaced.
            InvalidInput: There is no such gate, or the checkpoint is not of its phase.
            NotFound: No checkpoint is given, and the phase has no best one.
        """
        return pins.set_gate(self.committer, name, checkpoint)

    def add_artifact(self, name: str, state: object) -> Stored:
        """Keep a state beside the checkpoints for good; `RUN/artifacts/NAME` finds it.

        Args:
            name: Given once; adding the same state again changes nothing.
            state: As for `save`.

        Raises:
            Conflict: The name holds another state.
        """
        return pins.add_artifact(self.committer, name, state)

    # Letting go

    def prune(self, retention: Retention | None = None, *, dry_run: bool = False) -> RetentionPlan:
        """Let go of the checkpoints that retention does not keep; saves do it by themselves.

        Args:
            retention: A policy in place of the preset's.
            dry_run: Only plan.

        Returns:
            What is kept and what goes, each with its reasons.

        Raises:
            InvalidInput: The run has no policy, and none is given.
        """
        return pruning.prune(self.committer, retention, dry_run=dry_run)

    def undo(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Bring evicted checkpoints back, those of the last eviction where none are named.

        Args:
            *checkpoints: Of this run, from `evicted`.

        Returns:
            The checkpoints. Retention lets them alone from here on.

        Raises:
            NotFound: One of them is not evicted, or nothing is.
            Conflict: Another checkpoint holds its step now.
            MissingObject: Collection has removed what it held.
        """
        chosen = [pins.own(self.committer, one, "undo") for one in checkpoints]
        back = pruning.undo(self.committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def drop(self, reason: str) -> None:
        """Release everything that the run holds, gates and releases included. Cannot be undone.

        Args:
            reason: Why, for whoever reads the log.
        """
        self._trainer.settle()
        pruning.drop(self.committer, reason)

    def _last_evicted(self) -> list[int]:
        said = [a for commit in self.history() for a in commit.actions if isinstance(a, Evict)]
        return pruning.last_evicted(self._log.history(), said)

    # How it stands

    def set_status(self, status: RunStatus) -> None:
        """Say how the run stands.

        Raises:
            InvalidInput: There is no such status.
        """
        if status not in get_args(RunStatus):
            raise InvalidInput(
                "not a status", expected=", ".join(get_args(RunStatus)), found=quoted(status)
            )
        self._trainer.settle()
        self.committer.commit(lambda state: [SetStatus(status=status)])  # noqa: ARG005

    def close(self) -> None:
        """Finish a save under way. The handle can be used again."""
        self._trainer.close()
