"""Actions on the run as a whole: creation, trainer, status, phases, streams, the end."""

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
#: The form of an owner, a project and a label.
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$"
MOST_LABELS = 32
_Label = Annotated[str, Field(pattern=LABEL)]


class Parent(Record):
    """The origin of a fork."""

    run: str
    commit: Annotated[int, Field(ge=0)]  # number of the last commit that the fork shares
    head: DigestField  # SHA-256 of the line of that commit, the same in every registry
    checkpoint: DigestField  # id of the checkpoint that the fork continues from
    phase: PhaseName
    step: int


class CreateRun(Record):
    """Create a run: the first action of commit 0, which names no manifest."""

    action: Literal["run.create"] = "run.create"
    config: Plain = None  # the training configuration
    config_hash: DigestField  # SHA-256 of its canonical encoding
    input_hash: str | None = None  # SHA-256 of the input data, if the caller gave one
    #: The master seed, 64 bits. Hexadecimal, since JSON readers round numbers beyond 2^53.
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    environment: dict[str, str]  # git commit, versions, device, host
    #: The metrics that decide `best`, if there is no specification.
    monitors: tuple[Monitor, ...] = ()
    spec: RunSpec | None = None  # the specification: phases, retention, required keys and so on
    parent: Parent | None = None  # the origin, if the run is a fork
    owner: _Label | None = None  # whose the run is, if the caller said so; see `RunLog.owner`
    project: _Label | None = None  # what it belongs to
    #: Words by which it is found, sorted.
    labels: Annotated[tuple[_Label, ...], Field(min_length=1, max_length=MOST_LABELS)] | None = None
    #: The step at which training is planned to end, as saves count it; nothing depends on it.
    total_steps: Annotated[int, Field(ge=1, lt=2**63)] | None = None


class SetStatus(Record):
    """Set the status of the run."""

    action: Literal["run.status"] = "run.status"
    status: RunStatus
    #: The exception that made it `failed`, in lines: type and message, then frames.
    reason: Annotated[str, Field(max_length=4096)] | None = None


class SetLabels(Record):
    """Replace the labels of the run."""

    action: Literal["run.label"] = "run.label"
    labels: Annotated[tuple[_Label, ...], Field(max_length=MOST_LABELS)]  # sorted


class WriterFields(Record):
    """The trainer that may save."""

    token: str  # random id of its handle
    host: str  # its machine, for the message that a fenced trainer gets


class TakeOver(WriterFields):
    """Make this trainer the only one that may save."""

    action: Literal["run.take_over"] = "run.take_over"


class Rewind(Record):
    """Supersede every checkpoint after the one that training resumed from."""

    action: Literal["run.rewind"] = "run.rewind"
    #: Commit number of that checkpoint; `None` supersedes all.
    to: int | None = None


class AppliedRow(Record):
    """A row of a transition's table, as it was applied."""

    part: str  # the part of the state
    change: Change  # the change of that part
    to: str | None = None  # the name of the copy, if one was made


class PhaseFields(Record):
    """A change of phase, or a pivot or a warm start within one."""

    from_phase: PhaseName  # the phase that ends
    to_phase: PhaseName  # the phase that begins; the same one at a pivot and a warm start
    source: str  # ref of the state that was loaded: within the run, or, of a warm start, in full
    manifest: DigestField  # id of that state
    rows: tuple[AppliedRow, ...] = ()  # the change of each part
    ready: Metrics = empty()  # metrics that were checked, with their values
    #: Frozen states that every checkpoint of the phase has as companions.
    companions: dict[Name, DigestField] = empty()
    name: Name | None = None  # the name of a pivot
    config: Plain = None  # the training configuration from a pivot on, if it gave one
    meta: Plain = None  # plain values about a pivot


class EnterPhase(PhaseFields):
    """Enter a phase by a transition, or the present one again by a pivot."""

    action: Literal["phase.enter"] = "phase.enter"
    enabled: tuple[str, ...] = ()  # conditions that the caller enabled


class SegmentFields(Record):
    """A segment of a stream."""

    manifest: DigestField  # id of the state that holds the entries
    start: Annotated[int, Field(ge=0)]  # position of its first entry in the stream
    count: Annotated[int, Field(ge=1)]  # number of its entries
    first_step: Step  # least step in it
    last_step: Step  # greatest step in it


class AppendStream(SegmentFields):
    """Append a segment to a stream.

    A start behind the end of the stream is an error. With a start before the end, the segment
    replaces the entries from there on; it holds the same entries, merged with new ones.
    """

    action: Literal["stream.append"] = "stream.append"
    stream: Name  # name of the stream
    lifetime: Lifetime  # `forever` or `resettable`; fixed by the first append


class ArchiveStream(Record):
    """Archive the entries of a resettable stream under a label, and empty the stream."""

    action: Literal["stream.archive"] = "stream.archive"
    stream: Name
    label: Name


class HideRun(Record):
    """Drop the run so that it can be taken back: it holds everything until it is freed.

    Attributes:
        reason: Why, for readers of the log.
    """

    action: Literal["run.hide"] = "run.hide"
    reason: str


class UndropRun(Record):
    """Bring a hidden or freed run back; the only action of its commit."""

    action: Literal["run.undrop"] = "run.undrop"


class RaiseVersion(Record):
    """Raise the schema version of the run's specification."""

    action: Literal["run.raise_version"] = "run.raise_version"
    version: int | str  # the version of states from here on


class DropRun(Record):
    """Release everything that the run holds, for ever. Versions before `HideRun` wrote it."""

    action: Literal["run.drop"] = "run.drop"
    reason: str  # why, for readers of the log
