"""Everything that the log of a run can say: the closed union of actions, and the lines of a slot.

A commit is a list of actions. `holdfast.registry.history.replay` applies them. A reader that meets
a kind that is not listed here stops with an error. If it skipped an eviction or a pin, it would
return, or collect, the wrong thing. `lines` has commits, places and marks; the other
modules have the actions, by subject. Specified in docs/spec.md, section 8.
"""

from __future__ import annotations

from holdfast.registry.history.actions.checkpoints import Acknowledge as Acknowledge
from holdfast.registry.history.actions.checkpoints import AddCheckpoint as AddCheckpoint
from holdfast.registry.history.actions.checkpoints import CheckpointFields as CheckpointFields
from holdfast.registry.history.actions.checkpoints import Claim as Claim
from holdfast.registry.history.actions.checkpoints import ClaimFields as ClaimFields
from holdfast.registry.history.actions.checkpoints import CommitKeys as CommitKeys
from holdfast.registry.history.actions.checkpoints import Evict as Evict
from holdfast.registry.history.actions.checkpoints import Eviction as Eviction
from holdfast.registry.history.actions.checkpoints import HoldFields as HoldFields
from holdfast.registry.history.actions.checkpoints import NoteFields as NoteFields
from holdfast.registry.history.actions.checkpoints import PinFields as PinFields
from holdfast.registry.history.actions.checkpoints import PointRelease as PointRelease
from holdfast.registry.history.actions.checkpoints import Recover as Recover
from holdfast.registry.history.actions.checkpoints import RemoveHold as RemoveHold
from holdfast.registry.history.actions.checkpoints import RemoveTag as RemoveTag
from holdfast.registry.history.actions.checkpoints import ReportMetrics as ReportMetrics
from holdfast.registry.history.actions.checkpoints import SetHold as SetHold
from holdfast.registry.history.actions.checkpoints import SetNote as SetNote
from holdfast.registry.history.actions.checkpoints import SetPin as SetPin
from holdfast.registry.history.actions.checkpoints import SetTag as SetTag
from holdfast.registry.history.actions.checkpoints import Thin as Thin
from holdfast.registry.history.actions.checkpoints import Thinning as Thinning
from holdfast.registry.history.actions.lines import Action as Action
from holdfast.registry.history.actions.lines import Commit as Commit
from holdfast.registry.history.actions.lines import Forget as Forget
from holdfast.registry.history.actions.lines import Free as Free
from holdfast.registry.history.actions.lines import Line as Line
from holdfast.registry.history.actions.lines import Mark as Mark
from holdfast.registry.history.actions.lines import Place as Place
from holdfast.registry.history.actions.lines import Seal as Seal
from holdfast.registry.history.actions.lines import decode_line as decode_line
from holdfast.registry.history.actions.lines import line_digest as line_digest
from holdfast.registry.history.actions.pool import EntryFields as EntryFields
from holdfast.registry.history.actions.pool import EvictEntries as EvictEntries
from holdfast.registry.history.actions.pool import Promote as Promote
from holdfast.registry.history.actions.pool import Rated as Rated
from holdfast.registry.history.actions.pool import RateMatch as RateMatch
from holdfast.registry.history.actions.run import LABEL as LABEL
from holdfast.registry.history.actions.run import MOST_LABELS as MOST_LABELS
from holdfast.registry.history.actions.run import AppendStream as AppendStream
from holdfast.registry.history.actions.run import AppliedRow as AppliedRow
from holdfast.registry.history.actions.run import ArchiveStream as ArchiveStream
from holdfast.registry.history.actions.run import CreateRun as CreateRun
from holdfast.registry.history.actions.run import DropRun as DropRun
from holdfast.registry.history.actions.run import EnterPhase as EnterPhase
from holdfast.registry.history.actions.run import HideRun as HideRun
from holdfast.registry.history.actions.run import Lifetime as Lifetime
from holdfast.registry.history.actions.run import Parent as Parent
from holdfast.registry.history.actions.run import PhaseFields as PhaseFields
from holdfast.registry.history.actions.run import RaiseVersion as RaiseVersion
from holdfast.registry.history.actions.run import Rewind as Rewind
from holdfast.registry.history.actions.run import RunStatus as RunStatus
from holdfast.registry.history.actions.run import SegmentFields as SegmentFields
from holdfast.registry.history.actions.run import SetLabels as SetLabels
from holdfast.registry.history.actions.run import SetStatus as SetStatus
from holdfast.registry.history.actions.run import TakeOver as TakeOver
from holdfast.registry.history.actions.run import UndropRun as UndropRun
from holdfast.registry.history.actions.run import WriterFields as WriterFields
