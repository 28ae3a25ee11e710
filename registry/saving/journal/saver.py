"""The saver with a journal: a save returns when it is durable on this machine."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any

from holdfast.registry.errors import (
    Conflict,
    Fenced,
    MissingObject,
    RegistryError,
    StorageError,
    Stranded,
)
from holdfast.registry.history import PlacedState
from holdfast.registry.history.actions import Action, RunStatus, SetStatus
from holdfast.registry.history.replay import Forgotten, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.saving.journal.checkpoint import (
    JournaledCheckpoint,
    await_room,
    carried_here,
)
from holdfast.registry.saving.journal.ending import finish_at_the_end, set_status_behind
from holdfast.registry.saving.journal.entry_saves import EntryToken, JournaledSave, require_line
from holdfast.registry.saving.journal.expected import ExpectedRun, expect
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.log_scan import LogScan
from holdfast.registry.saving.journal.records import Entry, SaveFields, Takeover
from holdfast.registry.saving.journal.settings import Journal
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.saving.ownership import Claimed, Ownership
from holdfast.registry.saving.pending import Backlog, exit_wait_s
from holdfast.registry.saving.pipeline import Pipeline
from holdfast.registry.saving.save_request import PlannedSave, SaveRequest, plan_save, take_apart
from holdfast.registry.writing import Committer, Composed, NewCommit

_LOGGER = logging.getLogger("holdfast")


class JournaledSaver:
    """A saver whose saves are durable in a journal first. It is also its handle's line of training.

    A journaled save, from the call to the last byte; J1 to J9 are rules of docs/spec.md:

    1. `Pipeline.save` waits, and has `prepare` here check the state as in `LocalSaver`, against the
       expected run: the log, then the entries. Then it calls `make` here.
    2. It raises outcomes of earlier saves that the caller must know: lost, stranded, refused.
    3. `await_room` waits until the states fit into the bound of the journal.
    4. `EntryStates` opens a store for the entry; objects of the entry before are linked into it.
    5. `JournaledSave.check` refuses a dropped or completed run early.
    6. `write_states` puts packs, manifests and placements into the entry's store (`WrittenSave`).
    7. Its actions are composed for the expected run, or the save is refused. The first save of a
       handle then takes the run over in the registry, reads that back (J1), and composes again.
    8. `RunFolder.acknowledge` puts the entry: the save is durable on this machine, and returns.
    9. A thread carries the entries in order (J5): `CarriedSave` copies an entry's states into the
       registry and commits them there, once, if the run was not taken over elsewhere (J2, J3).
    10. The carrier reads the slot back (J4), notes the outcome, and deletes carried entries, but
        for the newest save.

    Attributes:
        folder: The journal of the run.
        waited_s: Seconds that saves have waited at the bound of the journal.
    """

    def __init__(self, committer: Committer, journal: Journal) -> None:
        self._committer, self._log = committer, committer.log
        self.own = Ownership(committer, self._behind)
        self.pipeline = Pipeline(self.own, self.prepare, self.make, begin_anew=self._begin)
        self.folder = RunFolder(journal, committer.store.config.id, committer.log.run_id)
        self.waited_s = 0.0
        self._begin()
        committer.await_earlier = self._await_earlier
        finish_at_the_end(self)

    def _begin(self) -> None:
        self._carrier = BackgroundCarrier(self._committer.store, self.folder)
        self._expecting = RLock()
        self._takeover = self._slot = 0
        # The entry that training continues from, by number and `write`.
        self._follows: tuple[int, str] | None = None
        # Acknowledged entries whose outcome is not known: `write`, and the slot to search from.
        self._own: dict[int, tuple[str, int]] = {}
        self._resumes: int | str | None = None
        self._keeps: int | None = None
        self._search_from = 0
        self._read_to = 0
        if self._log.is_copy:  # it has at least what was carried until now
            self._read_to = self.folder.carried_to()
            self.folder.open_copy(self._log)
        self._expected: ExpectedRun | None = None
        self._last: tuple[EntryStates, Mapping[str, PlacedState]] | None = None
        self._told: set[int] = set()

    # Acknowledging

    def prepare(self, state: object, request: SaveRequest) -> PlannedSave:
        """Take a state apart, and check it against the rules of the expected run."""
        return plan_save(take_apart(state, request), self.run)

    def make(self, save: PlannedSave, carries: Sequence[SaveRequest]) -> Checkpoint:
        """Acknowledge a save; one that takes nothing over goes straight into the registry."""
        if not save.request.takes_over:
            self.await_entries()  # before the lock, which saves of other threads need
            self._expected = None
            return self.own.save(save, carries)
        with self.own.lock:
            with suppress(StorageError):  # their fate is unknown then
                self._raise_lost()
            self._raise_outcomes()
            self._require_line()
            self.waited_s += await_room(self.folder, self._carrier, save, self._raise_outcomes)
            with self.folder.lock("writing").held(shared=True):
                states = EntryStates(self.folder, secrets.token_hex(8), self._committer.store)
                try:
                    commit, actions = self._write(save, states, carries)
                except BaseException:
                    states.remove()
                    raise
                return self._acknowledge(save, states, commit, actions)

    def _write(
        self, save: PlannedSave, states: EntryStates, carries: Sequence[SaveRequest]
    ) -> tuple[JournaledSave, Sequence[Action]]:
        """Write the states of a save, and check it; return it with its actions."""
        log, begins = self._log, not self._takeover
        if begins:
            if not log.is_copy:
                log.refresh()
            self._expected = None
        token = EntryToken(log.run_id, None, begins=begins and self._resumes is None)
        bases = self._link_bases(states)
        expected = self._expect().run
        lost = [one for one in carries if not expected.at_step(save.phase, one.step)]
        save = replace(save, request=save.request.after(lost))
        commit = JournaledSave(states.writer, token, save, expected, self.own.earlier, bases)
        token.continue_from(self._resumed_at(), self._keeps)
        commit.check(expected)
        commit.write_states()
        states.keep_only(commit.written.states)
        actions = self._compose(commit, token)
        if begins:
            self._take_over()
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
        n = commit.outcome
        entry = self._entry(states.write, save=commit.fields(self._resumes, self._keeps))
        number = self._append(entry, n, actions)
        self.own.warn(commit, save.request)
        written = commit.written
        self.own.earlier.remember(save.phase, save.request.step, written.components)
        by_name = {"": written.main, **written.companions}
        self._last = states, {name: one.base for name, one in by_name.items()}
        return JournaledCheckpoint(states, number, entry, self._expect().run, n, self._find)

    def _compose(self, commit: JournaledSave, token: EntryToken) -> list[Action]:
        """Return the actions of a save for the expected run, or refuse the save."""
        token.continue_from(self._resumed_at(), self._keeps)
        try:
            commit.check(self._expect().run)
            return list(commit.actions(self._expect().run))
        except Forgotten:  # a rule needs the record of an evicted checkpoint
            self._log.recall()
            self._expected = None
            return list(commit.actions(self._expect().run))

    def _append(self, entry: Entry, n: int | None, actions: Sequence[Action]) -> int:
        with self._expecting:
            expected, self._expected = self._expect(), None
            number = self.folder.acknowledge(entry)
            self._resumes = self._keeps = None
            self._follows = number, entry.write
            if actions:  # otherwise its commit may be that of another entry
                self._own[number] = entry.write, entry.search_from
            expected.add(number, entry, n, actions)
            self._expected = expected
        self._carrier.take()
        return number

    def _entry(
        self, write: str, *, save: SaveFields | None = None, said: SetStatus | None = None
    ) -> Entry:
        slot = self._slot
        if isinstance(self._resumes, str):
            slot = min(slot, self._search_from)
        follows = self._follows and self._follows[1]
        return self.folder.new_entry(
            self._takeover, slot, follows, write=write, save=save, said=said
        )

    @property
    def run(self) -> RunManifest:
        """The run with the saves that only the journal holds."""
        return self._expect().run

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint that training resumed from, before the first save."""
        n = self._resumed_at()
        resumed = None if n is None else self.run.by_n.get(n)
        return None if resumed is None else resumed.step

    def _link_bases(self, states: EntryStates) -> Mapping[str, PlacedState]:
        """Return the newest states of this handle, linked into the store of a new entry."""
        if self._last is None:
            return {}
        before, bases = self._last
        if states.link(before, bases.values()):
            return bases
        states.remove()
        return {}

    def _take_over(self) -> None:
        """Take the run over in the registry, and read that back (J1).

        Without the registry go on under the newest takeover of this machine: it was read back.
        """
        token, log = self.own.token, self._log
        if log.is_copy and (held := self.folder.own_takeover()) is not None:
            token.token = held.token
            self._note_takeover(held)
            return
        token.warn_of_owner(log.run)
        token.prefix, token.resumed_at = self.folder.id(), None
        token.reset()
        nothing = Composed(lambda run: ())  # noqa: ARG005
        self._committer.commit(Claimed(token, nothing), waits=False)
        log.look().outcome.result()
        self._note_takeover()

    def _note_takeover(self, held: Takeover | None = None) -> None:
        """Note the takeover that this handle has just committed, or continues."""
        self._slot = self._log.run.next_slot - 1 if held is None else held.slot
        self._takeover = self.folder.take_over(self.own.token.token, self._slot)
        if held is None:
            self.folder.keep_copy(self._log, self._committer.store)
        self.own.taken()
        self._told = set(self.folder.noted())
        self._expected = None

    def _behind(self) -> Callable[[SetStatus], bool]:
        """Return how the end of the process sets the status behind the entries that wait."""
        return partial(set_status_behind, self.folder, self._takeover, self._slot)

    # The expected run

    def _expect(self) -> ExpectedRun:
        # Other threads call this too, such as one that prepares a save during another save.
        with self._expecting:
            while self._expected is None:
                carried = self.folder.carried_to()
                if carried > self._read_to:  # into slots that this handle has not read
                    self._read()
                expected = expect(self.folder, self._log, self._committer.store)
                if self.folder.carried_to() == carried:  # nothing was carried meanwhile
                    self._expected = expected
            return self._expected

    def _resumed_at(self) -> int | None:
        """Return the number of the checkpoint that training continues from, in the expected run."""
        if not isinstance(self._resumes, str):
            return self._resumes
        found = self._expect().numbers.get(self._resumes)
        if found is None:  # it was carried meanwhile
            scan = LogScan(self._log, self._search_from, self.folder.ids())
            scan.read_to(self._log.run)
            found = self._resumes = scan.commit_of(self._resumes)
        return found

    def _known(self, n: int, here: Entry | None) -> Checkpoint:
        """Return a checkpoint of the expected run; `here` is its entry if it was carried."""
        expected, store = self._expect(), self._committer.store
        if here is not None:
            return carried_here(EntryStates(self.folder, here.write, store), here, expected.run, n)
        if n in expected.entries:
            number, entry = expected.entries[n]
            states = EntryStates(self.folder, entry.write, store)
            return JournaledCheckpoint(states, number, entry, expected.run, n, self._find)
        return Checkpoint(store, self._log, expected.run.by_n[n])

    def _find(self, number: int, entry: Entry) -> Checkpoint | None:
        """Return the checkpoint of an entry in the registry; `None` if it is not there."""
        note = self._carrier.outcomes.get(number) or self.folder.note(number)
        if note is None and number in self.folder.numbers():
            return None  # it waits
        if note is not None and note.outcome != "carried":
            return None
        log = self._log
        with suppress(StorageError):
            n = None if note is None else note.commit
            if n is None or n >= log.run.commits:
                log.refresh()
            if n is None:  # another process has carried it, and deleted the note
                scan = LogScan(log, entry.search_from, self.folder.ids())
                scan.read_to(log.run)
                n = scan.commit_of(entry.write)
            if n is not None:
                return Checkpoint(self._committer.store, log, log.knowing(n).by_n[n])
        return None

    # Restoring

    def refresh(self) -> RunManifest:
        """Read the log; return the run with the saves that are only in the journal."""
        if not self._log.is_copy:
            self._read()
        return self._expect().run

    def _read(self) -> None:
        """Read the log, and forget the expected run."""
        carried = self.folder.carried_to()
        self._log.refresh()
        self._read_to, self._expected = carried, None

    def waiting_entry(self, checkpoint: Checkpoint, stream: str) -> Mapping[str, Any] | None:
        """Return the last entry of a stream at a checkpoint, if only the journal holds it."""
        if not isinstance(checkpoint, JournaledCheckpoint) or checkpoint.durable_in == "registry":
            return None
        expected = self._expect()
        return expected.last_entries.get(expected.numbers[checkpoint.write], {}).get(stream)

    def newest_first(self) -> list[Checkpoint]:
        """Return the kept checkpoints, newest first, also those that only the journal holds."""
        self._expected = None
        self._carrier.wake()
        expected, backlog = self._expect(), self.folder.backlog()
        if backlog.stranded or backlog.refused or backlog.damaged:
            _LOGGER.warning(
                "%s: the journal %s has saves that are not in the run: %d stranded, %d refused, "
                "%d damaged; `holdfast journal ls` lists them",
                self._log.run_id,
                self.folder.path,
                backlog.stranded,
                backlog.refused,
                backlog.damaged,
            )
        here = self.folder.carried() if self._log.is_copy else {}
        live = expected.run.live()
        return [self._known(record.n, here.get(record.n)) for record in reversed(live)]

    def resume_at(self, checkpoint: Checkpoint) -> None:
        """Continue from exactly a checkpoint; the next save takes the run over."""
        self.own.earlier.forget()
        self._continue_from(checkpoint)

    def resume_after(self, checkpoint: Checkpoint) -> str | None:
        """Continue from a checkpoint and, if it is the newest, from the pivots after it."""
        if checkpoint.durable_in == "journal":  # a pivot waits until the registry has everything
            self._continue_from(checkpoint)
            return None
        name, token = self.own.resume_after(checkpoint), self.own.token
        self._continue_from(checkpoint)
        self._keeps, token.resumed_at = token.keeps, None
        return name

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        self.own.failed.clear()
        self._keeps = self._follows = None
        if isinstance(checkpoint, JournaledCheckpoint) and checkpoint.durable_in == "journal":
            self._resumes, self._search_from = checkpoint.write, checkpoint.search_from
            self._follows = checkpoint.number, checkpoint.write
        else:
            self._resumes = checkpoint.handle.n
        components = checkpoint.manifest.components
        self.own.earlier.remember(checkpoint.handle.record.phase, checkpoint.step, components)
        self._takeover, self._expected, self._last = 0, None, None

    # Everything else is committed to the registry directly, after the entries.

    def commit(self, change: NewCommit) -> RunManifest:
        """Commit a change that only the owner may make, once the registry has every save."""
        self.pipeline.settle()
        self.await_entries()
        with self.own.lock:
            token = self.own.token
            self._log.refresh()
            if not self._takeover:
                token.prefix = self.folder.id()
                token.reset()
            resumed_at = self._resumed_at()
            if resumed_at is not None:
                token.resume_at(resumed_at, self._log.run, keeps=self._keeps)
            run = self.own.commit(change)
            if not self._takeover and not token.is_fenced(run):
                self._note_takeover()
            self._expected = None
            if token.resumed_at is None:  # otherwise there was nothing to commit
                self._resumes = self._keeps = None
            return run

    def set_status(self, status: RunStatus) -> None:
        """Set the status: in the journal, if this handle owns the run."""
        self.pipeline.settle()
        if self._takeover:
            self._append_status(SetStatus(status=status))
        else:
            self.own.set_status(status)

    def leave(self, status: RunStatus, error: BaseException | None = None) -> None:
        """Set the status, unless another trainer owns the run; after a signal `interrupted`."""
        if self._takeover:
            said = self.own.said(status, error)
            with suppress(Fenced):
                if self.run.status != said.status:
                    self._append_status(said)
            self.own.ended()
            return
        if not self.own.token.is_fenced(self._log.run):
            # Saves that wait must come first: a completed run would refuse them.
            try:
                self._carrier.await_all(exit_wait_s())
            except (TimeoutError, RegistryError) as late:
                _LOGGER.warning("%s; the status was not set to %s", late, status)
                return
        self.own.leave(status, error)

    def _append_status(self, said: SetStatus) -> None:
        with self.own.lock:
            entry = self._entry(secrets.token_hex(8), said=said)
            self._append(entry, None, [said])

    # Waiting

    def _await_earlier(self) -> None:
        """Wait for the saves before a commit, and read them."""
        if self.folder.exists:
            self.await_entries()
            with self.own.lock:
                self._read()  # the carrier has a log of its own

    def await_entries(self, timeout_s: float | None = None) -> None:
        """Wait until the registry has the saves of this machine; raise their failures."""
        self.pipeline.reset_after_fork()
        self._carrier.await_all(timeout_s)
        self._raise_lost()
        self._raise_outcomes()

    def backlog(self) -> Backlog:
        """Count the saves that only the journal holds."""
        return self.folder.backlog()

    def _raise_outcomes(self) -> None:
        """Raise each failed save of this handle once; raise a stranded one every time."""
        for number in self.folder.noted():
            note = self.folder.note(number) if number not in self._told else None
            if self._takeover and note is not None and note.outcome != "carried":
                if note.outcome == "stranded":
                    raise Stranded(note.reason or "")
                self._told.add(number)
                raise Conflict(
                    f"a save that was acknowledged by the journal is {note.outcome}",
                    where=f"{self._log.run_id}: entry {number} of {self.folder.path}",
                    found=note.reason,
                    hint="Its bytes are kept there; this call did nothing.",
                )

    def _require_line(self) -> None:
        """Refuse to continue from a save that never enters the run."""
        if self._follows is not None:
            number, _ = self._follows
            note = self._carrier.outcomes.get(number) or self.folder.note(number)
            require_line(self._log.run_id, note)

    def _raise_lost(self) -> None:
        """Raise, once, if acknowledged saves are neither in the journal nor in the registry."""
        with self._expecting:  # another thread may acknowledge meanwhile
            here = set(self.folder.numbers())
            noted = {*self.folder.noted(), *self._carrier.outcomes}
            lost = {n: one for n, one in self._own.items() if n not in here | noted}
            if lost:
                self._log.refresh()
                scan = LogScan(self._log, min(start for _, start in lost.values()), ())
                scan.read_to(self._log.run)
                lost = {n: one for n, one in lost.items() if scan.commit_of(one[0]) is None}
            self._own = {n: one for n, one in self._own.items() if n in here - noted}
        if lost:
            self._takeover, self._follows, self._expected, self._last = 0, None, None, None
            raise MissingObject(
                f"{len(lost)} saves that were acknowledged are gone from the journal",
                where=f"{self._log.run_id}: {self.folder.path}",
                found=f"entries {', '.join(map(str, lost))} are neither there nor in the registry",
                hint="This error comes once; later saves continue without them. If the folder was "
                "moved, put it back before the next save.",
            )

    def close(self) -> None:
        """Finish the running save, wait for the registry, and stop the carrier."""
        try:
            self.pipeline.close()
        finally:
            self.finish(exit_wait_s())

    def finish(self, limit_s: float) -> None:
        """Wait for the registry for a limited time; log saves that only the journal holds."""
        if self.own.is_forked:
            return
        until = time.monotonic() + limit_s
        with suppress(TimeoutError):  # reported by the module of the end of the program
            self.pipeline.wait(limit_s)
        self._carrier.finish(until - time.monotonic())
