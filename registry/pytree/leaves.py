"""`ArrayLeaf`: the bytes of one array of a state, viewed without a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import PyDLL, addressof, c_char, c_size_t, c_void_p, memmove
from typing import Any

from holdfast.registry.pytree.paths import Link, OddKey, join, segment
from holdfast.registry.values import CHARACTER_BYTES, PATH_BYTES

#: Returns the bytes of a source, given their number: flat, format `B`, C order.
Opener = Callable[[Any, int], memoryview]

#: Copies of this size take longer than it takes to let other threads run meanwhile.
_LONG_BYTES = 64 * 1024
_MEMMOVE = PyDLL(None).memmove  # it does not let them run
_MEMMOVE.argtypes, _MEMMOVE.restype = (c_void_p, c_void_p, c_size_t), None

#: Opener of a leaf -> copies the bytes of its source to an address, faster than through a view.
COPIERS: dict[Opener, Callable[[Any, int, int], None]] = {}


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another."""
    (_MEMMOVE if nbytes < _LONG_BYTES else memmove)(target, source, nbytes)


class ArrayLeaf:
    """A tensor, array, long string or long byte string of a state.

    It holds the object that it views, so the memory lives as long as the leaf or one of its
    buffers.
    """

    __slots__ = ("_link", "_open", "_source", "_view", "dtype", "is_ours", "nbytes", "shape")

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        source: Any,
        opener: Opener,
        link: Link,
        is_ours: bool = False,
    ) -> None:
        self.dtype = dtype  # element type, a name of `holdfast.registry.values.dtypes.ITEM_SIZES`
        self.shape = shape  # lengths of the axes, in elements
        self.nbytes = nbytes  # length of `buffer()`, in bytes
        #: Whether nobody else can write to the bytes of `buffer()`, because they are a copy or
        #: immutable. All other bytes may change at any moment, even during the save.
        self.is_ours = is_ours
        self._source = source
        self._open = opener
        self._link = link
        self._view: memoryview | None = None

    @property
    def path(self) -> str:
        """The name: component and keys, joined by `/` (`model/conv1.weight`)."""
        return join(self._link)

    def buffer(self) -> memoryview:
        """Return the bytes: flat, format `B`, C order, little-endian.

        The first call views them in place if they are contiguous in host memory, and copies them
        otherwise. Further calls return the same view.
        """
        view = self._view
        if view is None:
            view = self._view = self._open(self._source, self.nbytes)
        return view

    def in_place(self) -> memoryview | None:
        """Return the array's own memory to write to; `None` if it is not contiguous on the host."""
        view = None if self.is_ours else self.buffer()
        return None if view is None or view.readonly else view

    def release(self) -> None:
        """Drop the view, and its copy if there is one; the next `buffer()` makes another."""
        self._view = None

    @property
    def source(self) -> Any:
        """The tensor, array or string itself."""
        return self._source

    def move(self, view: memoryview, address: int) -> None:
        """Copy the bytes to memory of ours, and hold that instead of the tensor."""
        self.copy_to(view, address)
        self.hold(view)

    def copy_to(self, view: memoryview, address: int) -> None:
        """Copy the bytes to memory of ours at an address."""
        if self.nbytes:
            copy = COPIERS.get(self._open)
            if copy is not None:
                copy(self._source, self.nbytes, address)
            else:
                self._copy(view, address)

    def _copy(self, view: memoryview, address: int) -> None:
        source = self.buffer()
        if source.readonly or self.nbytes < _LONG_BYTES:
            view[:] = source
        else:
            copy_memory(address, addressof(c_char.from_buffer(source)), self.nbytes)

    def hold(self, view: memoryview) -> None:
        """Hold our own copy of the bytes instead of the tensor."""
        self._source, self._open, self._view, self.is_ours = view, _given, None, True

    def __repr__(self) -> str:
        return f"ArrayLeaf({self.path!r}, {self.dtype}, {self.shape})"


class NamedLeaf(ArrayLeaf):
    """An array whose bytes are not in memory; its name, type and shape are known."""

    __slots__ = ("_path",)

    def __init__(self, dtype: str, shape: tuple[int, ...], nbytes: int, path: str) -> None:
        super().__init__(dtype, shape, nbytes, None, _nowhere, (None, path))
        self._path = path

    @property
    def path(self) -> str:
        """The name that was given."""
        return self._path


def by_path(leaves: Iterable[ArrayLeaf]) -> dict[str, ArrayLeaf]:
    """Return leaves by path; the path of a container is spelled once for all that follow it."""
    found: dict[str, ArrayLeaf] = {}
    container, prefix = None, ""
    for leaf in leaves:
        above, key = leaf._link
        if above is None:
            found[leaf.path] = leaf
            continue
        if above is not container:
            container, prefix = above, join(above)
        found[f"{prefix}/{key.text if type(key) is OddKey else segment(key)}"] = leaf
    return found


def paths_bytes(leaves: Iterable[ArrayLeaf]) -> int:
    """Return at most how much memory the paths of leaves take, without spelling them."""
    known: dict[int, int] = {id(None): 0}  # lengths of the paths of containers, by their identity
    count = characters = 0

    def length(link: Link) -> int:
        nonlocal count, characters
        above, key = link
        if id(above) not in known:
            known[id(above)] = length(above)
        text: Any = key if type(key) is str else getattr(key, "text", key)
        step = 20 if type(text) is int else len(text) * (2 if text.isprintable() else 6) + 3
        count, characters = count + 1, characters + known[id(above)] + step
        return known[id(above)] + step

    for leaf in leaves:
        length(leaf._link)
    return PATH_BYTES * count + CHARACTER_BYTES * characters


def bytes_leaf(data: bytes | bytearray, link: Link) -> ArrayLeaf:
    """Return the leaf of a byte string."""
    is_ours = type(data) is bytes
    return ArrayLeaf("uint8", (len(data),), len(data), data, _open, link, is_ours)


def _open(data: bytes | bytearray, nbytes: int) -> memoryview:  # noqa: ARG001
    return memoryview(data)


def _nowhere(source: None, nbytes: int) -> memoryview:  # noqa: ARG001
    raise LookupError("the bytes of this array are not in memory")


def _given(view: memoryview, nbytes: int) -> memoryview:  # noqa: ARG001
    return view
