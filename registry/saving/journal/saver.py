"""The saver with a journal: a save returns when it is durable on this machine."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from holdfast.registry.errors import Fenced, RegistryError, StorageError
from holdfast.registry.history import PlacedState
from holdfast.registry.history.actions import Action, RunStatus, SetStatus
from holdfast.registry.history.replay import NeedsHistory, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving.journal.background import finish_at_the_end, set_status_behind
from holdfast.registry.saving.journal.checkpoint import await_room
from holdfast.registry.saving.journal.entry_saves import EntryToken, JournaledSave
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.line import JournaledLine
from holdfast.registry.saving.journal.settings import Journal
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.saving.ownership import Ownership
from holdfast.registry.saving.pending import Backlog, exit_wait_s
from holdfast.registry.saving.pipeline import Pipeline
from holdfast.registry.saving.save_request import (
    PlannedSave,
    SaveRequest,
    plan_save,
    take_apart,
    without_landed,
)
from holdfast.registry.writing import Committer, NewCommit

_LOGGER = logging.getLogger("holdfast")


class JournaledSaver:
    """A saver whose saves are durable in a journal first.

    A journaled save, from the call to the last byte; J1 to J9 are rules of docs/spec.md:

    1. `Pipeline.save` waits, and has `prepare` here check the state as in `LocalSaver`, against the
       expected run: the log, then the entries. Then it calls `make` here.
    2. It raises outcomes of earlier saves that the caller must know: lost, stranded, refused.
    3. `await_room` waits until the states fit into the bound of the journal.
    4. `EntryStates` opens a store for the entry; objects of the entry before are linked into it.
    5. `JournaledSave.check` refuses a dropped or completed run early.
    6. `JournaledSave.write_states` puts packs, manifests and placements into the entry's
       store (`WrittenSave`).
    7. Its actions are composed for the expected run, or the save is refused. The first save of a
       handle then takes the run over in the registry, reads that back (J1), and composes again.
    8. `JournaledLine.acknowledge` lets `RunFolder.acknowledge` put the entry, adds it to the
       expected run, and wakes the carrier: the save is durable on this machine, and returns.
    9. A thread carries the entries in order (J5): `CarriedSave` copies an entry's states into the
       registry and commits them there, once, if the run was not taken over elsewhere (J2, J3).
    10. The carrier reads the slot back (J4), keeps a copy of the log's end, notes the outcome, and
        deletes carried entries, but for the newest entry and the newest save.
    """

    def __init__(self, committer: Committer, journal: Journal) -> None:
        self._committer, self._log = committer, committer.log
        #: The handle's hold on the run. The end of a process sets the status behind what waits.
        self.ownership = Ownership(
            committer,
            lambda: partial(set_status_behind, self.folder, self.line.takeover, self.line.slot),
        )
        #: The journal of the run.
        self.folder = RunFolder(journal, committer.store.config.id, committer.log.run_id)
        #: The run with the entries that wait, and where training continues.
        self.line = JournaledLine(self.ownership, self.folder)
        begin_anew = self.line.begin
        self.pipeline = Pipeline(self.ownership, self.prepare, self.make, begin_anew=begin_anew)
        self.waited_s = 0.0  # seconds that saves have waited at the bound of the journal
        committer.await_earlier = self._await_earlier
        finish_at_the_end(self)

    # Acknowledging

    def prepare(self, state: object, request: SaveRequest) -> PlannedSave:
        """Take a state apart, and check it against the rules of the expected run."""
        return plan_save(take_apart(state, request), self.line.run)

    def make(self, save: PlannedSave, failed: Sequence[SaveRequest]) -> Checkpoint:
        """Acknowledge a save; one that takes nothing over goes straight into the registry."""
        if not save.request.takes_over:
            self.await_entries()  # before the lock, which saves of other threads need
            self.line.expect_anew()
            return self.ownership.save(save, failed)
        with self.ownership.lock:
            with suppress(StorageError):  # their fate is unknown then
                self.line.raise_lost()
            self.line.raise_outcomes()
            self.line.require_kept()
            line = self.line
            self.waited_s += await_room(self.folder, line.carrier, save, line.raise_outcomes)
            with self.folder.lock("writing").held(shared=True):
                states = EntryStates(self.folder, secrets.token_hex(8), self._committer.store)
                try:
                    commit, actions = self._write(save, states, failed)
                except BaseException:
                    states.remove()
                    raise
                return self._acknowledge(save, states, commit, actions)

    def _write(
        self, save: PlannedSave, states: EntryStates, failed: Sequence[SaveRequest]
    ) -> tuple[JournaledSave, Sequence[Action]]:
        """Write the states of a save, and check it; return it with its actions."""
        log, begins = self._log, not self.line.takeover
        if begins:
            if not log.is_copy:
                log.refresh()
            self.line.expect_anew()
        token = EntryToken(log.run_id, begins=begins and self.line.resumes is None)
        bases = self._link_bases(states)
        expected = self.line.run
        lost = without_landed(failed, lambda one: expected.at_step(save.phase, one.step))
        save = replace(save, request=save.request.after(lost))
        commit = JournaledSave(states.writer, token, save, expected, self.ownership.earlier, bases)
        token.continue_from(self.line.resumed_at(), self.line.keeps)
        commit.check(expected)
        commit.write_states()
        states.keep_only(commit.written.states)
        actions = self._compose(commit, token)
        if begins:
            self.line.take_over()
            actions = self._compose(commit, token)
        return commit, actions

    def _acknowledge(
        self,
        save: PlannedSave,
        states: EntryStates,
        commit: JournaledSave,
        actions: Sequence[Action],
    ) -> Checkpoint:
        """Make a save durable. From now on its states belong to an entry, so they stay."""
        # A save that repeats a checkpoint is an entry too: only the carrier, which reads the newest
        # log, knows whether that checkpoint is still there.
        n, line = commit.checkpoint_n, self.line
        entry = line.entry(states.write, save=commit.fields(line.resumes, line.keeps))
        number = line.acknowledge(entry, n, actions)
        self.ownership.warn(commit)
        written = commit.written
        self.ownership.earlier.remember(save.phase, save.request.step, written.components)
        by_name = {"": written.main, **written.companions}
        line.last = states, {name: one.state for name, one in by_name.items()}
        return line.checkpoint(states, number, entry, n)

    def _compose(self, commit: JournaledSave, token: EntryToken) -> list[Action]:
        """Return the actions of a save for the expected run, or refuse the save."""
        token.continue_from(self.line.resumed_at(), self.line.keeps)
        try:
            commit.check(self.line.run)
            return list(commit.actions(self.line.run))
        except NeedsHistory:  # a rule needs the record of an evicted checkpoint
            self._log.recall()
            self.line.expect_anew()
            return list(commit.actions(self.line.run))

    def _link_bases(self, states: EntryStates) -> Mapping[str, PlacedState]:
        """Return the newest states of this handle, linked into the store of a new entry."""
        if self.line.last is None:
            return {}
        before, bases = self.line.last
        if states.link(before, bases.values()):
            return bases
        states.remove()
        return {}

    # Everything else is committed to the registry directly, after the entries.

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the owner may make, once the registry has every save."""
        self.pipeline.settle()
        self.await_entries()
        with self.ownership.lock:
            token = self.ownership.token
            self._log.refresh()
            if not self.line.takeover:
                token.prefix = self.folder.id()
                token.reset()
            resumed_at = self.line.resumed_at()
            if resumed_at is not None:
                token.resume_at(resumed_at, self._log.run, keeps=self.line.keeps)
            run = self.ownership.commit(change)
            if not self.line.takeover and not token.is_fenced(run):
                self.line.note_takeover()
            self.line.expect_anew()
            if token.resumed_at is None:  # otherwise there was nothing to commit
                self.line.resumes = self.line.keeps = None
            return run

    def set_status(self, status: RunStatus) -> None:
        """Set the status: in the journal, if this handle owns the run."""
        self.pipeline.settle()
        if self.line.takeover:
            self.ownership.check_status(self.line.run, status)
            self._append_status(SetStatus(status=status))
        else:
            self.ownership.set_status(status)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, unless another trainer owns the run; after a signal `interrupted`."""
        if self.line.takeover:
            said = self.ownership.said(status, error)
            with suppress(Fenced):
                if self.line.run.status != said.status:
                    self._append_status(said)
            self.ownership.ended()
            return
        if not self.ownership.token.is_fenced(self._log.run):
            # Saves that wait must come first: a completed run would refuse them.
            try:
                self.line.carrier.await_all(exit_wait_s())
            except (TimeoutError, RegistryError) as late:
                _LOGGER.warning("%s; the status was not set to %s", late, status)
                return
        self.ownership.leave(status, error)

    def _append_status(self, said: SetStatus) -> None:
        with self.ownership.lock:
            entry = self.line.entry(secrets.token_hex(8), said=said)
            self.line.acknowledge(entry, None, [said])

    # Waiting

    def _await_earlier(self) -> None:
        """Wait for the saves before a commit, and read them."""
        if self.folder.exists:
            self.await_entries()
            with self.ownership.lock:
                self.line.read()  # the carrier has a log of its own

    def await_entries(self, timeout_s: float | None = None) -> None:
        """Wait until the registry has the saves of this machine; raise their failures."""
        self.pipeline.reset_after_fork()
        self.line.carrier.await_all(timeout_s)
        self.line.raise_lost()
        self.line.raise_outcomes()

    def backlog(self) -> Backlog:
        """Count the saves that only the journal holds."""
        return self.folder.backlog()

    def close(self) -> None:
        """Finish the running save, wait for the registry, and stop the carrier."""
        try:
            self.pipeline.close()
        finally:
            self.finish(exit_wait_s())

    def finish(self, limit_s: float) -> None:
        """Wait for the registry for a limited time; log saves that only the journal holds."""
        if self.ownership.is_forked:
            return
        until = time.monotonic() + limit_s
        with suppress(TimeoutError):  # reported by the module of the end of the program
            self.pipeline.wait(limit_s)
        self.line.carrier.finish(until - time.monotonic())
