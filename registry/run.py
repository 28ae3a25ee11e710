"""One training run as its users hold it: saving into it, finding in it, coming back to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, get_args

from registry.actions import Action, Commit, Monitor, RunStatus, SetStatus, SetTag
from registry.checkpoint import Checkpoint
from registry.digest import Digest
from registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    NotFound,
    RegistryError,
    RestoreFailed,
)
from registry.log import RunLog, commit_line
from registry.plain import check_name, check_phase, decode_plain
from registry.state import CheckpointRecord, RunManifest
from registry.store import Store
from registry.trainer import PendingSave, SaveRequest, Trainer


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint that `restore` passed over.

    Attributes:
        ref: Which one.
        digest: Its id.
        reason: What was wrong with it.
    """

    ref: str
    digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` came back with.

    Attributes:
        state: The state.
        checkpoint: Where it is from.
        report: The newer checkpoints that could not be loaded, newest first.
    """

    state: Any
    checkpoint: Checkpoint
    report: tuple[Attempt, ...]


class Run:
    """A run of a registry. One handle trains; any number of others read and annotate.

    As a context manager the handle that trains sets the run's status: `completed` at the end of
    the block, `interrupted` when it is left by a signal or `sys.exit`, `failed` by any other
    exception. A handle that only reads, or that was fenced, leaves the status alone.
    """

    def __init__(self, store: Store, log: RunLog) -> None:
        self._store = store
        self._log = log
        self._trainer = Trainer(store, log)

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

    def refresh(self) -> Self:
        """Read what others have committed meanwhile."""
        self._log.refresh()
        return self

    # Saving

    def save(
        self,
        state: object,
        *,
        step: int,
        phase: int | str = "main",
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
    ) -> Checkpoint:
        """Keep a state; return when it is durable.

        Args:
            state: A dict of whatever the training program wants back, tensors and plain values
                nested at will; objects with `state_dict()` are taken by it.
            step: Training step, update or epoch that the state belongs to.
            phase: Phase of the run.
            metrics: Numbers that describe the state; more can follow by `Checkpoint.report`.
            meta: Anything plain to keep beside the state, outside its id.

        Returns:
            The checkpoint; where the same state was saved at this step already, that one, with
            `metrics` added to it.

        Raises:
            InvalidInput: Something cannot be stored; the message names its path.
            Fenced: Another trainer has taken the run over.
            Conflict: The step holds another state already, or the run is completed.
            StorageError: The store failed; nothing is visible, except that StoreUnavailable
                leaves that open. Repeating the save is safe either way.
        """
        return self._trainer.save(state, SaveRequest.check(step, phase, metrics, meta))

    def push(
        self,
        state: object,
        *,
        step: int,
        phase: int | str = "main",
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
    ) -> Checkpoint:
        """Keep a state that another program made; its trainer stays in charge of the run.

        Args, result and errors are those of `save`; nobody is fenced.
        """
        request = SaveRequest.check(step, phase, metrics, meta, takes_over=False)
        return self._trainer.save(state, request)

    def save_async(
        self,
        state: object,
        *,
        step: int,
        phase: int | str = "main",
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
    ) -> PendingSave:
        """Keep a state in the background; return once it has been copied.

        The copy goes to host memory that is used again from save to save. One save is under way
        at a time: the next one waits for it, and raises what it failed with.

        Args and errors are those of `save`.
        """
        return self._trainer.save_async(state, SaveRequest.check(step, phase, metrics, meta))

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
            phase: Only checkpoints of this phase.
            monitor: What to compare by; the run's first monitor without it.

        Raises:
            InvalidInput: The run was created without a monitor, and none is given.
        """
        chosen = monitor or self.monitor()
        if not isinstance(chosen, Monitor):
            raise InvalidInput(
                "not a monitor", expected="Monitor(metric=..., mode=...)", found=repr(chosen)
            )
        state = self._log.refresh()
        record = state.best(chosen, None if phase is None else check_phase(phase))
        return None if record is None else self._checkpoint(record)

    def monitor(self) -> Monitor:
        """Return what decides `best`: the run's first monitor.

        Raises:
            InvalidInput: The run was created without one.
        """
        for monitor in self.manifest.monitors:
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
            Conflict: `at` is superseded.
            RestoreFailed: Every checkpoint is damaged; the message lists each one and why.
        """
        if at is not None and not isinstance(at, Checkpoint):
            raise InvalidInput(
                "not a checkpoint",
                expected="run.restore(at=reg.checkpoint('RUN/...'))",
                found=repr(at),
            )
        if at is not None and at.run_id != self.id:
            raise InvalidInput(
                "a run is restored from a checkpoint of its own", where=self.id, found=at.ref
            )
        if at is not None and at.superseded:
            raise Conflict(
                "training has gone back behind this checkpoint already",
                where=at.ref,
                hint="Load it with `checkpoint.load()` and save on into a run of its own.",
            )
        self._trainer.settle()
        candidates = [at] if at is not None else list(reversed(self.checkpoints()))
        passed: list[Attempt] = []
        for checkpoint in candidates:
            try:
                state = checkpoint.load(map_location=map_location)
            except IntegrityError as error:
                if at is not None:
                    raise
                self._trainer.distrust(checkpoint)
                passed.append(Attempt(checkpoint.ref, checkpoint.digest, error.summary))
                continue
            self._trainer.resume_at(checkpoint)
            return Restored(state, checkpoint, tuple(passed))
        if not passed:
            return None
        listed = "".join(f"\n  {a.ref} ({a.digest.short}): {a.reason}" for a in passed)
        raise RestoreFailed(
            f"none of {len(passed)} checkpoints could be loaded{listed}",
            where=self.id,
            hint="Restore the damaged files from a mirror; `holdfast verify --deep` names them.",
        )

    # Annotating

    def tag(self, name: str, checkpoint: Checkpoint) -> None:
        """Point a movable name at a checkpoint of this run; `RUN/tags/NAME` finds it.

        Raises:
            InvalidInput: The checkpoint is another run's, or the name is not legal.
        """
        if checkpoint.run_id != self.id:
            raise InvalidInput(
                "a tag names a checkpoint of its own run", where=name, found=checkpoint.ref
            )
        self._append(SetTag(name=check_name(name, "a tag"), checkpoint=checkpoint.record.n))

    def set_status(self, status: RunStatus) -> None:
        """Say how the run stands.

        Raises:
            InvalidInput: There is no such status.
        """
        if status not in get_args(RunStatus):
            raise InvalidInput(
                "not a status", expected=", ".join(get_args(RunStatus)), found=repr(status)
            )
        self._append(SetStatus(status=status))

    def history(self) -> Iterator[Commit]:
        """Yield every commit, oldest first, as the log holds it now."""
        for slot in self._log.slots():
            for _, commit in slot.commits:
                yield commit

    def close(self) -> None:
        """Finish a save under way. The handle can be used again."""
        self._trainer.close()

    def _append(self, action: Action) -> None:
        self._log.append(lambda state: [commit_line(state, [action])])
