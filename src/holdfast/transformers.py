"""The HF Trainer: `HoldfastCallback(run)` saves and resumes a run, `export` writes a Hub folder.

docs/integrations/transformers.md shows both. Needs `holdfast-registry[transformers]`.
"""

from __future__ import annotations

from holdfast.registry.adapters.transformers import HoldfastCallback
from holdfast.registry.layouts.hub_folder import export

__all__ = ["HoldfastCallback", "export"]
