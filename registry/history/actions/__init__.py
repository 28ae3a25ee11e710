"""What can be written into a run's history: the closed union of actions, and the lines of a slot.

A commit is a list of actions. What a run is now is their replay
(`holdfast.registry.history.replay`). A kind that is not listed here is an error on reading, never
skipped: a reader that skipped an eviction or a pin would hand out, or collect, the wrong thing.
"""

from __future__ import annotations

from holdfast.registry.history.actions.checkpoints import (
    Acknowledge,
    AddCheckpoint,
    CheckpointFields,
    Claim,
    ClaimFields,
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
    Action,
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
    AppendStream,
    AppliedRow,
    ArchiveStream,
    CreateRun,
    DropRun,
    EnterPhase,
    Lifetime,
    Parent,
    PhaseFields,
    Rewind,
    RunStatus,
    SegmentFields,
    SetStatus,
    TakeOver,
    WriterFields,
)

__all__ = [
    "Acknowledge",
    "Action",
    "AddCheckpoint",
    "AppendStream",
    "AppliedRow",
    "ArchiveStream",
    "CheckpointFields",
    "Claim",
    "ClaimFields",
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
    "SegmentFields",
    "SetPin",
    "SetStatus",
    "SetTag",
    "TakeOver",
    "WriterFields",
    "decode_line",
    "line_digest",
]
