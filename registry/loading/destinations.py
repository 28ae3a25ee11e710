"""The memory that a load fills: new arrays, or existing tensors.

Existing tensors are filled directly if possible, otherwise by staging. Tensors that were saved with
less precision can get their original type. Then their bytes are read to the end of their memory and
widened in place, so that no second copy is needed.

Also finds tensors that share memory, and tensors that cannot be written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput, Malformed, RegistryError
from holdfast.registry.objects import Component, TensorEntry
from holdfast.registry.spec.precision import stored_view
from holdfast.registry.store import Target
from holdfast.registry.values import ITEM_SIZES

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


#: The most steps of NumPy's test whether two tensors share an element.
_MAX_WORK: Any = 10**6


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of a tensor or array; equal for equal views."""

    device: str
    address: int  # address of the first element
    dtype: str  # the element type
    #: Length and stride in bytes of each axis; the stride of an axis of length 1 is 0.
    axes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, target: Any, dtype: str, shape: tuple[int, ...]) -> Extent:
        """Return the memory of a tensor or array."""
        # torch tensors know `detach`, NumPy arrays do not.
        if hasattr(target, "detach"):
            device, address = str(target.device), target.data_ptr()
            strides = [step * ITEM_SIZES[dtype] for step in target.stride()]
        else:
            device, address, strides = "cpu", target.ctypes.data, target.strides
        axes = zip(shape, strides, strict=True)
        return cls(device, address, dtype, tuple((n, step if n > 1 else 0) for n, step in axes))

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements."""
        return any(not length for length, _ in self.axes)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first address of the lowest element, and the end of the highest one."""
        reach = [(length - 1) * step for length, step in self.axes]
        low = sum(step for step in reach if step < 0)
        high = sum(step for step in reach if step > 0)
        return self.address + low, self.address + high + ITEM_SIZES[self.dtype]

    @property
    def is_apart_in_itself(self) -> bool:
        """Whether no two elements share memory: each stride exceeds the axes below it."""
        reach = ITEM_SIZES[self.dtype]
        for step, length in sorted((abs(step), n) for n, step in self.axes if n > 1):
            if step < reach:
                return False
            reach += (length - 1) * step
        return True

    def meets(self, other: Extent) -> bool:
        """Return whether it shares memory with another; also if that takes too long to decide."""
        if self.device != other.device:
            return False
        import numpy as np

        try:
            mine, theirs = np.asarray(_Foreign(self)), np.asarray(_Foreign(other))
            return bool(np.shares_memory(mine, theirs, max_work=_MAX_WORK))
        except RuntimeError:  # too many steps
            return True


class _Foreign:
    """Memory of any device for NumPy's address arithmetic; it is never read."""

    def __init__(self, extent: Extent) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{ITEM_SIZES[extent.dtype]}",
            "shape": tuple(length for length, _ in extent.axes),
            "strides": tuple(step for _, step in extent.axes),
            "data": (extent.address, True),
        }


def check_writable(where: str, target: Any, extent: Extent) -> None:
    """Refuse a target that cannot be written to, before anything is read."""
    flags = getattr(target, "flags", None)
    is_read_only = flags is not None and not flags.writeable
    if is_read_only or not (extent.is_empty or extent.is_apart_in_itself):
        raise IncompatibleState(
            "a tensor of the target cannot be written to",
            where=where,
            found="a read-only array" if is_read_only else "elements that share memory",
            hint="Copy it first: .clone() or .copy().",
        )


def overlaps(extents: Mapping[str, Extent]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tensors that share memory, equal views included.

    If several are equal views, each is paired with the first of them.
    """
    first: dict[Extent, str] = {}
    for path, extent in extents.items():
        other = first.setdefault(extent, path)
        if other != path and not extent.is_empty:
            yield other, path
    active: list[tuple[int, str]] = []
    last = ""
    order = sorted(
        ((one.device, *one.bounds, path) for one, path in first.items() if not one.is_empty)
    )
    for device, start, stop, path in order:
        active = [one for one in active if one[0] > start] if device == last else []
        for _, other in active:
            if extents[path].meets(extents[other]):
                yield other, path
        active.append((stop, path))
        last = device


class Destination:
    """The bytes of one existing tensor or array."""

    def __init__(
        self,
        target: Any,
        stored_dtype: str | None = None,
        *,
        is_aside: bool = False,
        view: memoryview | None = None,
    ) -> None:
        self._target = target
        self._staged: Any = None
        if view is None and not is_aside:
            view = pytree.view_of(target)
        if view is None:
            # On another device, or not contiguous.
            dtype, shape = pytree.describe(target)
            # torch tensors know `detach`, NumPy arrays do not.
            kind = "torch" if hasattr(target, "detach") else "numpy"
            self._staged, view = pytree.allocate(dtype, shape, kind)
        self.view: memoryview = view  # flat writable bytes to read into
        #: The target's memory, the type that is read and the type to widen to; `None` if nothing is
        #: widened.
        self.widening: tuple[memoryview, str, str] | None = None
        if stored_dtype is not None:
            dtype, _ = pytree.describe(target)
            self.view = stored_view(view, stored_dtype, dtype)
            self.widening = view, stored_dtype, dtype

    def settle(self) -> None:
        """Copy staged bytes into the target."""
        if self._staged is None:
            return
        if hasattr(self._target, "detach"):
            self._target.detach().copy_(self._staged)
        else:
            self._target[...] = self._staged
        self._staged = None


def check_device(device: object) -> None:
    """Refuse a device to which tensors cannot be moved, before they are read."""
    if str(device) == "cpu":
        return
    probe: Any = pytree.allocate("uint8", (0,), "torch")[0]
    try:
        probe.to(device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidInput(
            "no such device to load to", found=quoted(device), hint=str(error).partition("\n")[0]
        ) from error


def to_device(arrays: Sequence[object], device: object) -> list[object]:
    """Move the tensors among `arrays` to a device; NumPy arrays and byte strings stay."""
    return [array.to(device) if hasattr(array, "to") else array for array in arrays]
