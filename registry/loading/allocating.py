"""Allocate memory for a state that is loaded: one array for each tensor.

Tensors that were saved with less precision can get their original type. Then their bytes are read
to the end of their memory and widened in place, so that no second copy is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, Malformed, RegistryError
from holdfast.registry.objects import Component, TensorEntry
from holdfast.registry.spec.precision import stored_view
from holdfast.registry.store import Target

#: The element types of a loaded state: those on the store, or the original ones.
LoadPrecision = Literal["stored", "original"]


#: Axes that every version of every library supports.
_AXES_EVERYWHERE = 32


@dataclass(slots=True)
class Allocated:
    """Fresh memory for components."""

    arrays: dict[str, list[object]] = field(default_factory=dict)  # their arrays by component
    #: Each tensor with the memory to read it into.
    targets: list[Target] = field(default_factory=list)
    #: The arrays to widen afterwards, for `widen_all`.
    widenings: list[tuple[memoryview, str, str]] = field(default_factory=list)

    def add(self, name: str, tensor: TensorEntry, kind: str, precision: LoadPrecision) -> None:
        """Allocate the memory of one tensor."""
        original = tensor.original if precision == "original" else None
        try:
            array, memory = pytree.allocate(original or tensor.dtype, tensor.shape, kind)
        except IncompatibleState as error:
            if tensor.original is None:
                raise
            hint = Hint.of(error.hints, Hint("Or load it with precision='original'."))
            raise IncompatibleState(error.what, where=name, found=error.found, hint=hint) from error
        self.arrays[name].append(array)
        if original is None:
            self.targets.append((tensor, memory))
            return
        self.targets.append((tensor, stored_view(memory, tensor.dtype, original)))
        self.widenings.append((memory, tensor.dtype, original))


def allocate(
    ref: str, parts: Mapping[str, Component], precision: LoadPrecision, *, portable: bool = False
) -> Allocated:
    """Return fresh arrays for components, and the tensors to read into them."""
    kinds_of = pytree.portable_kinds if portable else pytree.leaf_kinds
    made = Allocated()
    for name, part in parts.items():
        kinds = kinds_of(part.skeleton)
        made.arrays[name] = []
        for index, tensor in enumerate(part.tensors):
            try:
                made.add(name, tensor, kinds[index], precision)
            except (MemoryError, RuntimeError, ValueError, OverflowError) as error:
                if isinstance(error, RegistryError):
                    raise
                raise _refusal(f"{ref}: {name}", part, tensor, error) from error
    return made


def _refusal(where: str, part: Component, tensor: TensorEntry, error: Exception) -> RegistryError:
    """Return the error for a failed allocation. For a bad shape NumPy raises ValueError."""
    if not tensor.nbytes and len(tensor.shape) <= _AXES_EVERYWHERE:
        return Malformed(
            "no library makes an array of this shape", where=where, found=list(tensor.shape)
        )
    if isinstance(error, ValueError):
        return IncompatibleState(
            "the installed library makes no array of this shape",
            where=where,
            found=f"{list(tensor.shape)}: {error}",
            hint="More than 32 axes need NumPy 2.",
        )
    return IncompatibleState(
        "the component does not fit into memory",
        where=where,
        found=f"{part.nbytes} bytes",
        hint=Hint("Load fewer components with only=[...].", "Choose components by `--only`."),
    )


def check_load_precision(precision: object) -> None:
    """Refuse a value that is no `LoadPrecision`."""
    known = get_args(LoadPrecision)
    if precision not in known:
        raise InvalidInput(
            "no such precision to load in",
            expected=" or ".join(map(repr, known)),
            found=quoted(precision),
            hint="Cast a tensor to another type after loading.",
        )
