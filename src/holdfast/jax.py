"""Pytrees of jax: `holdfast.jax.pack(tree)` for a save, `holdfast.jax.restore(target, stored)`.

docs/integrations/jax.md shows both in a training. Needs `holdfast-registry[jax]`.
"""

from __future__ import annotations

from holdfast.registry.adapters.jax import pack, restore

__all__ = ["pack", "restore"]
