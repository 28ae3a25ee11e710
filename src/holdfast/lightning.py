"""Lightning: `HoldfastCheckpoint(run)` saves and resumes a run, `HoldfastIO(run)` is its plugin.

docs/integrations/lightning.md shows both. Needs `holdfast-registry[lightning]`.
"""

from __future__ import annotations

from holdfast.registry.adapters.lightning import HoldfastCheckpoint
from holdfast.registry.adapters.lightning_io import HoldfastIO

__all__ = ["HoldfastCheckpoint", "HoldfastIO"]
