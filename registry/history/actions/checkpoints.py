"""Actions on checkpoints: adding, reporting, evicting, bringing back, naming."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.registry.values.records import (
    DigestField,
    Metrics,
    Name,
    PhaseName,
    Plain,
    Record,
    Step,
)


class CommitKeys(Record):
    """Top-level keys of a state that its commit keeps, so that equal trainings have equal ids.

    Attributes:
        order: Every top-level key of the state as it was given, in order.
        values: The keys that were moved, with their values.
    """

    order: tuple[str, ...]
    values: Plain


class CheckpointFields(Record):
    """A checkpoint.

    Attributes:
        manifest: Its id.
        phase: Name or number of the phase.
        step: The counter's value.
        meta: Plain values beside the state.
        tier: Retention class within the phase.
        commit_keys: Keys of the state that its commit keeps instead of the manifest.
    """

    manifest: DigestField
    phase: PhaseName
    step: Step
    meta: Plain = None
    tier: Name | None = None
    commit_keys: CommitKeys | None = None


class AddCheckpoint(CheckpointFields):
    """Add a checkpoint.

    Attributes:
        metrics: Values known at save.
        size_bytes: Bytes of all tensors.
        companions: Ids of the states beside it, by name.
        nonfinite: Paths of weights that hold NaN or infinity, the first few.
        held_back: Whether it is never latest, best or resumed from.
    """

    action: Literal["checkpoint.add"] = "checkpoint.add"
    metrics: Metrics = Field(default={})
    size_bytes: Annotated[int, Field(ge=0)]
    companions: dict[Name, DigestField] | None = None
    nonfinite: tuple[str, ...] | None = None
    held_back: bool | None = None


class ReportMetrics(Record):
    """Add or replace metrics of a checkpoint.

    Attributes:
        checkpoint: Commit number of the checkpoint.
        metrics: The values.
        tier: The tier that it belongs to by them, where that is another one.
    """

    action: Literal["checkpoint.report"] = "checkpoint.report"
    checkpoint: int
    metrics: Metrics
    tier: Name | None = None


class Eviction(Record):
    """One checkpoint that goes.

    Attributes:
        checkpoint: Commit number of the checkpoint.
        reason: Why retention does not keep it.
    """

    checkpoint: int
    reason: str


class Evict(Record):
    """Let checkpoints go: they are found no more, and collection may remove their data."""

    action: Literal["checkpoint.evict"] = "checkpoint.evict"
    evictions: Annotated[tuple[Eviction, ...], Field(min_length=1)]


class Recover(Record):
    """Bring evicted checkpoints back; retention lets them alone from here on.

    Attributes:
        checkpoints: Their commit numbers.
    """

    action: Literal["checkpoint.recover"] = "checkpoint.recover"
    checkpoints: Annotated[tuple[int, ...], Field(min_length=1)]


class SetTag(Record):
    """Point a movable name at a checkpoint."""

    action: Literal["tag.set"] = "tag.set"
    name: Name
    checkpoint: int


class PinFields(Record):
    """A state that a name keeps.

    Attributes:
        manifest: Id of the state.
        checkpoint: Commit number of the checkpoint that it is, or was cut from.
        metrics: Values that describe it.
        card: Id of the model card, a state of its own.
    """

    manifest: DigestField
    checkpoint: int | None = None
    metrics: Metrics = Field(default={})
    card: DigestField | None = None


class SetPin(PinFields):
    """Give an immutable name to a stored state.

    Attributes:
        kind: `gate`, `release` or `artifact`.
        name: The name; of a release, its semantic version.
        replaces: Id of the damaged state that this one replaces; of gates only.
    """

    action: Literal["pin.set"] = "pin.set"
    kind: Literal["gate", "release", "artifact"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    replaces: DigestField | None = None


class PointRelease(Record):
    """Say which release is `releases/latest`: the last published, or an older one after a rollback.

    Attributes:
        version: The release.
        reason: Why, for whoever reads the log.
    """

    action: Literal["release.point"] = "release.point"
    version: str
    reason: str = ""
