"""Actions on the run as a whole: beginning, trainer, status, phases, the end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.registry.spec import Change, RunSpec
from holdfast.registry.spec.monitors import Monitor
from holdfast.registry.values.records import (
    AtFirstUse,
    DigestField,
    Metrics,
    Name,
    PhaseName,
    Plain,
    Record,
)

RunStatus = Literal["running", "interrupted", "completed", "failed"]


class Parent(Record):
    """Where a fork comes from.

    Attributes:
        run: The run.
        commit: Number of the last commit that the fork shares.
        head: SHA-256 of that commit's line: the same history in whichever registry.
        checkpoint: Id of the checkpoint that the fork continues from.
        phase: Its phase.
        step: Its step.
    """

    run: str
    commit: Annotated[int, Field(ge=0)]
    head: DigestField
    checkpoint: DigestField
    phase: PhaseName
    step: int


class CreateRun(Record):
    """Begin a run. The first action of commit 0; it references no manifest.

    Attributes:
        config: The training configuration.
        config_hash: SHA-256 of its canonical encoding.
        input_hash: SHA-256 of the input data, where the caller gives one.
        seed: The master seed, 64 bits in hexadecimal: beyond 2^53 other readers' numbers round.
        environment: Git commit, versions, device, host.
        monitors: What decides `best`, where no specification says so.
        spec: What the run is to be.
        parent: Where it was forked from.
    """

    action: Literal["run.create"] = "run.create"
    config: Plain = None
    config_hash: DigestField
    input_hash: str | None = None
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    environment: dict[str, str]
    monitors: tuple[Monitor, ...] = ()
    spec: Annotated[RunSpec, AtFirstUse()] | None = None
    parent: Parent | None = None


class SetStatus(Record):
    """Say how the run stands."""

    action: Literal["run.status"] = "run.status"
    status: RunStatus


class TakeOver(Record):
    """Make this trainer the only one that may save.

    Attributes:
        token: Random, of the training handle.
        host: Where it runs, for the message that the fenced one gets.
    """

    action: Literal["run.take_over"] = "run.take_over"
    token: str
    host: str


class Rewind(Record):
    """Supersede every checkpoint after the one that training resumed from.

    Attributes:
        to: Commit number of the checkpoint that was resumed from; `None` supersedes all.
    """

    action: Literal["run.rewind"] = "run.rewind"
    to: int | None = None


class AppliedRow(Record):
    """A row of a transition's table as it was carried out.

    Attributes:
        part: The part of the state that it was about.
        change: What became of it.
        to: The name of the copy, where one was made.
    """

    part: str
    change: Change
    to: str | None = None


class PhaseFields(Record):
    """A change of phase.

    Attributes:
        from_phase: The phase that ends.
        to_phase: The phase that begins.
        source: Ref within the run of the state that was loaded.
        manifest: Its id.
        rows: The change of each part.
        ready: Metrics that were checked, with their values.
        companions: Frozen states that every checkpoint of the phase has beside it.
    """

    from_phase: PhaseName
    to_phase: PhaseName
    source: str
    manifest: DigestField
    rows: tuple[AppliedRow, ...] = ()
    ready: Metrics = Field(default={})
    companions: dict[Name, DigestField] = Field(default={})


class EnterPhase(PhaseFields):
    """Begin a phase, by a transition.

    Attributes:
        enabled: Conditions that the caller enabled.
    """

    action: Literal["phase.enter"] = "phase.enter"
    enabled: tuple[str, ...] = ()


class DropRun(Record):
    """Release everything that the run holds, pins included. Nothing can be saved afterwards.

    Attributes:
        reason: Why, for whoever reads the log.
    """

    action: Literal["run.drop"] = "run.drop"
    reason: str
