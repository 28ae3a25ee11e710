"""Holdfast: a checkpoint registry for machine learning that needs no server.

`init` creates a registry, `open` opens one, `sync` copies runs between two, `trust` accepts one
that went back. Everything else is a method of the objects that they return. `docs/spec.md`
specifies the bytes on a store, `docs/architecture.md` describes the code.

A name is loaded when it is first used, so `import holdfast` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import formats as formats
    from holdfast import rng as rng
    from holdfast.registry.errors import RegistryError
    from holdfast.registry.exact_resume.resume_check import verify_resume
    from holdfast.registry.loading.checkpoint import Checkpoint
    from holdfast.registry.loading.stored import Stored
    from holdfast.registry.pytree import register_adapter
    from holdfast.registry.registries.factory import init, open  # noqa: A004
    from holdfast.registry.registries.registry import Registry
    from holdfast.registry.registries.sync import sync
    from holdfast.registry.runs.run import Run
    from holdfast.registry.spec import Retention
    from holdfast.registry.spec.migrations import register_migration
    from holdfast.registry.spec.monitors import Monitor
    from holdfast.registry.storage.connecting import trust
    from holdfast.registry.values.digest import Digest
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(
        __name__,
        {
            "Checkpoint": "loading.checkpoint",
            "Digest": "values.digest",
            "Monitor": "spec.monitors",
            "Registry": "registries.registry",
            "RegistryError": "errors",
            "Retention": "spec",
            "Run": "runs.run",
            "Stored": "loading.stored",
            "formats": "",
            "init": "registries.factory",
            "open": "registries.factory",
            "register_adapter": "pytree",
            "register_migration": "spec.migrations",
            "rng": "",
            "sync": "registries.sync",
            "trust": "storage.connecting",
            "verify_resume": "exact_resume.resume_check",
        },
    )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
    "verify_resume",
]
