"""Memory that a checkpoint is loaded into: the target's own where possible, staging where not."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any

from registry import pytree
from registry.precision.policy import stored_view


class Destination:
    """The bytes of one existing tensor or array.

    Args:
        target: The tensor or array.
        stored_dtype: The narrower element type that is read in place of the target's own, to be
            widened where it lies; its own without.

    Attributes:
        view: Flat writable bytes to read into.
        widening: The target's whole memory, what is read and what it is to become; `None` where
            nothing is widened.
    """

    def __init__(self, target: Any, stored_dtype: str | None = None) -> None:
        self._target = target
        self._staged: Any = None
        view = pytree.view_of(target)
        if view is None:
            # On another device, or not contiguous.
            dtype, shape = pytree.describe(target)
            # torch tensors know `detach`, NumPy arrays do not.
            kind = "torch" if hasattr(target, "detach") else "numpy"
            self._staged, view = pytree.allocate(dtype, shape, kind)
        self._memory = view
        self.view: memoryview = view
        self.widening: tuple[memoryview, str, str] | None = None
        if stored_dtype is not None:
            dtype, _ = pytree.describe(target)
            self.view = stored_view(view, stored_dtype, dtype)
            self.widening = view, stored_dtype, dtype

    @property
    def address(self) -> int:
        """Where the target's bytes begin in memory; 0 for none."""
        return addressof(c_char.from_buffer(self._memory)) if self._memory.nbytes else 0

    @property
    def nbytes(self) -> int:
        """Size of the target in bytes."""
        return self._memory.nbytes

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
