"""A save as an entry of the journal: checked before it is acknowledged, composed when carried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from holdfast.registry.errors import Conflict, Hint, InvalidInput, RegistryError
from holdfast.registry.history import TRAIN_ON, PlacedState, WriterToken, decode_plain, encode_plain
from holdfast.registry.history.actions import Action, Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.pytree import FlatState
from holdfast.registry.saving.earlier_steps import EarlierSteps
from holdfast.registry.saving.journal.log_scan import LogScan
from holdfast.registry.saving.journal.records import Entry, Note, SaveFields, Takeover
from holdfast.registry.saving.journal.states import EntryStates
from holdfast.registry.saving.save_commit import SaveCommit
from holdfast.registry.saving.save_request import PreparedSave, SaveRequest, joined_streams
from holdfast.registry.writing import NewCommit, StateWriter, Written


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

    def __init__(self, run_id: str, resumed_at: int | None, *, begins: bool = False) -> None:
        super().__init__(run_id)
        self._taken = True
        self._begins = begins
        self.continue_from(resumed_at, None)

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
    """A save whose states are in the journal, composed for the expected run."""

    def __init__(
        self,
        writer: StateWriter,
        token: EntryToken,
        save: PreparedSave,
        expected: RunManifest,
        earlier: EarlierSteps | None = None,
        bases: Mapping[str, PlacedState] | None = None,
    ) -> None:
        super().__init__(writer, token, save, earlier or EarlierSteps())
        self._expected = expected
        self._watched = expected.spec.finite
        self._bases = bases or {}

    def write_states(self) -> Sequence[Written]:
        """Write the state and its companions."""
        self._main = self._write(self._save.state, self._base(""), self._watched)
        self.nonfinite = self._main.nonfinite
        self._check_changes(self._expected, self._base(""))
        self._companions = {
            name: self._write(flat, self._base(name))
            for name, flat in self._save.companions.items()
        }
        return list(self.written.values())

    def _base(self, name: str) -> Sequence[PlacedState]:
        return [self._bases[name]] if name in self._bases else []

    def set_written(self, main: Written, companions: dict[str, Written]) -> None:
        """Use states that were written earlier."""
        self._main, self._companions = main, companions

    @property
    def written(self) -> dict[str, Written]:
        """The states by name; "" for the state itself."""
        return {"": self._main, **self._companions}

    def fields(self, resumes: int | str | None, keeps: int | None) -> SaveFields:
        """Return the save as the fields of an entry."""
        save, request, base = self._save, self._request, self._main.base
        streams = joined_streams([*self._carried, request])
        return SaveFields(
            phase=save.phase,
            step=request.step,
            metrics=dict(save.metrics),
            meta=request.meta,
            tier=request.tier,
            counters=dict(save.counters),
            commit_keys=save.commit_keys,
            nonfinite=tuple(self.nonfinite),
            allow_nonfinite=request.allow_nonfinite,
            size_bytes=base.manifest.nbytes,
            place=base.place,
            companions={name: one.base.place for name, one in self._companions.items()},
            streams={name: encode_plain(found, name) for name, found in streams.items()},
            resumes_commit=resumes if isinstance(resumes, int) else None,
            resumes_write=resumes if isinstance(resumes, str) else None,
            keeps=keeps,
        )


def expected_save(
    states: EntryStates, token: EntryToken, entry: Entry, fields: SaveFields, run: RunManifest
) -> JournaledSave:
    """Return the save of an entry, to be composed for the expected run."""
    save = JournaledSave(states.writer, token, _prepared(fields), run)
    companions = {name: states.read(place) for name, place in fields.companions.items()}
    save.set_written(states.read(fields.place), companions)
    save.nonfinite = fields.nonfinite
    save.signed = entry.signature
    return save


class PushedSave(SaveCommit):
    """Commit a save whose bytes are in a journal to another run, without its token."""

    def __init__(
        self,
        writer: StateWriter,
        fields: SaveFields,
        states: EntryStates,
        *,
        takes_over: bool = False,
    ) -> None:
        self._token = EntryToken(writer.log.run_id, None)
        super().__init__(
            writer, self._token, _prepared(fields, takes_over=takes_over), EarlierSteps()
        )
        self._fields = fields
        self._states = states
        self.nonfinite = fields.nonfinite

    def write_states(self) -> Sequence[Written]:
        """Copy the states from the journal."""
        places: list[Place] = [self._fields.place, *self._fields.companions.values()]
        main, *others = self._writer.adopt(self._states.store, places)
        self._main = main
        self._companions = dict(zip(self._fields.companions, others, strict=True))
        return self._write_others(self._writer.log.run)


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
        super().__init__(writer, fields, states, takes_over=True)
        self._arrival = Arrival(entry, takeover, scan)
        self.signed = entry.signature

    def check(self, run: RunManifest) -> None:
        """Refuse an entry that is stranded, or that the run does not allow."""
        if self._arrival.is_due(run):
            self._token.continue_from(self._arrival.resumed_at(self._fields), self._fields.keeps)
            with refusing():
                super().check(run)

    def write_states(self) -> Sequence[Written]:
        """Copy the states from the journal, unless the entry is in the log."""
        if not self._arrival.is_due(self._writer.log.run):
            return ()
        with refusing():
            return super().write_states()

    def commits(self, run: RunManifest) -> Sequence[Sequence[Action]] | None:
        """Return the actions, composed for the run; `None` if the entry is in the log."""
        if not self._arrival.is_due(run):
            return None
        with refusing():
            return super().commits(run)


class CarriedStatus(NewCommit):
    """The commit of a status that was acknowledged earlier."""

    writes = False

    def __init__(self, entry: Entry, takeover: Takeover, scan: LogScan) -> None:
        self._arrival = Arrival(entry, takeover, scan)
        self._entry = entry
        self.signed = entry.signature

    def check(self, run: RunManifest) -> None:
        """Refuse an entry that is stranded, or a run that was dropped."""
        if self._arrival.is_due(run):
            with refusing():
                super().check(run)

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the action; `None` if the entry is in the log."""
        if not self._arrival.is_due(run):
            return None
        return [self._entry.action]


class Arrival:
    """Whether an entry still has to be committed, judged by the log before its slot."""

    def __init__(self, entry: Entry, takeover: Takeover, scan: LogScan) -> None:
        self._entry = entry
        self._takeover = takeover
        self._scan = scan

    def is_due(self, run: RunManifest) -> bool:
        """Return whether the entry is not in the log yet; a stranded one is an error."""
        self._scan.read_to(run)
        if self._scan.commit_of(self._entry.write) is not None:
            return False
        self._scan.require_own(self._takeover)
        return True

    def resumed_at(self, fields: SaveFields) -> int | None:
        """Return the commit number of the checkpoint that training continues from."""
        if fields.resumes_write is not None:
            return self._scan.commit_of(fields.resumes_write)
        return fields.resumes_commit


def _prepared(fields: SaveFields, *, takes_over: bool = True) -> PreparedSave:
    request = SaveRequest(
        fields.step,
        takes_over=takes_over,
        phase=fields.phase,
        metrics=fields.metrics,
        tier=fields.tier,
        allow_nonfinite=fields.allow_nonfinite,
    )
    # These two were checked and encoded when the save was made.
    request.meta = fields.meta
    request.streams = {name: decode_plain(found) for name, found in fields.streams.items()}
    return PreparedSave(
        request=request,
        phase=fields.phase,
        given=FlatState("dict", ()),
        narrowing=None,
        commit_keys=fields.commit_keys,
        companions={},
        metrics=fields.metrics,
        counters=fields.counters,
    )
