"""torch itself: needed only for values that are its own, and for writing files."""

from __future__ import annotations

from types import ModuleType

from holdfast.registry.errors import IncompatibleState


def torch_of(where: object) -> ModuleType:
    """Return the library.

    Raises:
        IncompatibleState: It is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise IncompatibleState(
            "torch is not installed",
            where=where,
            hint="Install it: pip install torch.",
        ) from error
    return torch
