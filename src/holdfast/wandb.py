"""Weights & Biases: `log(checkpoint)` names a checkpoint in a W&B run, and uploads nothing.

docs/integrations/wandb.md shows it. Needs `holdfast-registry[wandb]`.
"""

from __future__ import annotations

from holdfast.registry.adapters.wandb import log

__all__ = ["log"]
