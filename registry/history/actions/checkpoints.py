"""Actions on checkpoints: add, report metrics, evict, recover, name, claim."""

from typing import Annotated, Literal

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


class CommitKeys(Record):
    """Top-level keys of a state that are stored in the commit, not in the manifest.

    So trainings that differ only in these keys have equal ids.
    """

    order: tuple[str, ...]  # all top-level keys of the saved state, in order
    values: Plain  # the keys that the commit stores, with their values


class CheckpointFields(Record):
    """A checkpoint."""

    manifest: DigestField  # its id
    phase: PhaseName  # name or number of the phase
    step: Step  # its training step, or the value of another counter
    meta: Plain = None  # plain values that were saved with the state
    metrics: Metrics = empty()  # its metrics by name
    size_bytes: Annotated[int, Field(ge=0)]  # bytes of all tensors
    tier: Name | None = None  # retention class within the phase
    #: Keys of the state that the commit stores instead of the manifest.
    commit_keys: CommitKeys | None = None


class AddCheckpoint(CheckpointFields):
    """Add a checkpoint."""

    action: Literal["checkpoint.add"] = "checkpoint.add"
    #: Ids of the states that were saved with it, by name.
    companions: dict[Name, DigestField] | None = None
    #: Paths of weights that hold NaN or infinity, the first few.
    nonfinite: tuple[str, ...] | None = None
    held_back: bool | None = None  # whether it is excluded from latest, best and resuming


class ReportMetrics(Record):
    """Add or replace metrics of a checkpoint."""

    action: Literal["checkpoint.report"] = "checkpoint.report"
    checkpoint: int  # commit number of the checkpoint
    metrics: Metrics  # the values
    tier: Name | None = None  # its new tier, if the values change it


class Eviction(Record):
    """The eviction of one checkpoint."""

    checkpoint: int  # commit number of the checkpoint
    reason: str  # why it is not kept


class Evict(Record):
    """Evict checkpoints: no ref finds them any more, and collection may delete their data."""

    action: Literal["checkpoint.evict"] = "checkpoint.evict"
    evictions: Annotated[tuple[Eviction, ...], Field(min_length=1)]


class Thinning(Record):
    """The thinning of one checkpoint."""

    checkpoint: int  # commit number of the checkpoint
    #: The components that it holds from here on, in the order of its manifest.
    keep: Annotated[tuple[str, ...], Field(min_length=1)]
    reason: str  # why the others are not kept


class Thin(Record):
    """Keep only some components of checkpoints; collection may delete the data of the others."""

    action: Literal["checkpoint.thin"] = "checkpoint.thin"
    thinnings: Annotated[tuple[Thinning, ...], Field(min_length=1)]


class Recover(Record):
    """Recover evicted checkpoints, and the components of thinned ones.

    Retention neither evicts nor thins them again.
    """

    action: Literal["checkpoint.recover"] = "checkpoint.recover"
    checkpoints: Annotated[tuple[int, ...], Field(min_length=1)]  # their commit numbers


class HoldFields(Record):
    """A hold on a checkpoint, or on the whole run."""

    checkpoint: int | None = None  # commit number of the checkpoint; `None`: the whole run
    until_ms: int  # the hold ends then, in milliseconds since 1970 by the store's clock
    reason: str  # why


class SetHold(HoldFields):
    """Hold: evictions, thinnings, drops and rewinds refuse it until the hold is removed."""

    action: Literal["hold.set"] = "hold.set"


class RemoveHold(Record):
    """Remove a hold, whose time is over, or early for a reason."""

    action: Literal["hold.remove"] = "hold.remove"
    checkpoint: int | None = None  # as in the hold
    reason: str | None = None  # why it ends early; `None`: its time is over


class NoteFields(Record):
    """A note on a checkpoint, or on the whole run."""

    checkpoint: int | None = None  # commit number of the checkpoint; `None`: the whole run
    text: Annotated[str, Field(max_length=10_000)]  # plain text


class SetNote(NoteFields):
    """Write a note in place of the one before; an empty text removes it."""

    action: Literal["note.set"] = "note.set"


class SetTag(Record):
    """Point a movable name at a checkpoint."""

    action: Literal["tag.set"] = "tag.set"
    name: Name
    checkpoint: int


class RemoveTag(Record):
    """Take a movable name away."""

    action: Literal["tag.remove"] = "tag.remove"
    name: Name


class PinFields(Record):
    """A state that a name keeps."""

    manifest: DigestField  # id of the state
    checkpoint: int | None = None  # commit number of the checkpoint that it is, or was made from
    metrics: Metrics = empty()  # values that describe it
    card: DigestField | None = None  # id of the model card, a state of its own


class SetPin(PinFields):
    """Give an immutable name to a stored state."""

    action: Literal["pin.set"] = "pin.set"
    kind: Literal["gate", "release", "artifact"]  # `gate`, `release` or `artifact`
    #: The name; of a release, its semantic version.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    #: Id of the damaged state that this one replaces; of gates only.
    replaces: DigestField | None = None


class PointRelease(Record):
    """Set the release that `releases/latest` names: the newest, or one before it."""

    action: Literal["release.point"] = "release.point"
    version: str  # the release
    reason: str = ""  # why, for readers of the log


class ClaimFields(Record):
    """A checkpoint that a follower works on."""

    checkpoint: int  # commit number of the checkpoint
    follower: str  # random id of the follower
    #: End of the claim, in milliseconds since the epoch by the follower's clock. Until then
    #: retention does not evict the checkpoint. After it another follower may evaluate the
    #: checkpoint a second time.
    until_ms: int


class Claim(ClaimFields):
    """Claim a checkpoint: until the claim ends, nobody else of the group works on it."""

    action: Literal["watch.claim"] = "watch.claim"
    group: Name  # the group of followers


class Acknowledge(Record):
    """Record that a follower has finished a checkpoint: the group is done with it."""

    action: Literal["watch.ack"] = "watch.ack"
    group: Name
    checkpoint: int
    follower: str
