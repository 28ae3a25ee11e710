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
    HoldFields,
    NoteFields,
    PinFields,
    PointRelease,
    Recover,
    RemoveHold,
    RemoveTag,
    ReportMetrics,
    SetHold,
    SetNote,
    SetPin,
    SetTag,
    Thin,
    Thinning,
)
from holdfast.registry.history.actions.lines import (
    Action,
    Commit,
    Forget,
    Free,
    Line,
    Mark,
    Place,
    Seal,
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
    LABEL,
    MOST_LABELS,
    AppendStream,
    AppliedRow,
    ArchiveStream,
    CreateRun,
    DropRun,
    EnterPhase,
    HideRun,
    Lifetime,
    Parent,
    PhaseFields,
    RaiseVersion,
    Rewind,
    RunStatus,
    SegmentFields,
    SetLabels,
    SetStatus,
    TakeOver,
    UndropRun,
    WriterFields,
)
