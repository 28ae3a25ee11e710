"""The files of a journal: its id, takeovers, entries and notes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.registry.history.actions import CommitKeys, Place, RunStatus, SetStatus
from holdfast.registry.history.log import Signature
from holdfast.registry.values.records import Metrics, Name, PhaseName, Plain, Record, Step

FORMAT: Literal["holdfast.journal/2"] = "holdfast.journal/2"
#: Length of the id of a journal.
ID_DIGITS = 16
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Outcome = Literal["carried", "refused", "stranded", "damaged", "pushed", "deleted"]


class JournalId(Record):
    """`journal.json` of version 1: the only id of the journal.

    Attributes:
        id: Random; the tokens of its takeovers begin with it.
    """

    format: Literal["holdfast.journal/1"]
    id: Id


class Machine(Record):
    """A machine that uses the journal; the newest one is the present one.

    Attributes:
        id: Random; the tokens of its takeovers begin with it.
        machine: Tells it from other machines.
    """

    format: Literal["holdfast.journal/2"] = FORMAT
    id: Id
    machine: str


class Takeover(Record):
    """A takeover of the run by a handle of this machine; it is in the registry.

    Attributes:
        token: The token of the handle.
        slot: The slot of the log that has it.
    """

    token: str
    slot: Annotated[int, Field(ge=0)]


class SaveFields(Record):
    """A save: its request and the places of its states; never actions.

    Attributes:
        phase: The phase.
        step: The step.
        metrics: Metrics by name.
        meta: Plain values, encoded.
        tier: The given retention class.
        counters: Values of the counters that the tiers of the phase name.
        commit_keys: Keys of the state that the commit stores.
        nonfinite: Paths of watched tensors that hold NaN or infinity.
        allow_nonfinite: Whether it counts nevertheless.
        size_bytes: Bytes of all tensors.
        place: The state, in the store of the entry.
        companions: The given companions, there too.
        streams: New entries of streams, encoded.
        resumes_commit: The checkpoint that training continues from: its commit number.
        resumes_write: The same for a checkpoint that was only in the journal: the `write` of its
            entry.
        keeps: Commit number of a pivot after that checkpoint, from which training continues too.
    """

    phase: PhaseName
    step: Step
    metrics: Metrics = Field(default={})
    meta: Plain = None
    tier: Name | None = None
    counters: dict[str, int] = Field(default={})
    commit_keys: CommitKeys | None = None
    nonfinite: tuple[str, ...] = ()
    allow_nonfinite: bool = False
    size_bytes: Annotated[int, Field(ge=0)]
    place: Place
    companions: dict[Name, Place] = Field(default={})
    streams: dict[Name, Plain] = Field(default={})
    resumes_commit: int | None = None
    resumes_write: str | None = None
    keeps: int | None = None


class Entry(Record):
    """An acknowledged save, or a change of the status.

    Attributes:
        run: The run.
        takeover: Number of the takeover under which it was acknowledged.
        search_from: The slot from which on its `write`, and that of `resumes_write`, can be.
        write: The `write` of its commit.
        author: `user@host`.
        time_ms: The time of its acknowledgement, by the clock of this machine.
        save: The save.
        status: The new status.
        follows: The `write` of the entry that its training continues from, if there is one; entries
            of version 1 have none.
        reason: The exception that made it `failed`.
    """

    format: Literal["holdfast.journal/1", "holdfast.journal/2"] = FORMAT
    run: str
    takeover: Annotated[int, Field(ge=1)]
    search_from: Annotated[int, Field(ge=0)]
    write: Id
    author: str
    time_ms: int
    save: SaveFields | None = None
    status: RunStatus | None = None
    follows: Id | None = None
    reason: str | None = None

    @property
    def action(self) -> SetStatus:
        """The action of an entry without a save."""
        assert self.status is not None
        return SetStatus(status=self.status, reason=self.reason)

    @property
    def signature(self) -> Signature:
        """The signature of its commit."""
        return Signature(self.write, self.author, self.time_ms)

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
    """The outcome of an entry.

    Attributes:
        outcome: Carried into the run, refused, stranded, damaged, or what a person did then: pushed
            into a fork, or deleted.
        commit: Number of the commit of its checkpoint.
        reason: Why it was not carried, or the fork.
    """

    outcome: Outcome
    commit: int | None = None
    reason: str | None = None
