"""Features of Thalia's files alone: precision, compression levels, deltas, regions, versions.

`holdfast.formats.read`, `write`, `inspect` and `validate` know these files too.
"""

from __future__ import annotations

from holdfast.registry.formats.thalia import (
    POLICIES,
    PrecisionPolicy,
    load,
    migrate,
    save,
    save_delta,
)

__all__ = ["POLICIES", "PrecisionPolicy", "load", "migrate", "save", "save_delta"]
