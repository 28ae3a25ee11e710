"""Holdfast: a checkpoint registry for machine learning that needs no server.

`init` makes a registry, `open` opens one, `sync` copies between two, `trust` accepts one that went
back; everything else hangs on the objects that they return. `docs/spec.md` says what is on the
store.
"""

from __future__ import annotations

from registry.errors import RegistryError
from registry.loading.checkpoint import Checkpoint
from registry.loading.stored import Stored
from registry.pytree import register_adapter
from registry.registry import Registry, init, open  # noqa: A004
from registry.run import Run
from registry.spec import Retention
from registry.spec.migrations import register_migration
from registry.spec.monitors import Monitor
from registry.storage.heads import trust
from registry.sync import sync
from registry.values.digest import Digest

__all__ = [
    "Checkpoint",
    "Digest",
    "Monitor",
    "Registry",
    "RegistryError",
    "Retention",
    "Run",
    "Stored",
    "init",
    "open",
    "register_adapter",
    "register_migration",
    "sync",
    "trust",
]
