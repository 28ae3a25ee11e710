"""One training run as its users hold it: saving into it, finding in it, coming back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, get_args

from registry import pins, pruning
from registry.actions import Commit, Evict, RunStatus, SetStatus
from registry.checkpoint import Checkpoint, phase_value
from registry.committer import Committer
from registry.errors import InvalidInput, NotFound, RegistryError
from registry.log import RunLog
from registry.monitors import Monitor
from registry.plain import check_phase, decode_plain
from registry.pool.league import OpponentPool
from registry.releases import Releases
from registry.restoring import Restored, check_source, restore_newest
from registry.retention import RetentionPlan
from registry.save_request import DEFAULT_PHASE, SaveOptions, SaveRequest
from registry.seeding import child, phase_number
from registry.spec import Retention, RunSpec
from registry.state import CheckpointRecord, RunManifest
from registry.store import Store
from registry.stored import Stored
from registry.streams import Stream
from registry.trainer import PendingSave, Trainer
from registry.transitions import Transitioned, TransitionOptions, transition
from registry.watching import Watch

if TYPE_CHECKING:
    from numpy.random import SeedSequence


class Run:
    """A run of a registry. One handle trains; any number of others read and annotate.

    As a context manager the handle that trains sets the run's status: `completed` at the end of
    the block, `interrupted` when it is left by a signal or `sys.exit`, `failed` by any other
    exception. A handle that only reads, or that was fenced, leaves the status alone.
    """

    def __init__(self, store: Store, log: RunLog) -> None:
        self._store = store
        self._log = log
        #: Commits without a writer token, for the registry and the parts of this handle.
        self.committer = Committer(store, log)
        self._trainer = Trainer(self.committer)
        self._pool = OpponentPool(self.committer)

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

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
        # The caller's own error must come through, whatever the store says to this.
        with suppress(RegistryError):
            self._trainer.settle()
        with suppress(RegistryError):
            self._trainer.leave("failed" if issubclass(kind, Exception) else "interrupted")

    @property
    def id(self) -> str:
        """The run's name."""
        return self._log.run_id

    @property
    def manifest(self) -> RunManifest:
        """The run as far as this handle has read its log; `refresh` reads on."""
        return self._log.state

    @property
    def status(self) -> RunStatus:
        """`running`, `interrupted`, `completed` or `failed`."""
        return self.manifest.status

    @property
    def config(self) -> Any:
        """What the run was created with."""
        return decode_plain(self.manifest.created.config if self.manifest.created else None)

    @property
    def spec(self) -> RunSpec:
        """What the run is to be: the preset that it was created with."""
        return self.manifest.spec

    @property
    def phase(self) -> int | str | None:
        """The phase that training is in, as far as this handle has read; `None` before any."""
        found = self.manifest.phase
        return None if found is None else phase_value(found)

    def is_due(self, step: int, phase: int | str | None = None) -> bool:
        """Return whether the preset's cadence asks for a checkpoint at this step of a phase."""
        name = self.manifest.phase if phase is None else check_phase(phase)
        first = self.spec.phases[0].name if self.spec.phases else ""
        every = self.spec.phase(name or first).save_every
        return every is not None and step > 0 and step % every == 0

    def refresh(self) -> Self:
        """Read what others have committed meanwhile."""
        self._log.refresh()
        return self

    # Saving

    def save(self, state: object, *, step: int, **options: Unpack[SaveOptions]) -> Checkpoint:
        """Keep a state; return when it is durable.

        Args:
            state: A dict of whatever the training program wants back, tensors and plain values
                nested at will; objects with `state_dict()` are taken by it.
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
                - `allow_nonfinite`: let the checkpoint be latest although weights that the preset
                  watches hold NaN or infinity.

        Returns:
            The checkpoint; where the same state was saved at this step already, that one, with
            `metrics` added to it.

        Raises:
            InvalidInput: Something cannot be stored, the message names its path; or the run has no
                such phase, tier or stream.
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

    def save_async(
        self, state: object, *, step: int, **options: Unpack[SaveOptions]
    ) -> PendingSave:
        """Keep a state in the background; return once it has been copied.

        The copy goes to host memory that is used again from save to save. One save is under way
        at a time: the next one waits for it, and raises what it failed with.

        Args and errors are those of `save`.
        """
        return self._trainer.save_async(state, SaveRequest.check(step, **options))

    # Finding

    def checkpoints(self, phase: int | str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of the current line of training as of now, oldest first."""
        records = self._log.refresh().live(None if phase is None else check_phase(phase))
        return [self._checkpoint(record) for record in records]

    def latest(self, phase: int | str | None = None) -> Checkpoint | None:
        """Return the newest checkpoint as of now, or `None` before the first."""
        record = self._log.refresh().latest(None if phase is None else check_phase(phase))
        return None if record is None else self._checkpoint(record)

    def best(
        self, phase: int | str | None = None, *, monitor: Monitor | None = None
    ) -> Checkpoint | None:
        """Return the checkpoint with the best value as of now; `None` while none has one.

        Args:
            phase: Only checkpoints of this phase. Where phases are declared, only those of the one
                that training is in are compared without it.
            monitor: What to compare by; the run's first monitor without it.

        Raises:
            InvalidInput: The run was created without a monitor, and none is given.
        """
        if monitor is not None and not isinstance(monitor, Monitor):
            raise InvalidInput(
                "not a monitor", expected="Monitor(metric=..., mode=...)", found=repr(monitor)
            )
        state = self._log.refresh()
        name = None if phase is None else check_phase(phase)
        record = state.best(monitor or self.monitor(phase), name)
        return None if record is None else self._checkpoint(record)

    def monitor(self, phase: int | str | None = None) -> Monitor:
        """Return what decides `best`: the first monitor of the phase, or of the run.

        Raises:
            InvalidInput: There is none.
        """
        declared = phase is not None
        known = self.spec.phase(check_phase(phase)).monitors if declared else self.manifest.monitors
        for monitor in known:
            return monitor
        raise InvalidInput(
            "nothing says which checkpoint is best",
            where=self.id,
            hint="Create the run with monitor=Monitor(metric='loss', mode='min'), or pass one.",
        )

    def find(self, n: int) -> Checkpoint:
        """Return the checkpoint that commit `n` added, superseded or not.

        Raises:
            NotFound: The commit added none.
        """
        if n not in self.manifest.by_n:
            raise NotFound("this commit added no checkpoint", where=f"{self.id}: commit {n}")
        return self._checkpoint(self.manifest.by_n[n])

    def _checkpoint(self, record: CheckpointRecord) -> Checkpoint:
        return Checkpoint(self._store, self._log, record)

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

        Raises:
            InvalidInput: `at` is another run's.
            Conflict: `at` is superseded or evicted.
            RestoreFailed: Every checkpoint is damaged; the message lists each one and why.
        """
        self._trainer.settle()
        if at is None:
            candidates = list(reversed(self.checkpoints()))
            return restore_newest(self._trainer, candidates, map_location)
        check_source(self.id, at)
        state = at.load(map_location=map_location)
        self._trainer.resume_at(at)
        return Restored(state, at, ())

    # Following

    def watch(
        self,
        phase: int | str | None = None,
        *,
        group: str = "default",
        hold_s: float = 3600,
        poll_s: float = 1.0,
        longest_poll_s: float = 30.0,
        timeout_s: float | None = None,
        follow: bool = True,
        follower: str | None = None,
    ) -> Watch:
        """Follow the run: each checkpoint comes once to one follower of a group, in log order.

        A checkpoint is claimed before it comes, and acknowledged when the loop asks for the next
        one. A loop that is left by an exception or `break` leaves the last checkpoint
        unacknowledged, so that it is done again once its hold is over: at least once, never lost.
        `acknowledge()` on what this returns says before a `break` that it is done. Superseded and
        evicted checkpoints, and those held back for weights that are not finite, do not come.

        The loop ends by itself when the run is completed, failed or dropped and the group is done
        with all of it. Waiting costs one request a poll.

        Args:
            phase: Only checkpoints of this phase.
            group: Followers that share the checkpoints out; every other group gets all of them.
            hold_s: Seconds for which nobody else of the group gets a checkpoint and retention lets
                it alone; afterwards a follower that said nothing is taken for dead.
            poll_s: Seconds between looks at the log; twice as long after each look that finds
                nothing new.
            longest_poll_s: At most so long.
            timeout_s: End the loop after so many seconds without a checkpoint; never without it.
            follow: Whether to wait for more; `False` gives what is there now.
            follower: A name that outlives this process, such as a job's id: started again under
                it, a follower goes on with what it held. Only one may bear it at a time. Random
                without it.

        Raises:
            InvalidInput: The run has no such phase, or a name or a time is not legal.
        """
        return Watch(
            self.committer,
            phase,
            group=group,
            hold_s=hold_s,
            poll_s=poll_s,
            longest_poll_s=longest_poll_s,
            timeout_s=timeout_s,
            follow=follow,
            follower=follower,
        )

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

    def seed_sequence(self, component: int, phase: int | str | None = None) -> SeedSequence:
        """Return the `numpy.random.SeedSequence` of one component that a phase seeds.

        Args:
            component: Its index among the components that are seeded.
            phase: The phase; the one that the run is in without it.

        Raises:
            InvalidInput: The phase has no number and is not declared.
        """
        created, first = self.manifest.created, self.spec.phases[:1]
        assert created is not None  # a handle is of a run that was begun
        named = check_phase(phase) if phase is not None else self.manifest.phase
        name = named or (first[0].name if first else DEFAULT_PHASE)
        return child(int(created.seed, 16), phase_number(self.spec, name), component)

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

    def gate(self, name: str) -> Checkpoint:
        """Return a gate. Loading it never falls back: damage is an error.

        Raises:
            NotFound: It is not set.
        """
        found = pins.find_pin(self._log.refresh(), "gate", name)
        assert found.checkpoint is not None  # replay has every gate name one
        return self.find(found.checkpoint)

    def add_artifact(self, name: str, state: object) -> Stored:
        """Keep a state beside the checkpoints for good; `RUN/artifacts/NAME` finds it.

        Args:
            name: Given once; adding the same state again changes nothing.
            state: As for `save`.

        Raises:
            Conflict: The name holds another state.
        """
        return pins.add_artifact(self.committer, name, state)

    def artifact(self, name: str) -> Stored:
        """Return an artifact.

        Raises:
            NotFound: There is none of that name.
        """
        found = pins.find_pin(self._log.refresh(), "artifact", name)
        return Stored(self._store, self._log, found.manifest, found.ref)

    @property
    def releases(self) -> Releases:
        """Published states under semantic versions, each with a model card."""
        return Releases(self.committer)

    @property
    def pool(self) -> OpponentPool:
        """The opponent pool."""
        return self._pool

    def stream(self, name: str) -> Stream:
        """Return an append-only history of this run; it need not exist yet."""
        return Stream(self.committer, name)

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
            MissingObject: Collection has removed what it held.
        """
        chosen = [pins.own(self.committer, one, "undo") for one in checkpoints]
        back = pruning.undo(self.committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def evicted(self) -> list[Checkpoint]:
        """Return the checkpoints that retention let go, as of now, oldest first."""
        state = self._log.refresh()
        return [self._checkpoint(one) for one in state.checkpoints if one.evicted is not None]

    def drop(self, reason: str) -> None:
        """Release everything that the run holds, gates and releases included. Cannot be undone.

        Args:
            reason: Why, for whoever reads the log.
        """
        pruning.drop(self.committer, reason)

    def _last_evicted(self) -> list[int]:
        said = [a for commit in self.history() for a in commit.actions if isinstance(a, Evict)]
        return pruning.last_evicted(self._log.state, said)

    # How it stands

    def set_status(self, status: RunStatus) -> None:
        """Say how the run stands.

        Raises:
            InvalidInput: There is no such status.
        """
        if status not in get_args(RunStatus):
            raise InvalidInput(
                "not a status", expected=", ".join(get_args(RunStatus)), found=repr(status)
            )
        self.committer.commit(lambda state: [SetStatus(status=status)])  # noqa: ARG005

    def history(self) -> Iterator[Commit]:
        """Yield every commit, oldest first, as the log holds it now."""
        for slot in self._log.slots():
            for _, commit in slot.commits:
                yield commit

    def close(self) -> None:
        """Finish a save under way. The handle can be used again."""
        self._trainer.close()
