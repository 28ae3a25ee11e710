"""The replay of a run's log, by pure functions.

`RunManifest` is the result, a frozen value; `advance` applies further slots to it. The rules that
make a history legal are checked here and nowhere else, so that writers, readers, `verify` and
`sync` agree on them. `run_parts` has the records in a manifest, `draft` a manifest that is being
changed, `apply` the effect of each action, `evicted` the numbers of evicted checkpoints,
`parted_run` a run of which a snapshot has only the newest records.
`holdfast.registry.history.log` reads the slots. Specified in docs/spec.md, section 9.
"""

from __future__ import annotations

from holdfast.registry.history.replay.advance import Slot, advance, foresee, link_after
from holdfast.registry.history.replay.evicted import NeedsHistory, has_bit
from holdfast.registry.history.replay.parted_run import (
    PART_NAMES,
    PartedRun,
    PartRef,
    RecentRun,
    SnapshotPart,
)
from holdfast.registry.history.replay.run_manifest import RunManifest
from holdfast.registry.history.replay.run_parts import (
    CheckpointRecord,
    Hold,
    Note,
    PhaseRecord,
    Pin,
    PoolRecord,
    Segment,
    StreamRecord,
)
