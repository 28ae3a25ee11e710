"""One handle's hold on a run: its writer token, and where its training continues.

Every saver has an `Ownership`. It makes the commits that only the owner of a run may make, and sets
the status. `holdfast.registry.history.writer_token` decides who owns a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock

from holdfast.registry.errors import IntegrityError
from holdfast.registry.history import (
    WriterToken,
    check_not_completed,
    store_time_ms,
    warn_of_unrated,
)
from holdfast.registry.history.actions import Action, RunStatus, SetStatus
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving import ending
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.ending import failure_text
from holdfast.registry.saving.logged import StepLog
from holdfast.registry.saving.save_commit import SaveCommit
from holdfast.registry.saving.save_request import PlannedSave, SaveRequest
from holdfast.registry.writing import (
    Committer,
    Composed,
    NewCommit,
    Written,
    after_commit,
    placed_keys,
)

_LOGGER = logging.getLogger("holdfast")


class Ownership:
    """The hold of one handle on a run, and its line of training."""

    logged: StepLog  # what `run.log` was given and no commit has

    def __init__(
        self,
        committer: Committer,
        behind: Callable[[], Callable[[SetStatus], bool] | None] = lambda: None,
    ) -> None:
        self.committer = committer  # of the same handle
        self.store, self.log = committer.store, committer.log
        self._hold_token(WriterToken(committer.log.run_id))
        self.earlier = EarlierSteps()  # the components of the steps that this handle knows
        #: Failed saves since the last good one, after which training continued.
        self.failed: list[SaveRequest] = []
        self.lock = RLock()  # held during a commit that takes the run over
        self.logged = StepLog(self)
        #: Whether a signal has ended the training run; it is then never `completed`, nor `failed`
        #: by an error that the signal caused.
        self.is_stopped = False
        #: Compares the state and step of a save after a resume; returns whether it is the last one
        #: to compare, and never raises.
        self.at_first_saves: Callable[[object, int], bool] | None = None
        self._behind = behind
        self._unrated_told: set[str] = set()
        self._pid = os.getpid()

    # The line of training: with a journal, `JournaledLine` answers these

    @property
    def run(self) -> RunManifest:
        """The run, as far as this handle has read its log."""
        return self.log.run

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint that training resumed from, before the first save."""
        resumed = self.run.by_n.get(-1 if (n := self.token.resumed_at) is None else n)
        return None if resumed is None else resumed.step

    def refresh(self) -> RunManifest:
        """Read the log; return the run."""
        return self.log.refresh()

    def newest_first(self) -> list[Checkpoint]:
        """Return the kept checkpoints of the log as read so far, newest first."""
        return [Checkpoint(self.store, self.log, one) for one in reversed(self.run.live())]

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Continue from exactly a checkpoint: the next save supersedes all that came later."""
        self.token.resume_at(checkpoint.handle.n, self.run)
        self.failed.clear()
        self.logged.begin()
        self.earlier.forget()

    def resume_after(self, checkpoint: Checkpoint) -> str | None:
        """Continue from a checkpoint and, if it is the newest, from the pivots after it."""
        run = self.run
        self.failed.clear()
        self.logged.begin()
        kept = run.pivots_after(checkpoint.handle.n)
        self.token.resume_at(checkpoint.handle.n, run, keeps=kept[-1].n if kept else None)
        for one in run.pivots:
            if one.n > checkpoint.handle.n and not kept:
                _LOGGER.warning(
                    "%s: the next save undoes the pivot %s, which came after %s; to keep it, pivot "
                    "again",
                    run.run_id,
                    one.name,
                    checkpoint.ref,
                )
        return kept[-1].name if kept else None

    def asks(self) -> None:
        """Note that the handle asked for a state to continue from, even if none exists."""
        self.token.has_asked = True

    def has_read(self, checkpoint: Checkpoint) -> None:
        """Note that every byte of a checkpoint was read and verified: a save may rely on it."""
        self.committer.writer.objects.read.add(checkpoint.handle.reader.place)

    def suspect(self, checkpoint: Checkpoint) -> None:
        """Do not use the registry's objects of a damaged checkpoint; a save writes them again."""
        if checkpoint.durable_in != "registry":
            return
        with suppress(IntegrityError):
            reader = checkpoint.handle.reader
            keys = placed_keys(reader.place, reader.placement)
            self.committer.writer.objects.suspect |= keys

    # The writer token

    def lend(self) -> WriterToken:
        """Return the writer token, so that another process saves for this handle."""
        self._owns()
        return self.token.lend(self.run)

    def borrow(self, token: WriterToken) -> None:
        """Save under the writer token of another process; that process sets the status."""
        self._hold_token(token)
        self.earlier.forget()

    def _hold_token(self, token: WriterToken) -> None:
        self.token = token
        token.now_ms = partial(store_time_ms, self.store, self.log)

    def taken(self) -> None:
        """Note that a commit under the token has landed: this process owns the run."""
        self.is_stopped = False
        self.token.committed()
        self._owns()

    def _owns(self) -> None:
        ending.owns(self.store, self.log.run_id, self.token.token, self._behind())

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked process: thread and token belong to its parent."""
        return self._pid != os.getpid()

    def reset(self) -> None:
        """In a forked process become another saver."""
        self._pid = os.getpid()
        self.token.reset()
        self.lock = RLock()
        self.logged.begin()

    # Commits

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the owner of a run may make; it takes the run over."""
        with self.lock:
            claimed = Claimed(self.token, change)
            run = self.committer.commit(claimed)
            if claimed.has_actions:
                self.taken()
            return run

    def save(self, save: PlannedSave, failed: Sequence[SaveRequest]) -> Checkpoint:
        """Write and commit a save with the stream entries of failed ones."""
        with self.lock:
            writer = self.committer.writer
            commit = SaveCommit(writer, self.token, save, self.earlier, failed=failed)
            return self.carry_through(commit, save)

    def carry_through(self, commit: SaveCommit, save: PlannedSave) -> Checkpoint:
        """Write and commit a save; return its checkpoint."""
        self.committer.commit(commit)
        self.warn(commit)
        if save.request.takes_over:
            self.taken()
            self.earlier.remember(save.phase, save.request.step, commit.written.components)
        return self.checkpoint(commit.checkpoint_n)

    def checkpoint(self, n: int) -> Checkpoint:
        """Return the checkpoint of a commit."""
        return Checkpoint(self.store, self.log, self.log.knowing(n).by_n[n])

    def warn(self, commit: SaveCommit) -> None:
        """Warn of a checkpoint that is held back, and of evictions without a best."""
        commit.warn_of_nonfinite()
        warn_of_unrated(self.log.run_id, commit.unrated, self._unrated_told)

    # The status

    def set_status(self, status: RunStatus) -> None:
        """Set the run's status; any handle may."""

        def actions(run: RunManifest) -> Sequence[Action]:
            self.check_status(run, status)
            return [SetStatus(status=status)]

        self.committer.commit(actions)

    @staticmethod
    def check_status(run: RunManifest, status: RunStatus) -> None:
        """Refuse to say that a completed run stopped."""
        if status in ("interrupted", "failed"):
            check_not_completed(run)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, unless another trainer owns the run; after a signal `interrupted`."""
        said = self.said(status, error)
        self.logged.flush(at_the_end=True)

        def actions(run: RunManifest) -> Sequence[Action] | None:
            is_fenced = run.writer is not None and self.token.is_fenced(run)
            is_said = run.dropped is not None or run.status == said.status
            return None if is_fenced or is_said else [said]

        self.committer.commit(Composed(actions, on_dropped=True), waits=False)
        self.ended()

    def said(self, status: RunStatus, error: BaseException | None) -> SetStatus:
        """Return the status at the end of a training run, and `error`, if that ended it."""
        if self.is_stopped or error is None:
            return SetStatus(status="interrupted" if self.is_stopped else status)
        return SetStatus(status=status, reason=failure_text(error))

    def ended(self) -> None:
        """Note that the status of the run is set."""
        ending.has_ended(self.store, self.log.run_id, self.token.token)


class Claimed(NewCommit):
    """A commit that first takes the run over."""

    def __init__(self, writer_token: WriterToken, change: NewCommit) -> None:
        self._writer_token = writer_token
        self._change = change
        self.has_actions = False  # whether the commit had any actions for the run

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
