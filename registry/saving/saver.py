"""The saver of a run: it saves one state after another, in the foreground or in the background.

`holdfast.registry.saving.save_request` checks the arguments of a save,
`holdfast.registry.saving.save_commit` writes and commits it, and
`holdfast.registry.history.writer_token` decides whether this saver may save.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any, ClassVar

from holdfast.backends.escape import printable
from holdfast.registry.errors import IntegrityError, StorageError
from holdfast.registry.history import RunLog, WriterToken, warn_of_unrated
from holdfast.registry.history.actions import Action, RunStatus, SetStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, LoadReport, Stored
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving import ending
from holdfast.registry.saving.background import Background, check_busy
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.failure import failure_text
from holdfast.registry.saving.pending import Backlog, Busy, PendingSave, exit_wait_s
from holdfast.registry.saving.save_commit import SaveCommit
from holdfast.registry.saving.save_request import PreparedSave, SaveRequest, prepare_save
from holdfast.registry.store import Store
from holdfast.registry.writing import (
    Committer,
    Composed,
    NewCommit,
    Staging,
    Written,
    after_commit,
    placed_keys,
)

_LOGGER = logging.getLogger("holdfast")


class Saver:
    """The saving side of a run's handle. It owns the run from its first save on.

    A local save, from the call to the last byte:

    1. `save` waits for a save in the background. `save_async` copies the state here, and a thread
       does the rest.
    2. `prepare_save` flattens the state and checks it against the rules of the run.
    3. `SaveCommit` is made: the change that `Committer.commit` carries through steps 4 to 9.
    4. `SaveCommit.check` refuses the save if another trainer owns the run, or its rules forbid it.
    5. `SaveCommit.write_states` hashes chunks in threads, and skips those that a base holds.
    6. The new chunks are encoded and put as packs, while the log is read in another thread.
    7. The manifest and the placement are put. Nothing is visible yet.
    8. `Writer.commit` checks that no sweep has condemned an object that the commit names.
    9. `RunLog.append` puts the slot: checkpoint, evictions and stream entries appear together. If
       another writer took the slot, the lines are composed again; after a sweep, back to step 4.
    10. The saver notes that it owns the run, and returns the `Checkpoint`.

    Attributes:
        is_stopped: Whether a signal has ended the training run; it is then never `completed`, nor
            `failed` by an error that the signal caused.
        is_collective: Whether all ranks of a job save together.
        failed_saves: Number of failed saves after which the training run continued.
    """

    is_collective: ClassVar[bool] = False

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._log = committer.log
        self.is_stopped = False
        self.failed_saves = 0
        self._failed: list[SaveRequest] = []  # failed saves since the last good one
        self._writer_token = WriterToken(committer.log.run_id)
        self._earlier = EarlierSteps()
        self._unrated_told: set[str] = set()
        self._lock = RLock()
        self._handing_over = RLock()
        self._pid = os.getpid()
        self._background = Background(self._store, self._copy)

    @property
    def run(self) -> RunManifest:
        """The run, as far as this handle has read its log."""
        return self._log.run

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint that training resumed from, before the first save."""
        resumed = self._log.run.by_n.get(-1 if (n := self._writer_token.resumed_at) is None else n)
        return None if resumed is None else resumed.step

    def refresh(self) -> RunManifest:
        """Read the log; return the run."""
        return self._log.refresh()

    def asked(self, step: object, **options: Any) -> SaveRequest:
        """Check the arguments of a save; ranks that save together all hear of an error."""
        with self.abstaining():
            return SaveRequest(step, every_rank=self.is_collective, **options)

    def save(self, state: object, request: SaveRequest) -> Checkpoint:
        """Store and commit a state."""
        with self.abstaining(request.step):
            self.settle()
        return self._store(self._prepare(state, request))

    def stage(
        self, state: object, request: SaveRequest, copy: Callable[[str, FlatState], FlatState]
    ) -> PreparedSave:
        """Copy a state for `save_staged`; another thread or process may call that."""
        self.settle()
        return self._flattened(state, request).copied(copy)

    def save_staged(self, staged: PreparedSave) -> Checkpoint:
        """Store and commit a staged state."""
        with self.abstaining(staged.request.step):
            self.settle()
        return self._store_and_commit(staged)

    def lend(self) -> WriterToken:
        """Return the writer token, so that another process saves for this handle."""
        ending.owns(self._committer.store, self._log.run_id, self._writer_token.token)
        return self._writer_token.lend(self.run)

    def borrow(self, token: WriterToken) -> None:
        """Save under the writer token of another process; that process sets the status."""
        self._writer_token = token
        self._earlier.forget()

    def save_async(self, state: object, request: SaveRequest, busy: Busy = "wait") -> PendingSave:
        """Copy a state, then store and commit it in the background."""
        check_busy(busy)
        limit_s = exit_wait_s()
        name = f"{self._log.run_id}: step {request.step}"
        with self._handing_over:  # or another thread would overwrite the copy that is being saved
            self._reset_after_fork()
            began = time.monotonic()
            with self.abstaining(request.step):
                if busy == "wait":
                    self._background.settle()
                else:
                    self._background.raise_failure()
            waited_s = time.monotonic() - began
            if busy == "skip" and self._background.is_busy:
                skipped = PendingSave(Future(), name, limit_s)
                skipped.give_up("skipped")
                return skipped
            prepared = self._prepare(state, request)
            return self._background.submit(prepared, name, limit_s, waited_s)

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the owner of a run may make; it takes the run over."""
        self.settle()
        with self._lock:
            claimed = Claimed(self._writer_token, change)
            run = self._committer.commit(claimed)
            if claimed.has_actions:
                self._committed()
            return run

    def abstain(self, error: BaseException, step: int | None) -> None:
        """Do nothing; a rank of a collective save tells the others that it cannot save."""

    @contextmanager
    def abstaining(self, step: int | None = None) -> Iterator[None]:
        """Abstain from a save if a step before it fails, such as the check of its arguments."""
        try:
            yield
        except BaseException as error:
            self.abstain(error, step)
            raise

    def settle(self) -> None:
        """Wait for the running saves; raise the first error that was not raised already."""
        self._reset_after_fork()
        self._background.settle()

    def close(self) -> None:
        """Finish the running saves and stop the thread."""
        try:
            self.settle()
        finally:
            self._background.close()

    def wait(self, *, remote: bool, timeout_s: float | None) -> None:  # noqa: ARG002
        """Wait for the running saves; they are in the registry then."""
        self._background.wait(timeout_s)
        self.settle()

    def backlog(self) -> Backlog | None:
        """Count the saves that only this machine's journal holds; `None` without a journal."""
        return None

    def newest_first(self) -> list[Checkpoint]:
        """Return the kept checkpoints of the log as read so far, newest first."""
        store, live = self._committer.store, self._log.run.live()
        return [Checkpoint(store, self._log, record) for record in reversed(live)]

    def set_status(self, status: RunStatus) -> None:
        """Set the run's status; any handle may."""
        self.settle()
        self._committer.commit(lambda run: [SetStatus(status=status)])  # noqa: ARG005

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, unless another trainer owns the run; after a signal `interrupted`."""
        said = self._said(status, error)

        def actions(run: RunManifest) -> Sequence[Action] | None:
            is_fenced = run.writer is not None and self._writer_token.is_fenced(run)
            is_said = run.dropped is not None or run.status == said.status
            return None if is_fenced or is_said else [said]

        self._committer.commit(Composed(actions, on_dropped=True), waits=False)
        self._ended()

    def _said(self, status: RunStatus, error: BaseException | None) -> SetStatus:
        """Return the status at the end of a training run, and `error`, if that ended it."""
        if self.is_stopped or error is None:
            return SetStatus(status="interrupted" if self.is_stopped else status)
        return SetStatus(status=status, reason=failure_text(error))

    def waiting_entry(self, checkpoint: Checkpoint, stream: str) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return the last entry of a stream at a checkpoint, if only a journal holds it."""
        return None

    def fill(
        self, stored: Stored, target: object, component: str | None, *, strict: bool
    ) -> LoadReport:
        """Load a stored state into the tensors of a target."""
        return stored.load_into(target, component=component, strict=strict)

    def looks_for_a_state(self) -> None:
        """Note that the handle asked for a state to continue from, even if none exists."""
        self._writer_token.has_asked = True

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Continue from exactly a checkpoint: the next save supersedes all that came later."""
        self._writer_token.resume_at(checkpoint.n, self._log.run)
        self._failed.clear()
        self._earlier.forget()

    def resume_after(self, checkpoint: Checkpoint) -> str | None:
        """Continue from a checkpoint and, if it is the newest, from the pivots after it."""
        run = self._log.run
        self._failed.clear()
        kept = run.pivots_after(checkpoint.n)
        self._writer_token.resume_at(checkpoint.n, run, keeps=kept[-1].n if kept else None)
        for one in run.pivots:
            if one.n > checkpoint.n and not kept:
                _LOGGER.warning(
                    "%s: the next save undoes the pivot %s, which came after %s; to keep it, pivot "
                    "again",
                    run.run_id,
                    one.name,
                    checkpoint.ref,
                )
        return kept[-1].name if kept else None

    def has_read(self, checkpoint: Checkpoint) -> None:
        """Note that every byte of a checkpoint was read and verified: a save may rely on it."""
        self._committer.writer.objects.read.add(checkpoint.handle.reader.place)

    def suspect(self, checkpoint: Checkpoint) -> None:
        """Do not use the objects of a damaged checkpoint; write them again if a save has them."""
        with suppress(IntegrityError):
            reader = checkpoint.handle.reader
            keys = placed_keys(reader.place, reader.placement)
            self._committer.writer.objects.suspect |= keys

    def _copy(self, staging: Staging, state: FlatState) -> FlatState:
        return staging.copy(state, self._committer.store.pools.hashing)

    def _reset_after_fork(self) -> None:
        """In a forked process become another saver: thread and token belong to the parent."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._writer_token.reset()
            self._background.reset()
            self._lock, self._handing_over = RLock(), RLock()

    def _ended(self) -> None:
        ending.has_ended(self._committer.store, self._log.run_id, self._writer_token.token)

    def _committed(self) -> None:
        self.is_stopped = False
        self._writer_token.committed()
        ending.owns(self._committer.store, self._log.run_id, self._writer_token.token)

    def _prepare(self, state: object, request: SaveRequest) -> PreparedSave:
        return self._flattened(state, request)

    def _flattened(self, state: object, request: SaveRequest) -> PreparedSave:
        return prepare_save(state, request, self.run)

    def _store(self, save: PreparedSave) -> Checkpoint:
        """Store and commit a save; note an error of the store if the training run continues."""
        save.request.carries = tuple(self._failed)
        try:
            made = self._store_and_commit(save)
        except StorageError as error:
            if save.request.forgives(len(self._failed)):
                self._failed.append(save.request)
                self.failed_saves += 1
                _LOGGER.warning(
                    "%s: step %d was not saved, and training continues (%d failed in a "
                    "row, %d may): %s",
                    self._log.run_id,
                    save.request.step,
                    len(self._failed),
                    save.request.may_fail,
                    error,
                )
            raise
        self._failed.clear()
        return made

    def _store_and_commit(self, save: PreparedSave) -> Checkpoint:
        with self._lock:
            commit = SaveCommit(self._committer.writer, self._writer_token, save, self._earlier)
            return self._carry_through(commit, save)

    def _carry_through(self, commit: SaveCommit, save: PreparedSave) -> Checkpoint:
        """Write and commit a save; return its checkpoint."""
        self._committer.commit(commit)
        self._warn(commit, save.request)
        if save.request.takes_over:
            self._committed()
            self._earlier.remember(save.phase, save.request.step, commit.components)
        record = self._log.knowing(commit.outcome).by_n[commit.outcome]
        return Checkpoint(self._committer.store, self._log, record)

    def _warn(self, commit: SaveCommit, request: SaveRequest) -> None:
        """Warn of a checkpoint that is held back, and of evictions without a best."""
        if commit.nonfinite and not request.allow_nonfinite:
            _LOGGER.warning(
                "%s: step %d is recorded and held back: NaN or infinity in %s",
                self._log.run_id,
                request.step,
                printable(", ".join(commit.nonfinite)),
            )
        warn_of_unrated(self._log.run_id, commit.unrated, self._unrated_told)


class Claimed(NewCommit):
    """A commit that first takes the run over.

    Attributes:
        has_actions: Whether the commit had any actions for the run.
    """

    def __init__(self, writer_token: WriterToken, change: NewCommit) -> None:
        self._writer_token = writer_token
        self._change = change
        self.has_actions = False

    def check(self, run: RunManifest) -> None:
        """Refuse the commit for the same reasons as a save."""
        self._writer_token.check_allowed(run, takes_over=True)

    def write_states(self) -> Sequence[Written]:
        """Write the states of the commit."""
        return self._change.write_states()

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the claims, then the actions of the commit for the run after them."""
        claims = self._writer_token.claim(run)
        actions = self._change.actions(after_commit(run, claims))
        self.has_actions = actions is not None
        return None if actions is None else [*claims, *actions]


@dataclass(frozen=True, slots=True)
class RunHandle:
    """An open run as the rest of Holdfast takes it: what reads it, commits to it and saves."""

    store: Store
    log: RunLog
    committer: Committer
    saver: Saver
