"""Tensors of a file of torch: views of its storages, each checked against its storage.

A storage is read once. A view that is contiguous shares its memory; any other is copied, and the
copies are counted: a few bytes can describe a huge view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from holdfast.registry import pytree
from holdfast.registry.errors import IntegrityError, InvalidInput
from holdfast.registry.formats.content import MemoryContent
from holdfast.registry.formats.digesting import filling, is_digesting, taken
from holdfast.registry.formats.torch.container import Container
from holdfast.registry.pytree import TensorBytes
from holdfast.registry.pytree import allocate_bytes as allocate
from holdfast.registry.values import FLOATING, ITEM_SIZES, Budget, max_record_bytes

#: The most bytes of views and copies of the data of a file, in multiples of its size, if that is
#: more than the bound of a record.
_MAX_SHARING: Final = 16
_MAX_AXES: Final = 64
_NUMBERS: Final = 2**62
_COMPRESSED: Final = {
    "torch.sparse_csr": ("csr", "crow_indices", "col_indices"),
    "torch.sparse_csc": ("csc", "ccol_indices", "row_indices"),
    "torch.sparse_bsr": ("bsr", "crow_indices", "col_indices"),
    "torch.sparse_bsc": ("bsc", "ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True)
class StorageType:
    """A type of storages; `dtype` is that of its elements, `None` where a tensor says it."""

    dtype: str | None


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """The layout of a sparse tensor, as torch names it."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that tensors are views of; a part of one in some old files."""

    key: str  # its name in the file
    dtype: str | None  # its element type, if it has one
    start: int  # where the part begins, in bytes
    nbytes: int  # length of the part


class Sharing(Budget):
    """Counts the bytes of views and copies that a file asks for, before they are made."""

    def __init__(self, size_bytes: int, where: object) -> None:
        most = max(size_bytes * _MAX_SHARING, max_record_bytes())
        Budget.__init__(self, where, kind=InvalidInput, most=most)

    def refuse(self) -> NoReturn:
        """Raise the error for a sum above the bound."""
        refuse_sharing(self.where, self.most, self.taken)


def refuse_sharing(where: object, most: int, found: int) -> NoReturn:
    """Refuse a small file that would become a huge state."""
    raise InvalidInput(
        "its tensors are views that are far larger than the file",
        where=where,
        expected=f"at most {most} bytes",
        found=f"{found} bytes",
        hint="A checkpoint stores expanded tensors element by element: save the tensors before "
        "they are expanded.",
    )


class Tensors:
    """Makes the tensors of one file."""

    def __init__(
        self, container: Container | None, budget: Sharing, *, with_data: bool, where: object
    ) -> None:
        #: Of each storage by key: the bytes of an element, and of the storage.
        self.sizes: dict[str, tuple[int, int]] = {}
        self._container = container
        self._budget = budget
        self._with_data = with_data
        self._where = where
        self._held: dict[str, memoryview] = {}

    def storage(self, key: Any) -> Storage:
        """Return the storage that a persistent id names."""
        tag, kind, name, _, count, *view = key
        if tag != "storage" or not isinstance(kind, StorageType) or len(view) > 1:
            raise ValueError("not the id of a storage")
        if type(name) is not str or not _are_sizes((count,)):
            raise ValueError("not the key of a storage")
        item = 1 if kind.dtype is None else ITEM_SIZES[kind.dtype]
        known = self.sizes.setdefault(name, (item, count * item))
        if known != (item, count * item):
            raise ValueError("a storage with two lengths or types")
        if self._container is not None:
            self._container.check(name, count * item)
        if not view or view[0] is None:
            return Storage(name, kind.dtype, 0, count * item)
        _, start, length = view[0]
        if not _are_sizes((start, length)) or start + length > count:
            raise ValueError("a part is not within its storage")
        return Storage(name, kind.dtype, start * item, length * item)

    # The functions of torch that make tensors, by the arguments that it gives them

    def tensor(self, storage: Any, offset: Any, shape: Any, stride: Any) -> TensorBytes:
        """Make a tensor (`_rebuild_tensor`)."""
        return self._view(storage, "uint8", offset, shape, stride, None)

    def tensor_v2(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any,  # noqa: ARG002 - a checkpoint does not keep it
        hooks: Any,  # noqa: ARG002 - functions, which no file of this list can have
        flags: Any = None,
    ) -> TensorBytes:
        """Make a tensor (`_rebuild_tensor_v2`)."""
        return self._view(storage, "uint8", offset, shape, stride, flags)

    def tensor_v3(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any,  # noqa: ARG002
        hooks: Any,  # noqa: ARG002
        dtype: Any,
        flags: Any = None,
    ) -> TensorBytes:
        """Make a tensor of a storage without element type (`_rebuild_tensor_v3`)."""
        name = str(dtype).removeprefix("torch.")
        if not isinstance(storage, Storage) or storage.dtype is not None:
            raise TypeError("not a storage without element type")
        return self._view(storage, name, offset, shape, stride, flags)

    def sparse(self, layout: Any, parts: Any) -> Any:
        """Make a sparse tensor (`_rebuild_sparse_tensor`); its parts by name without data."""
        if not isinstance(layout, SparseLayout):
            raise TypeError("not a layout")
        if layout.name == "torch.sparse_coo":
            indices, values, shape, *coalesced = parts
            tag, named = "coo", {"indices": indices, "values": values}
            head: list[Any] = [list(shape), bool(coalesced and coalesced[0])]
        else:
            tag, outer, inner = _COMPRESSED[layout.name]
            named = dict(zip((outer, inner, "values"), parts[:3], strict=True))
            head = [list(parts[3])]
        if not all(isinstance(part, TensorBytes) for part in named.values()):
            raise TypeError("a part of a sparse tensor is no tensor")
        if not self._with_data or is_digesting():
            return named
        self._budget.take(sum(part.data.nbytes for part in named.values()))
        nodes = [{"t": number} for number in range(len(named))]
        wanted = MemoryContent({"parts": named}, None, str(self._where)).load()["parts"]
        try:
            return pytree.unflatten_component({tag: [*head, *nodes]}, list(wanted.values()))
        except IntegrityError as error:
            raise ValueError(str(error)) from error

    # Views

    def _view(
        self, storage: Any, dtype: str, offset: Any, shape: Any, stride: Any, flags: Any
    ) -> TensorBytes:
        if not isinstance(storage, Storage) or len(shape) != len(stride):
            raise TypeError("not a tensor of a storage")
        dtype = storage.dtype or dtype
        item = ITEM_SIZES[dtype]
        if len(shape) > _MAX_AXES or not _are_sizes((offset, *shape, *stride)):
            raise ValueError("bad numbers of a tensor")
        shape = tuple(shape)
        if math.prod(filter(None, shape)) * item >= _NUMBERS:
            refuse_sharing(self._where, self._budget.most, math.prod(filter(None, shape)) * item)
        elements = math.prod(shape)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if elements and (last + 1) * item > storage.nbytes:
            raise ValueError("a tensor is not within its storage")
        if not self._with_data or not elements:
            return TensorBytes(dtype, shape, memoryview(b""))
        start, nbytes = offset * item, elements * item
        is_contiguous = _is_contiguous(shape, stride)
        container = self._container
        if (
            is_digesting()
            and is_contiguous
            and not flags
            and container
            and not container.is_swapped
        ):
            fill = container.reading(storage.key, storage.start + start)
            hashed: TensorBytes = taken(dtype, shape, fill)
            return hashed
        data = self._data(storage, item)
        if is_contiguous:
            made = TensorBytes(dtype, shape, data[start : start + nbytes])
        else:
            self._budget.take(nbytes)
            made = _copied(data, start, dtype, shape, stride)
        made = self._flipped(made, flags) if flags else made
        return taken(dtype, shape, filling(made.data)) if is_digesting() else made

    def _data(self, storage: Storage, item: int) -> memoryview:
        held = self._held.get(storage.key)
        if held is None:
            assert self._container is not None
            held = self._container.read(storage.key)
            if self._container.is_swapped:
                _swap(held, storage.dtype, item)
            if not is_digesting():
                self._held[storage.key] = held
        return held[storage.start : storage.start + storage.nbytes]

    def _flipped(self, tensor: TensorBytes, flags: Any) -> TensorBytes:
        """Return a tensor whose conjugate or negative is in the file."""
        if type(flags) is not dict or not flags.keys() <= {"conj", "neg"}:
            raise ValueError("unknown flags of a tensor")
        item, nbytes = ITEM_SIZES[tensor.dtype], tensor.data.nbytes
        is_complex = tensor.dtype.startswith("complex")
        is_conjugate, is_negative = bool(flags.get("conj")), bool(flags.get("neg"))
        if (is_conjugate and not is_complex) or not (is_complex or tensor.dtype in FLOATING):
            raise ValueError("flags that do not fit the element type")
        self._budget.take(nbytes)
        made, data = allocate(tensor.dtype, tensor.shape)
        data[:] = tensor.data
        parts = np.frombuffer(data, np.uint8).reshape(-1, 1 + is_complex, item // (1 + is_complex))
        if is_negative:
            parts[:, :, -1] ^= 0x80  # the sign
        if is_conjugate:
            parts[:, 1, -1] ^= 0x80
        return made


def _are_sizes(numbers: tuple[Any, ...]) -> bool:
    return all(type(number) is int and 0 <= number < _NUMBERS for number in numbers)


def _is_contiguous(shape: tuple[int, ...], stride: Any) -> bool:
    wanted = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != wanted:
            return False
        wanted *= length
    return True


def _copied(
    data: memoryview, start: int, dtype: str, shape: tuple[int, ...], stride: Any
) -> TensorBytes:
    item = np.dtype(f"V{ITEM_SIZES[dtype]}")
    steps = tuple(step * item.itemsize for step in stride)
    made, memory = allocate(dtype, shape)
    into: Any = np.ndarray(shape, item, memory)
    into[...] = np.ndarray(shape, item, data, start, steps)
    return made


def _swap(data: memoryview, dtype: str | None, item: int) -> None:
    """Turn the bytes of a big-endian storage around, element by element."""
    if dtype is None and item > 1:
        raise ValueError("a big-endian storage without element type")
    parts = 2 if dtype is not None and dtype.startswith("complex") else 1
    size = (1 if dtype is None else ITEM_SIZES[dtype]) // parts
    array = np.frombuffer(data, np.uint8).reshape(-1, size)
    array[:] = array[:, ::-1].copy()
