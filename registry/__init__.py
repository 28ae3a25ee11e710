"""Holdfast: a checkpoint registry for machine learning that needs no server.

`init` makes a registry, `open` opens one, `sync` copies between two, `trust` accepts one that went
back; everything else hangs on the objects that they return. `docs/spec.md` says what is on the
store.
"""

from __future__ import annotations

from registry.checkpoint import Checkpoint
from registry.digest import Digest
from registry.errors import RegistryError
from registry.heads import trust
from registry.migrations import register_migration
from registry.monitors import Monitor
from registry.pytree import register_adapter
from registry.registry import Registry, init, open  # noqa: A004
from registry.run import Run
from registry.spec import Retention
from registry.stored import Stored
from registry.sync import sync

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
