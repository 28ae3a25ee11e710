"""A save as an entry of the journal: composed before it is acknowledged, and again when carried.

`LogScan` scans the log since a takeover: writes that landed, and takeovers by other trainers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from holdfast.registry.errors import (
    Conflict,
    Hint,
    IntegrityError,
    InvalidInput,
    ObjectNotFound,
    RegistryError,
    RolledBack,
    Stranded,
)
from holdfast.registry.history import (
    TRAIN_ON,
    PlacedState,
    RunLog,
    WriterToken,
    decode_plain,
    encode_plain,
    format_time,
)
from holdfast.registry.history.actions import (
    Action,
    AddCheckpoint,
    Commit,
    Place,
    ReportMetrics,
    TakeOver,
)
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import ID_DIGITS, Entry, Note, SaveFields, Takeover
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.saving.save_commit import SaveCommit, WrittenSave
from holdfast.registry.saving.save_request import PlannedSave, SaveRequest
from holdfast.registry.writing import NewCommit, StateWriter, Written

REPLACED = (
    "The registry was replaced or set back, or this folder is a copy. The journal keeps the saves: "
    "`holdfast journal push RUN FORK --to URL` puts them into a registry."
)


class LogScan:
    """A scan of a log; it continues where it stopped (J2, J6).

    The scan reads the slots themselves: a snapshot keeps no `write` ids, and only the last
    takeover.
    """

    def __init__(self, log: RunLog, start: int, ids: Sequence[str]) -> None:
        self._log = log
        self._ids = ids
        self._next = start
        self._commits: dict[str, int] = {}
        self._taken: list[tuple[int, TakeOver, Commit]] = []
        self.start = start

    def read_to(self, run: RunManifest) -> None:
        """Read every slot up to the head of a run."""
        for slot in self._log.fetch(range(self._next, run.next_slot)):
            for _, commit in slot.commits:
                self._take(slot.number, commit)
            self._next = slot.number + 1

    def _take(self, slot: int, commit: Commit) -> None:
        n = commit.n
        for action in commit.actions:
            match action:
                case ReportMetrics():
                    n = action.checkpoint  # a save that repeated a checkpoint
                case AddCheckpoint():
                    n = commit.n
                case TakeOver():
                    self._taken.append((slot, action, commit))
        self._commits[commit.write] = n

    def commit_of(self, write: str) -> int | None:
        """Return the number of the commit with a write's checkpoint; `None` if there is none."""
        return self._commits.get(write)

    def takeover_of(self, folder: RunFolder, entry: Entry) -> Takeover:
        """Return the takeover of an entry, from the log if its file is lost."""
        try:
            return folder.takeover(entry.takeover)
        except (IntegrityError, ObjectNotFound):
            found = [
                Takeover(token=action.token, slot=slot)
                for slot, action, _ in self._taken
                if slot >= entry.search_from and action.token[:ID_DIGITS] in self._ids
            ]
            return folder.restore_takeover(entry.takeover, found)

    def require_taken(self, takeover: Takeover) -> None:
        """Check that this log has the takeover, and is not an older or shorter log."""
        if (takeover.slot, takeover.token) not in [
            (slot, one.token) for slot, one, _ in self._taken
        ]:
            raise RolledBack(
                "the log is not the one in which this machine took the run over",
                where=self._log.run_id,
                expected=f"its takeover in slot {takeover.slot}",
                found=f"{self._log.run.next_slot} slots without it",
                hint=REPLACED,
            )

    def foreign(self, takeover: Takeover) -> Iterator[tuple[int, TakeOver, Commit]]:
        """Yield the takeovers by other machines since a takeover, with their slots and commits.

        A copy of this journal on another machine counts as another journal, with its own id.
        """
        first, ids = takeover.token[:ID_DIGITS], self._ids
        own = {first, *(ids[ids.index(first) :] if first in ids else ids[-1:])}
        for slot, action, commit in self._taken:
            if slot > takeover.slot and action.token[:ID_DIGITS] not in own:
                yield slot, action, commit

    def is_due(self, entry: Entry, takeover: Takeover, run: RunManifest) -> bool:
        """Return whether an entry is not in the log of a run yet; a stranded one is an error."""
        self.read_to(run)
        if self.commit_of(entry.write) is not None:
            return False
        self.require_own(takeover)
        return True

    def resumed_at(self, fields: SaveFields) -> int | None:
        """Return the commit number of the checkpoint that a save continues from."""
        write = fields.resumes_write
        return fields.resumes_commit if write is None else self.commit_of(write)

    def require_own(self, takeover: Takeover) -> None:
        """Check that no other machine has taken the run over since a takeover (J2)."""
        for _, action, commit in self.foreign(takeover):
            raise Stranded(
                "another machine took this run over before the save was in the registry",
                where=self._log.run_id,
                found=f"{action.host} at {format_time(commit.time_ms)}",
                hint="Stop this process. The save stays in the journal: `holdfast journal ls` "
                "lists it, `holdfast journal push` puts it into a fork.",
            )


class Refused(Exception):
    """The run does not allow an entry, judged by the entry and the log alone (J8)."""

    def __init__(self, error: RegistryError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def refusing() -> Iterator[None]:
    """Turn the errors of a forbidden save into `Refused`."""
    try:
        yield
    except (Conflict, InvalidInput) as error:
        raise Refused(error) from error


def require_line(run_id: str, followed: Note | None) -> None:
    """Refuse to continue from a save whose known outcome keeps it out of the run.

    After a damaged save training may continue: the next state is whole.
    """
    if followed is not None and followed.outcome in ("refused", "stranded", "pushed", "deleted"):
        raise Conflict(
            "this training run continues from a save that never enters the run",
            where=run_id,
            found=f"{followed.outcome}: {followed.reason}",
            hint=Hint.of(
                TRAIN_ON, "`holdfast journal push` puts the saves of the other line into a fork."
            ),
        )


class EntryToken(WriterToken):
    """A writer token for an entry: its takeover gives the right, `LogScan` checks it (J2, J3)."""

    def __init__(self, run_id: str, *, begins: bool = False, entry: Entry | None = None) -> None:
        super().__init__(run_id)
        self._taken = True
        self._begins = begins
        if entry is not None:  # what a hold forbids then follows from the entry and the log (J8)
            self.now_ms = lambda: entry.time_ms
        self.continue_from(None, None)

    def continue_from(self, resumed_at: int | None, keeps: int | None) -> None:
        """Continue from a checkpoint and, if `keeps` names one, from a pivot after it."""
        self.resumed_at = resumed_at
        self._keeps = (-1 if resumed_at is None else resumed_at) if keeps is None else keeps

    def warn_of_owner(self, run: RunManifest) -> None:
        """Warn of nothing: the takeover is a commit of its own."""

    def is_fenced(self, run: RunManifest) -> bool:  # noqa: ARG002
        """Return false: the scan of the log decides whether another trainer owns the run."""
        return False

    @property
    def begins(self) -> bool:
        """Whether its handle restored nothing and has not saved before."""
        return self._begins


class JournaledSave(SaveCommit):
    """A save into the journal, checked, written and composed for the expected run.

    It is never committed: `CarriedSave` is.
    """

    def __init__(
        self,
        writer: StateWriter,
        token: EntryToken,
        save: PlannedSave,
        expected: RunManifest,
        earlier: EarlierSteps | None = None,
        bases: Mapping[str, PlacedState] | None = None,
    ) -> None:
        super().__init__(writer, token, save, earlier or EarlierSteps())
        self._expected = expected
        self._bases = bases or {}

    def write_states(self) -> Sequence[Written]:
        """Write the state and its companions."""
        main = self._write_state("", self._base(""), self._expected.spec.finite)
        self.check_changes(main, self._expected, self._base(""))
        companions = {
            name: self._write_state(name, self._base(name), ()) for name in self._save.companions
        }
        self.written = WrittenSave(main, companions)
        return self.written.states

    def holds_over(self, run: RunManifest) -> Sequence[Action]:  # noqa: ARG002
        """Return nothing: the commit into the registry asks that store for its time."""
        return ()

    def _base(self, name: str) -> Sequence[PlacedState]:
        return [self._bases[name]] if name in self._bases else []

    def fields(self, resumes: int | str | None, keeps: int | None) -> SaveFields:
        """Return the save as the fields of an entry."""
        save, request, main = self._save, self._request, self.written.main
        return SaveFields(
            phase=save.phase,
            step=request.step,
            metrics=dict(save.metrics),
            meta=request.meta,
            tier=request.tier,
            counters=dict(save.counters),
            commit_keys=save.commit_keys,
            nonfinite=tuple(main.nonfinite),
            allow_nonfinite=request.allow_nonfinite,
            size_bytes=main.state.manifest.nbytes,
            place=main.state.place,
            companions={name: one.state.place for name, one in self.written.companions.items()},
            streams={name: encode_plain(found, name) for name, found in request.streams.items()},
            resumes_commit=resumes if isinstance(resumes, int) else None,
            resumes_write=resumes if isinstance(resumes, str) else None,
            keeps=keeps,
        )


def expected_save(
    states: EntryStates, token: EntryToken, entry: Entry, fields: SaveFields, run: RunManifest
) -> JournaledSave:
    """Return the save of an entry, to be composed for the expected run."""
    save = JournaledSave(states.writer, token, _planned(fields), run)
    companions = {name: states.read(place) for name, place in fields.companions.items()}
    main = replace(states.read(fields.place), nonfinite=fields.nonfinite)
    save.written = WrittenSave(main, companions)
    save.authorship = entry.authorship
    return save


class PushedSave(SaveCommit):
    """The commit of a save whose bytes are in a journal, into another run by default."""

    def __init__(
        self,
        writer: StateWriter,
        fields: SaveFields,
        states: EntryStates,
        *,
        entry: Entry | None = None,
    ) -> None:
        self._token = EntryToken(writer.log.run_id, entry=entry)
        save = _planned(fields, takes_over=entry is not None)
        super().__init__(writer, self._token, save, EarlierSteps())
        self._fields = fields
        self._states = states

    def write_states(self) -> Sequence[Written]:
        """Copy the states from the journal."""
        places: list[Place] = [self._fields.place, *self._fields.companions.values()]
        main, *others = self._writer.adopt(self._states.store, places)
        companions = dict(zip(self._fields.companions, others, strict=True))
        main = replace(main, nonfinite=self._fields.nonfinite)
        return self.write_others(main, companions, self._writer.log.run)


class CarriedSave(PushedSave):
    """The commit of a save that was acknowledged earlier (J2, J3, J6, J7)."""

    def __init__(
        self,
        writer: StateWriter,
        entry: Entry,
        fields: SaveFields,
        takeover: Takeover,
        scan: LogScan,
        states: EntryStates,
    ) -> None:
        super().__init__(writer, fields, states, entry=entry)
        self._scan, self._is_due = scan, partial(scan.is_due, entry, takeover)
        self.authorship = entry.authorship

    def check(self, run: RunManifest) -> None:
        """Refuse an entry that is stranded, or that the run does not allow."""
        if self._is_due(run):
            self._token.continue_from(self._scan.resumed_at(self._fields), self._fields.keeps)
            with refusing():
                super().check(run)

    def write_states(self) -> Sequence[Written]:
        """Copy the states from the journal, unless the entry is in the log."""
        if not self._is_due(self._writer.log.run):
            return ()
        with refusing():
            return super().write_states()

    def commits(self, run: RunManifest) -> Sequence[Sequence[Action]] | None:
        """Return the actions, composed for the run; `None` if the entry is in the log."""
        if not self._is_due(run):
            return None
        with refusing():
            return super().commits(run)


class CarriedStatus(NewCommit):
    """The commit of a status that was acknowledged earlier."""

    writes = False

    def __init__(self, entry: Entry, takeover: Takeover, scan: LogScan) -> None:
        self._is_due = partial(scan.is_due, entry, takeover)
        self._entry = entry
        self.authorship = entry.authorship

    def check(self, run: RunManifest) -> None:
        """Refuse an entry that is stranded, or a run that was dropped."""
        if self._is_due(run):
            with refusing():
                super().check(run)

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the action; `None` if the entry is in the log."""
        return [self._entry.action] if self._is_due(run) else None


def _planned(fields: SaveFields, *, takes_over: bool = True) -> PlannedSave:
    # Everything was checked, and encoded, when the save was made.
    request = SaveRequest(
        step=fields.step,
        takes_over=takes_over,
        phase=fields.phase,
        metrics=fields.metrics,
        meta=fields.meta,
        tier=fields.tier,
        streams={name: decode_plain(found) for name, found in fields.streams.items()},
        allow_nonfinite=fields.allow_nonfinite,
    )
    return PlannedSave(
        request=request,
        phase=fields.phase,
        state=FlatState("dict", ()),
        companions={},
        commit_keys=fields.commit_keys,
        metrics=fields.metrics,
        counters=fields.counters,
    )
