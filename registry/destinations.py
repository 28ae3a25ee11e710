"""Memory that a checkpoint is loaded into: the target's own where possible, staging where not."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any

from registry import pytree


class Destination:
    """The bytes of one existing tensor or array.

    Attributes:
        view: Flat writable bytes to read into.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._staged: Any = None
        view = pytree.view_of(target)
        if view is None:
            # On another device, or not contiguous.
            dtype, shape = pytree.describe(target)
            # torch tensors know `detach`, NumPy arrays do not.
            kind = "torch" if hasattr(target, "detach") else "numpy"
            self._staged, view = pytree.allocate(dtype, shape, kind)
        self.view: memoryview = view

    @property
    def address(self) -> int:
        """Where the bytes begin in memory; 0 for none."""
        return addressof(c_char.from_buffer(self.view)) if self.view.nbytes else 0

    def settle(self) -> None:
        """Move staged bytes into the target."""
        if self._staged is None:
            return
        if hasattr(self._target, "detach"):
            self._target.detach().copy_(self._staged)
        else:
            self._target[...] = self._staged
        self._staged = None


def to_device(arrays: Sequence[object], device: object) -> list[object]:
    """Move the tensors among `arrays` to a device; NumPy arrays and byte strings stay."""
    return [array.to(device) if hasattr(array, "to") else array for array in arrays]
