"""Actions on the run as a whole: creation, trainer, status, phases, streams, the end."""

from __future__ import annotations

from typing import Annotated, Literal

from holdfast.registry.spec import Change, Monitor, RunSpec
from holdfast.registry.values import (
    DigestField,
    Field,
    Metrics,
    Name,
    PhaseName,
    Plain,
    Record,
    Step,
    empty,
)

RunStatus = Literal["running", "interrupted", "completed", "failed"]
Lifetime = Literal["forever", "resettable"]


class Parent(Record):
    """The origin of a fork."""

    run: str
    commit: Annotated[int, Field(ge=0)]  # number of the last commit that the fork shares
    head: DigestField  # SHA-256 of the line of that commit, the same in every registry
    checkpoint: DigestField  # id of the checkpoint that the fork continues from
    phase: PhaseName
    step: int


class CreateRun(Record):
    """Create a run: the first action of commit 0, which names no manifest.

    Attributes:
        config: The training configuration.
        config_hash: SHA-256 of its canonical encoding.
        input_hash: SHA-256 of the input data, if the caller gave one.
        seed: The master seed, 64 bits. Hexadecimal, since JSON readers round numbers beyond 2^53.
        environment: Git commit, versions, device, host.
        monitors: The metrics that decide `best`, if there is no specification.
        spec: The specification: phases, retention, required keys and so on.
        parent: The origin, if the run is a fork.
    """

    action: Literal["run.create"] = "run.create"
    config: Plain = None
    config_hash: DigestField
    input_hash: str | None = None
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    environment: dict[str, str]
    monitors: tuple[Monitor, ...] = ()
    spec: RunSpec | None = None
    parent: Parent | None = None


class SetStatus(Record):
    """Set the status of the run.

    Attributes:
        status: The status.
        reason: The exception that made it `failed`, in lines: type and message, then frames.
    """

    action: Literal["run.status"] = "run.status"
    status: RunStatus
    reason: Annotated[str, Field(max_length=4096)] | None = None


class WriterFields(Record):
    """The trainer that may save.

    Attributes:
        token: Random id of its handle.
        host: Its machine, for the message that a fenced trainer gets.
    """

    token: str
    host: str


class TakeOver(WriterFields):
    """Make this trainer the only one that may save."""

    action: Literal["run.take_over"] = "run.take_over"


class Rewind(Record):
    """Supersede every checkpoint after the one that training resumed from.

    Attributes:
        to: Commit number of that checkpoint; `None` supersedes all.
    """

    action: Literal["run.rewind"] = "run.rewind"
    to: int | None = None


class AppliedRow(Record):
    """A row of a transition's table, as it was applied."""

    part: str  # the part of the state
    change: Change  # the change of that part
    to: str | None = None  # the name of the copy, if one was made


class PhaseFields(Record):
    """A change of phase, or a pivot or a warm start within one.

    Attributes:
        from_phase: The phase that ends.
        to_phase: The phase that begins; the same one at a pivot and a warm start.
        source: Ref of the state that was loaded: within the run, or, of a warm start, in full.
        manifest: Id of that state.
        rows: The change of each part.
        ready: Metrics that were checked, with their values.
        companions: Frozen states that every checkpoint of the phase has as companions.
        name: The name of a pivot.
    """

    from_phase: PhaseName
    to_phase: PhaseName
    source: str
    manifest: DigestField
    rows: tuple[AppliedRow, ...] = ()
    ready: Metrics = empty()
    companions: dict[Name, DigestField] = empty()
    name: Name | None = None


class EnterPhase(PhaseFields):
    """Enter a phase by a transition, or the present one again by a pivot.

    Attributes:
        enabled: Conditions that the caller enabled.
    """

    action: Literal["phase.enter"] = "phase.enter"
    enabled: tuple[str, ...] = ()


class SegmentFields(Record):
    """A segment of a stream.

    Attributes:
        manifest: Id of the state that holds the entries.
        start: Position of its first entry in the stream.
        count: Number of its entries.
        first_step: Least step in it.
        last_step: Greatest step in it.
    """

    manifest: DigestField
    start: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1)]
    first_step: Step
    last_step: Step


class AppendStream(SegmentFields):
    """Append a segment to a stream.

    A start behind the end of the stream is an error. With a start before the end, the segment
    replaces the entries from there on; it holds the same entries, merged with new ones.

    Attributes:
        stream: Name of the stream.
        lifetime: `forever` or `resettable`; fixed by the first append.
    """

    action: Literal["stream.append"] = "stream.append"
    stream: Name
    lifetime: Lifetime


class ArchiveStream(Record):
    """Archive the entries of a resettable stream under a label, and empty the stream."""

    action: Literal["stream.archive"] = "stream.archive"
    stream: Name
    label: Name


class DropRun(Record):
    """Release everything that the run holds, pins included. Nothing can be saved afterwards.

    Attributes:
        reason: Why, for readers of the log.
    """

    action: Literal["run.drop"] = "run.drop"
    reason: str
