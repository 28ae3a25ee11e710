"""The replay of a run's log, by pure functions.

`RunManifest` is the result, a frozen value; `advance` applies further slots to it. The rules that
make a history legal are checked here and nowhere else, so that writers, readers, `verify` and
`sync` agree on them. `run_parts` has the records in a manifest, `draft` a manifest that is being
changed, `apply` the effect of each action, `evicted` the numbers of evicted checkpoints,
`parted_run` a run of which a snapshot has only the newest records.
`holdfast.registry.history.log` reads the slots. Specified in docs/spec.md, section 9.
"""

from __future__ import annotations

from holdfast.registry.history.replay.advance import Slot as Slot
from holdfast.registry.history.replay.advance import advance as advance
from holdfast.registry.history.replay.advance import foresee as foresee
from holdfast.registry.history.replay.advance import link_after as link_after
from holdfast.registry.history.replay.evicted import NeedsHistory as NeedsHistory
from holdfast.registry.history.replay.evicted import has_bit as has_bit
from holdfast.registry.history.replay.parted_run import PART_NAMES as PART_NAMES
from holdfast.registry.history.replay.parted_run import PartedRun as PartedRun
from holdfast.registry.history.replay.parted_run import PartRef as PartRef
from holdfast.registry.history.replay.parted_run import RecentRun as RecentRun
from holdfast.registry.history.replay.parted_run import SnapshotPart as SnapshotPart
from holdfast.registry.history.replay.run_manifest import RunManifest as RunManifest
from holdfast.registry.history.replay.run_parts import CheckpointRecord as CheckpointRecord
from holdfast.registry.history.replay.run_parts import Hold as Hold
from holdfast.registry.history.replay.run_parts import Note as Note
from holdfast.registry.history.replay.run_parts import PhaseRecord as PhaseRecord
from holdfast.registry.history.replay.run_parts import Pin as Pin
from holdfast.registry.history.replay.run_parts import PoolRecord as PoolRecord
from holdfast.registry.history.replay.run_parts import Segment as Segment
from holdfast.registry.history.replay.run_parts import StreamRecord as StreamRecord
