"""Holdfast: a checkpoint registry for machine learning that needs no server.

`init` creates a registry, `open` opens one, `sync` copies runs between two, `repair` restores
damaged objects of one from another, `trust` accepts one that went back, `care` does the work of a
night. Everything else is a method of the objects that they return. `docs/spec.md` specifies the
bytes on a store, `docs/architecture.md` describes the code.

A name is loaded when it is first used, so `import holdfast` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import dcp as dcp
    from holdfast import distributed as distributed
    from holdfast import engines as engines
    from holdfast import errors as errors
    from holdfast import filesystem as filesystem
    from holdfast import formats as formats
    from holdfast import ipython as ipython
    from holdfast import jax as jax
    from holdfast import lightning as lightning
    from holdfast import rng as rng
    from holdfast import transformers as transformers
    from holdfast import wandb as wandb
    from holdfast.registry.errors import RegistryError
    from holdfast.registry.face.caring import care
    from holdfast.registry.face.factory import init, open  # noqa: A004
    from holdfast.registry.face.registry import Registry
    from holdfast.registry.face.resume_check import verify_resume
    from holdfast.registry.face.run import Run
    from holdfast.registry.face.syncing import repair, sync
    from holdfast.registry.loading.checkpoint import Checkpoint
    from holdfast.registry.loading.stored import Stored
    from holdfast.registry.pytree import register_adapter
    from holdfast.registry.saving.loop.options import Stopping
    from holdfast.registry.spec import Retention, RunSpec
    from holdfast.registry.spec.migrations import register_migration
    from holdfast.registry.spec.policies import Monitor
    from holdfast.registry.store.connecting import trust
    from holdfast.registry.values.digest import Digest
    from holdfast.registry.writing.state_writer import Storing
else:
    from holdfast.registry.values.first_use import at_first_use

    #: By old name: the new one, such as `rng.Batches`, and the version in which the old one ends.
    _RENAMED: dict[str, tuple[str, str]] = {}
    __getattr__ = at_first_use(__name__, _RENAMED)
    #: The modules that users import from.
    _MODULES = (
        *("dcp", "distributed", "engines", "errors", "filesystem", "formats", "ipython", "jax"),
        *("lightning", "rng", "transformers", "wandb"),
    )

    def __dir__() -> list[str]:
        return sorted({*__all__, *_MODULES, *(name for name in globals() if name[:2] == "__")})


__all__ = [
    "Checkpoint",
    "Digest",
    "Monitor",
    "Registry",
    "RegistryError",
    "Retention",
    "Run",
    "RunSpec",
    "Stopping",
    "Stored",
    "Storing",
    "care",
    "init",
    "open",
    "register_adapter",
    "register_migration",
    "repair",
    "sync",
    "trust",
    "verify_resume",
]
