"""What a run is now: the replay of its log by pure functions.

`RunManifest` is the result, a frozen value; `advance` folds further slots into it. The rules that
make a history legal are checked here and nowhere else, so that writers, readers, `verify` and
`sync` agree on them. Reading slots is the business of `registry.log`.
"""

from __future__ import annotations

from registry.state.gone import Forgotten, Gone, has_bit
from registry.state.records import (
    Archive,
    CheckpointRecord,
    ClaimRecord,
    GroupRecord,
    PhaseRecord,
    Pin,
    PoolRecord,
    Segment,
    StreamMark,
    StreamRecord,
    WriterRecord,
)
from registry.state.replay import advance, foresee
from registry.state.run_manifest import RunManifest
from registry.state.slots import Slot, link_after

__all__ = [
    "Archive",
    "CheckpointRecord",
    "ClaimRecord",
    "Forgotten",
    "Gone",
    "GroupRecord",
    "PhaseRecord",
    "Pin",
    "PoolRecord",
    "RunManifest",
    "Segment",
    "Slot",
    "StreamMark",
    "StreamRecord",
    "WriterRecord",
    "advance",
    "foresee",
    "has_bit",
    "link_after",
]
