"""The closed union of actions."""

from __future__ import annotations

from typing import Annotated

from registry.history.actions.checkpoints import (
    AddCheckpoint,
    Evict,
    PointRelease,
    Recover,
    ReportMetrics,
    SetPin,
    SetTag,
)
from registry.history.actions.pool import EvictEntries, Promote, RateMatch
from registry.history.actions.run import CreateRun, DropRun, EnterPhase, Rewind, SetStatus, TakeOver
from registry.history.actions.streams import AppendStream, ArchiveStream
from registry.history.actions.watching import Acknowledge, Claim
from registry.values.records import AtFirstUse

Action = Annotated[
    CreateRun
    | SetStatus
    | TakeOver
    | Rewind
    | EnterPhase
    | DropRun
    | AddCheckpoint
    | ReportMetrics
    | Evict
    | Recover
    | SetTag
    | SetPin
    | PointRelease
    | Promote
    | RateMatch
    | EvictEntries
    | AppendStream
    | ArchiveStream
    | Claim
    | Acknowledge,
    AtFirstUse("action"),
]
