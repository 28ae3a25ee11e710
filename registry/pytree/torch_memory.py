"""The memory of torch tensors: view it in place, copy it to the host, allocate it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, c_char
from typing import Any

import torch

from holdfast.registry.errors import IncompatibleState, UnsupportedValue
from holdfast.registry.pytree.leaves import COPIERS, copy_memory
from holdfast.registry.values import ITEM_SIZES

#: Every element type of torch by its name; `DTYPES` has the ones that can be stored.
ALL_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
DTYPES: dict[str, torch.dtype] = {
    name: ALL_DTYPES[name] for name in ITEM_SIZES if name in ALL_DTYPES
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: The tensor classes without behaviour of their own: their memory is their value.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_EMPTY = memoryview(bytearray())
_HOST = torch.device("cpu")

#: Size -> ctypes type of that many bytes. Making a type is slow, so up to a bound they are kept.
_MEMORY_TYPES: dict[int, type[Array[c_char]]] = {}
_MAX_MEMORY_TYPES = 4096


def _memory_type(nbytes: int) -> type[Array[c_char]]:
    if len(_MEMORY_TYPES) >= _MAX_MEMORY_TYPES:
        _MEMORY_TYPES.clear()
    # With a slot a view needs no dict for its attribute.
    made = type("Memory", (c_char * nbytes,), {"__slots__": ("owner",)})
    _MEMORY_TYPES[nbytes] = made
    return made


def memory_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """View the memory of a contiguous tensor in host memory; the view keeps the tensor alive."""
    return _view(tensor.data_ptr(), nbytes, tensor)


def _view(address: int, nbytes: int, owner: object) -> memoryview:
    if not nbytes:
        return _EMPTY
    cls = _MEMORY_TYPES.get(nbytes) or _memory_type(nbytes)
    memory: Any = cls.from_address(address)
    memory.owner = owner
    return memoryview(memory).cast("B")


def storage_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """View the memory that a tensor has now, as `memory_of`; the view keeps that memory alive.

    It holds the storage and not the tensor: a program may give the tensor other memory
    (`.data = ...`), which would free the memory that is viewed.
    """
    owner, address = _memory_now(tensor)
    return _view(address, nbytes, owner)


def _copy_storage(tensor: torch.Tensor, nbytes: int, target: int) -> None:
    """Copy the memory that a tensor has now to an address."""
    owner, address = _memory_now(tensor)
    copy_memory(target, address, nbytes)
    del owner  # it kept the memory alive


def _memory_now(tensor: torch.Tensor) -> tuple[object, int]:
    """Return the owner of the memory that a tensor has now, and its address."""
    storage, address = tensor.untyped_storage(), tensor.data_ptr()
    try:
        start = storage.data_ptr()
    except RuntimeError as error:  # such as the zeros that torch makes for derivatives
        raise UnsupportedValue("a tensor without memory", hint="Store a copy of it.") from error
    if start <= address <= start + storage.nbytes():
        return storage, address
    # The program changed it between these two lines; a detached alias keeps one memory.
    alias = tensor.detach()
    return alias, alias.data_ptr()


COPIERS[storage_of] = _copy_storage


@contextmanager
def quiet(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Silence torch's warnings that complex32 is experimental and compressed layouts are beta."""
    if dtype is not None and dtype is not torch.complex32:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def copy_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Copy the bytes of any strided tensor to the host, in C order."""
    with torch.no_grad(), quiet(tensor.dtype):
        source = tensor.detach()
        plain = source.cpu().resolve_conj().resolve_neg().contiguous()
        if plain.data_ptr() == source.data_ptr():
            # The program changed the tensor, such as by a transposition in place: `plain` is no
            # copy.
            plain = plain.clone()
    return memory_of(plain, nbytes)


def has_memory(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a contiguous tensor's storage still covers it (storages can be shrunk)."""
    start = tensor.storage_offset() * tensor.element_size()
    return not nbytes or tensor.untyped_storage().nbytes() >= start + nbytes


def allocate(dtype: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, memoryview]:
    """Return a new tensor in host memory, which is not cleared, and that memory."""
    known = DTYPES.get(dtype)
    if dtype not in ITEM_SIZES:
        raise UnsupportedValue("torch has no such element type", found=dtype)
    if known is None:
        raise IncompatibleState(
            "this torch has no such element type",
            found=dtype,
            hint="Install a newer one: pip install -U torch.",
        )
    if known is torch.complex32:
        with quiet(known):
            tensor = torch.empty(shape, dtype=known, device="cpu")
    else:
        tensor = torch.empty(shape, dtype=known, device=_HOST)
    return tensor, _view(tensor.data_ptr(), tensor.nbytes, tensor)


def over(dtype: str, shape: tuple[int, ...], data: memoryview) -> torch.Tensor | None:
    """Return a tensor over some memory, or None if that is read-only, empty or not aligned."""
    if data.readonly or not data.nbytes or dtype not in DTYPES:
        return None
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % ITEM_SIZES[dtype]:
        return None
    with quiet(DTYPES[dtype]):
        return flat.view(DTYPES[dtype]).reshape(shape)


def view_of(target: torch.Tensor) -> memoryview | None:
    """Return the writable memory of a tensor, or None if it is not contiguous on the host."""
    if (
        type(target) in PLAIN
        and target.layout is torch.strided
        and target.is_cpu
        and not target.is_nested
        and target.dtype in NAMES
        and target.is_contiguous()
        and not target.is_neg()
        and not target.is_conj()
        and has_memory(target, target.nbytes)
    ):
        return memory_of(target, target.nbytes)
    return None


def describe(target: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the element type and shape of a tensor."""
    name = NAMES.get(target.dtype)
    if name is None:
        raise UnsupportedValue("element type cannot be stored", found=target.dtype)
    return name, tuple(target.shape)
