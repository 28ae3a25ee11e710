"""The one trainer of a run: saves, one after another or one in the background.

What a save is made of is the business of `registry.trainer.save_request`, what it says that of
`registry.trainer.save_commit`, who may say it that of `registry.charge`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import RLock

from registry.actions import Action, Line, RunStatus, SetStatus
from registry.charge import Charge
from registry.checkpoint import Checkpoint
from registry.committer import Committer, Plan, preview
from registry.errors import IntegrityError
from registry.finite import nonfinite_paths
from registry.log import commit_line
from registry.pytree import FlatState
from registry.state import RunManifest
from registry.trainer.save_commit import SaveCommit
from registry.trainer.save_request import PreparedSave, SaveRequest, prepare_save
from registry.writer import placed_keys
from registry.writing.staging import Staging

_LOGGER = logging.getLogger("holdfast")


class PendingSave:
    """A save under way. The state it was given may change meanwhile."""

    def __init__(self, future: Future[Checkpoint]) -> None:
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Return whether it is finished, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Return the checkpoint once its commit is durable.

        Raises:
            RegistryError: The save failed; nothing of it is visible, except that StoreUnavailable
                leaves that open.
            TimeoutError: It is not finished in time.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            raise
        except BaseException:
            # Not where the waiting itself was interrupted.
            self._told = self._future.done()
            raise

    def settle(self) -> None:
        """Wait; raise what the save failed with unless `wait` has told the caller already."""
        if self._future.exception() is not None and not self._told:
            self.wait()


class Trainer:
    """The saving side of a run's handle. It is in charge from its first save on."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._log = committer.log
        self._charge = Charge(committer.log.run_id)
        self._lock = RLock()
        self._handing_over = RLock()
        self._pid = os.getpid()
        self._stagings: dict[str, Staging] = {}
        self._background: ThreadPoolExecutor | None = None
        self._pending: PendingSave | None = None

    def save(self, state: object, request: SaveRequest) -> Checkpoint:
        """Store and commit a state."""
        self.settle()
        return self._store_and_commit(prepare_save(state, request, self._log.state))

    def save_async(self, state: object, request: SaveRequest) -> PendingSave:
        """Copy a state, then store and commit it in the background."""
        with self._handing_over:  # or another thread's copy would land on the one being saved
            self.settle()
            prepared = prepare_save(state, request, self._log.state).copied(self._stage)
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "holdfast-save")
            self._pending = PendingSave(self._background.submit(self._store_and_commit, prepared))
            return self._pending

    def commit(self, compose: Callable[[RunManifest], Sequence[Action]], plan: Plan) -> RunManifest:
        """Commit something that only the trainer of a run may, and take the run over by it."""
        self.settle()

        def claimed(state: RunManifest) -> Sequence[Action]:
            self._charge.check_allowed(state, takes_over=True)
            claims = self._charge.claim(state)
            return [*claims, *compose(preview(state, claims))]

        with self._lock:
            state = self._committer.commit(claimed, plan)
            self._charge.committed()
            return state

    def settle(self) -> None:
        """Wait for the save under way; raise what it failed with, unless its caller knows."""
        self._start_anew_after_fork()
        pending = self._pending
        if pending is None:
            return
        try:
            pending.settle()
        finally:
            # An interrupted wait must not forget it: its copy may not be overwritten yet.
            if pending.done():
                self._pending = None

    def close(self) -> None:
        """Finish the save under way and stop the thread."""
        try:
            self.settle()
        finally:
            if self._background is not None:
                self._background.shutdown()
                self._background = None

    def leave(self, status: RunStatus) -> None:
        """Set the run's status, unless somebody else trains it."""

        def compose(state: RunManifest) -> Sequence[Line] | None:
            others = state.writer is not None and self._charge.is_fenced(state)
            if others or state.dropped is not None:
                return None
            return [commit_line(state, [SetStatus(status=status)])]

        self._log.append(compose)

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: the next save supersedes whatever came after it."""
        self._charge.resume_at(checkpoint.n, self._log.state)

    def distrust(self, checkpoint: Checkpoint) -> None:
        """Never build on what a damaged checkpoint holds; write it anew when it comes up again."""
        with suppress(IntegrityError):
            keys = placed_keys(checkpoint.place, checkpoint.placement)
            self._committer.writer.distrusted |= keys

    def _stage(self, name: str, state: FlatState) -> FlatState:
        staging = self._stagings.setdefault(name, Staging())
        return staging.copy(state, self._committer.store.pools.hashing)

    def _start_anew_after_fork(self) -> None:
        """In a forked child be another trainer: the thread stayed behind, the token is taken."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._charge.reset()
            self._background, self._pending, self._stagings = None, None, {}
            self._lock, self._handing_over = RLock(), RLock()
            self._committer.start_anew_after_fork()

    def _store_and_commit(self, save: PreparedSave) -> Checkpoint:
        with self._lock:
            takes_over = save.request.takes_over
            run, store = self._log.state, self._committer.store
            self._charge.check_allowed(run, takes_over=takes_over)
            nonfinite = nonfinite_paths(save.state, run.spec.finite, store.pools.hashing)
            if nonfinite and not save.request.allow_nonfinite:
                _LOGGER.warning(
                    "%s: step %d is recorded and held back: NaN or infinity in %s",
                    run.run_id,
                    save.request.step,
                    ", ".join(nonfinite),
                )
            commit = SaveCommit(self._committer, self._charge, save, nonfinite)
            self._committer.commit(commit.actions, commit.plan)
            if takes_over:
                self._charge.committed()
            record = self._log.knowing(commit.outcome).by_n[commit.outcome]
            return Checkpoint(store, self._log, record)
