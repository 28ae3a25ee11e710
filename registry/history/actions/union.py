"""The closed union of actions."""

from __future__ import annotations

from typing import Annotated

from holdfast.registry.history.actions.checkpoints import (
    AddCheckpoint,
    Evict,
    PointRelease,
    Recover,
    ReportMetrics,
    SetPin,
    SetTag,
)
from holdfast.registry.history.actions.pool import EvictEntries, Promote, RateMatch
from holdfast.registry.history.actions.run import (
    CreateRun,
    DropRun,
    EnterPhase,
    Rewind,
    SetStatus,
    TakeOver,
)
from holdfast.registry.history.actions.streams import AppendStream, ArchiveStream
from holdfast.registry.history.actions.watching import Acknowledge, Claim
from holdfast.registry.values.records import AtFirstUse

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
