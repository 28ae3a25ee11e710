"""What can be written into a run's history: the closed union of actions, and the lines of a slot.

A commit is a list of actions. What a run is now is their replay
(`holdfast.registry.history.replay`). A kind that is not listed here is an error on reading, never
skipped: a reader that skipped an eviction or a pin would hand out, or collect, the wrong thing.
"""

from __future__ import annotations

from holdfast.registry.history.actions.checkpoints import (
    AddCheckpoint,
    CheckpointFields,
    CommitKeys,
    Evict,
    Eviction,
    PinFields,
    PointRelease,
    Recover,
    ReportMetrics,
    SetPin,
    SetTag,
)
from holdfast.registry.history.actions.lines import (
    Commit,
    Line,
    Mark,
    Place,
    decode_line,
    line_digest,
)
from holdfast.registry.history.actions.pool import (
    EntryFields,
    EvictEntries,
    Promote,
    Rated,
    RateMatch,
)
from holdfast.registry.history.actions.run import (
    AppliedRow,
    CreateRun,
    DropRun,
    EnterPhase,
    Parent,
    PhaseFields,
    Rewind,
    RunStatus,
    SetStatus,
    TakeOver,
)
from holdfast.registry.history.actions.streams import AppendStream, ArchiveStream, Lifetime
from holdfast.registry.history.actions.union import Action
from holdfast.registry.history.actions.watching import Acknowledge, Claim

__all__ = [
    "Acknowledge",
    "Action",
    "AddCheckpoint",
    "AppendStream",
    "AppliedRow",
    "ArchiveStream",
    "CheckpointFields",
    "Claim",
    "Commit",
    "CommitKeys",
    "CreateRun",
    "DropRun",
    "EnterPhase",
    "EntryFields",
    "Evict",
    "EvictEntries",
    "Eviction",
    "Lifetime",
    "Line",
    "Mark",
    "Parent",
    "PhaseFields",
    "PinFields",
    "Place",
    "PointRelease",
    "Promote",
    "RateMatch",
    "Rated",
    "Recover",
    "ReportMetrics",
    "Rewind",
    "RunStatus",
    "SetPin",
    "SetStatus",
    "SetTag",
    "TakeOver",
    "decode_line",
    "line_digest",
]
