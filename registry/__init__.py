"""Holdfast: a checkpoint registry for machine learning that needs no server.

`init` makes a registry, `open` opens one, `sync` copies between two; everything else hangs on the
objects that they return. `docs/spec.md` says what is on the store.
"""

from __future__ import annotations

from registry.actions import Monitor
from registry.checkpoint import Checkpoint
from registry.digest import Digest
from registry.errors import RegistryError
from registry.pytree import register_adapter
from registry.registry import Registry, init, open  # noqa: A004
from registry.run import Run
from registry.sync import sync

__all__ = [
    "Checkpoint",
    "Digest",
    "Monitor",
    "Registry",
    "RegistryError",
    "Run",
    "init",
    "open",
    "register_adapter",
    "sync",
]
