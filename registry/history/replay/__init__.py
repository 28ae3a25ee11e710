"""What a run is now: the replay of its log by pure functions.

`RunManifest` is the result, a frozen value; `advance` folds further slots into it. The rules that
make a history legal are checked here and nowhere else, so that writers, readers, `verify` and
`sync` agree on them. Reading slots is the business of `holdfast.registry.history.log`.
"""

from __future__ import annotations

from holdfast.registry.history.replay.advance import advance, foresee
from holdfast.registry.history.replay.evicted import EvictedNumbers, Forgotten, has_bit
from holdfast.registry.history.replay.run_manifest import RunManifest
from holdfast.registry.history.replay.run_parts import (
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
from holdfast.registry.history.replay.slot import Slot, link_after

__all__ = [
    "Archive",
    "CheckpointRecord",
    "ClaimRecord",
    "EvictedNumbers",
    "Forgotten",
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
