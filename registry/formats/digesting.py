"""Hash the tensors of a file while it is read, in place of keeping them.

Within the block of `without_bytes` the readers of the formats in `BY_TURNS` return tensors without
bytes; of the file a chunk is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from holdfast.registry import pytree
from holdfast.registry.objects import CHUNK_BYTES, INLINE_BYTES, Component, TensorEntry, grid
from holdfast.registry.values import Digest
from holdfast.registry.writing import chunked_entry

BY_TURNS: Final = ("hf", "npz", "safetensors", "torch")
#: By its identity each tensor that was hashed, and its entry.
_hashed: ContextVar[dict[int, tuple[object, TensorEntry]] | None] = ContextVar(
    "hashed", default=None
)
_Fill = Callable[[memoryview], object]  # reads the next bytes of a tensor


@contextmanager
def without_bytes() -> Iterator[None]:
    """Hash the tensors that are read within a block."""
    token = _hashed.set({})
    try:
        yield
    finally:
        _hashed.reset(token)


def is_digesting() -> bool:
    """Return whether tensors are hashed and not kept."""
    return _hashed.get() is not None


def taken(dtype: str, shape: tuple[int, ...], fill: _Fill, unread: object = None) -> Any:
    """Return a tensor of the bytes that `fill` reads, or `unread` and the like to be hashed."""
    hashed = _hashed.get()
    if hashed is None:
        tensor, data = pytree.allocate(dtype, shape, "tensor")
        fill(data)
        return tensor
    tensor = pytree.unread(dtype, shape, "tensor") if unread is None else unread
    hashed[id(tensor)] = tensor, _entry(dtype, shape, fill)
    return tensor


def filling(data: memoryview) -> _Fill:
    """Return a `fill` of bytes in memory."""
    rest = data

    def fill(into: memoryview) -> None:
        nonlocal rest
        into[:], rest = rest[: len(into)], rest[len(into) :]

    return fill


def components(state: object) -> dict[str, Component]:
    """Return the components of a state, as a save of it would store them."""
    flat = state if isinstance(state, pytree.FlatState) else pytree.flatten(state)
    hashed = _hashed.get() or {}
    found = {}
    for part in flat.components:
        entries = [
            hashed[id(leaf.source)][1]
            if id(leaf.source) in hashed
            else _entry(leaf.dtype, leaf.shape, filling(leaf.buffer()))
            for leaf in part.leaves
        ]
        found[part.name] = Component.build(part.skeleton, entries)
    return found


def _entry(dtype: str, shape: tuple[int, ...], fill: _Fill) -> TensorEntry:
    cut, digests = grid(str(dtype), shape), []
    buffer = memoryview(bytearray(min(cut.nbytes, CHUNK_BYTES)))
    for size in cut.sizes():
        fill(buffer[:size])
        digests.append(Digest.of(buffer[:size]))
    if cut.nbytes <= INLINE_BYTES:
        return TensorEntry(dtype, shape, inline=bytes(buffer))
    return chunked_entry(pytree.NamedLeaf(dtype, shape, cut.nbytes, ""), b"".join(digests), {})
