"""Features of Thalia's files alone: precision, compression levels, deltas, regions, versions.

`BrainCheckpoint` has the names of Thalia's own class. `holdfast.formats.read`, `write`, `inspect`
and `validate` know these files too.
"""

from __future__ import annotations

from holdfast.registry.formats.thalia import (
    POLICIES,
    BrainCheckpoint,
    BrainState,
    PrecisionPolicy,
    load,
    migrate,
    save,
    save_delta,
)

__all__ = [
    "POLICIES",
    "BrainCheckpoint",
    "BrainState",
    "PrecisionPolicy",
    "load",
    "migrate",
    "save",
    "save_delta",
]
