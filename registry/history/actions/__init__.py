"""Everything that the log of a run can say: the closed union of actions, and the lines of a slot.

A commit is a list of actions. `holdfast.registry.history.replay` applies them. A reader that meets
a kind that is not listed here stops with an error. If it skipped an eviction or a pin, it would
return, or collect, the wrong thing. `lines` has commits, places and marks; the other
modules have the actions, by subject. Specified in docs/spec.md, section 8.
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
    RemoveTag,
    ReportMetrics,
    SetPin,
    SetTag,
)
from holdfast.registry.history.actions.lines import (
    Action,
    Commit,
    Forget,
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
    "Forget",
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
    "RemoveTag",
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
