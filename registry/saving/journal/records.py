"""The files of a journal: its id, takeovers, entries and notes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from holdfast.registry.history import Authorship, new_authorship
from holdfast.registry.history.actions import CommitKeys, Place, RunStatus, SetStatus
from holdfast.registry.values import Field, Metrics, Name, PhaseName, Plain, Record, Step, empty

FORMAT: Literal["holdfast.journal/2"] = "holdfast.journal/2"
#: Length of the id of a journal.
ID_DIGITS = 16
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Outcome = Literal["carried", "refused", "stranded", "damaged", "pushed", "deleted"]


class JournalId(Record):
    """`journal.json` of version 1: the only id of the journal."""

    format: Literal["holdfast.journal/1"]
    id: Id  # random; the tokens of its takeovers begin with it


class Machine(Record):
    """A machine that uses the journal; the newest one is the present one."""

    format: Literal["holdfast.journal/2"] = FORMAT
    id: Id  # random; the tokens of its takeovers begin with it
    machine: str  # different on every machine


class Takeover(Record):
    """A takeover of the run by a handle of this machine; it is in the registry."""

    token: str  # the token of the handle
    slot: Annotated[int, Field(ge=0)]  # the slot of the log that has it


class SaveFields(Record):
    """A save: its request and the places of its states; never actions."""

    phase: PhaseName
    step: Step
    metrics: Metrics = empty()  # metrics by name
    meta: Plain = None  # plain values, encoded
    tier: Name | None = None  # the given retention class
    #: Values of the counters that the tiers of the phase name.
    counters: dict[str, int] = empty()
    commit_keys: CommitKeys | None = None  # keys of the state that the commit stores
    nonfinite: tuple[str, ...] = ()  # paths of watched tensors that hold NaN or infinity
    allow_nonfinite: bool = False  # whether it counts nevertheless
    size_bytes: Annotated[int, Field(ge=0)]  # bytes of all tensors
    place: Place  # the state, in the store of the entry
    companions: dict[Name, Place] = empty()  # the given companions, there too
    streams: dict[Name, Plain] = empty()  # new entries of streams, encoded
    #: Commit number of the checkpoint that training continues from.
    resumes_commit: int | None = None
    #: If only the journal had that checkpoint: the `write` of its entry.
    resumes_write: str | None = None
    #: Commit number of a pivot after that checkpoint, from which training continues too.
    keeps: int | None = None


class Entry(Record):
    """An acknowledged save, or a change of the status."""

    format: Literal["holdfast.journal/1", "holdfast.journal/2"] = FORMAT
    run: str
    takeover: Annotated[int, Field(ge=1)]  # number of the takeover under which it was acknowledged
    #: The first slot that can have its `write`, or that of `resumes_write`.
    search_from: Annotated[int, Field(ge=0)]
    write: Id  # the `write` of its commit
    author: str  # `user@host`
    time_ms: int  # the time of its acknowledgement, by the clock of this machine
    save: SaveFields | None = None
    status: RunStatus | None = None
    #: The `write` of the entry that its training continues from, if there is one; entries of
    #: version 1 have none.
    follows: Id | None = None
    reason: str | None = None  # the exception that made it `failed`

    @classmethod
    def now(
        cls,
        run: str,
        takeover: int,
        search_from: int,
        follows: str | None,
        *,
        write: str,
        save: SaveFields | None = None,
        said: SetStatus | None = None,
    ) -> Self:
        """Return an entry that is authored now."""
        made = new_authorship()
        return cls(
            run=run,
            takeover=takeover,
            search_from=search_from,
            write=write,
            author=made.author,
            time_ms=made.time_ms,
            save=save,
            status=None if said is None else said.status,
            reason=None if said is None else said.reason,
            follows=follows,
        )

    @property
    def action(self) -> SetStatus:
        """The action of an entry without a save."""
        assert self.status is not None
        return SetStatus(status=self.status, reason=self.reason)

    @property
    def authorship(self) -> Authorship:
        """The authorship of its commit."""
        return Authorship(self.write, self.author, self.time_ms)

    @property
    def places(self) -> list[Place]:
        """The places of its states."""
        return [] if self.save is None else [self.save.place, *self.save.companions.values()]

    @property
    def title(self) -> str:
        """Its subject, for messages."""
        if self.save is None:
            return f"status {self.status}"
        return f"phase {self.save.phase}, step {self.save.step}"


class Note(Record):
    """The outcome of an entry."""

    #: Carried into the run, refused, stranded or damaged; then perhaps pushed into a fork, or
    #: deleted, by a person.
    outcome: Outcome
    commit: int | None = None  # number of the commit of its checkpoint
    reason: str | None = None  # why it was not carried, or the fork
