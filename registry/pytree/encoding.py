"""`Encoder`: turn the values of one component into its skeleton and leaves.

This module owns the dispatch by exact type, the path, the depth limit and the search for cycles.
The codec modules fill `HANDLERS`, and `holdfast.registry.pytree.adapters` the table of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

from holdfast.registry.errors import InvalidInput, RegistryError, UnsupportedValue
from holdfast.registry.pytree import refusals
from holdfast.registry.pytree.leaves import ArrayLeaf
from holdfast.registry.pytree.paths import Link, OddKey, clip, shown
from holdfast.registry.values import MAX_INTEGER, Json, canonical


class Adapter(NamedTuple):
    """A stored name, its type, and the functions between that type and plain values."""

    name: str
    cls: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


class AdapterTable:
    """The adapters of this process, by exact type and by name."""

    def __init__(self) -> None:
        self._by_type: dict[type, Adapter] = {}
        self._by_name: dict[str, Adapter] = {}

    def of_type(self, cls: type) -> Adapter | None:
        """Return the adapter of exactly this type."""
        return self._by_type.get(cls)

    def of_name(self, name: str) -> Adapter | None:
        """Return the adapter of this name."""
        return self._by_name.get(name)

    def add(self, adapter: Adapter) -> None:
        """Add an adapter; for a name and type that are known, replace the functions."""
        named = self._by_name.get(adapter.name)
        typed = self._by_type.get(adapter.cls)
        if named is not None and _full_name(named.cls) != _full_name(adapter.cls):
            raise InvalidInput(
                "adapter name is taken", where=adapter.name, found=_full_name(named.cls)
            )
        if typed is not None and typed.name != adapter.name:
            raise InvalidInput(
                "type has an adapter", where=_full_name(adapter.cls), found=typed.name
            )
        if named is not None:
            # A reloaded module brings a new class under the old name.
            self._by_type.pop(named.cls, None)
        self._by_name[adapter.name] = adapter
        self._by_type[adapter.cls] = adapter


ADAPTERS = AdapterTable()


class Adapted:
    """A value of an adapter that this process need not have: for programs that pass it on."""

    def __init__(self, name: str, plain: Any) -> None:
        self.name = name  # the name of the adapter
        self.plain = plain  # the value that the adapter made

    @classmethod
    def of(cls, name: str) -> Callable[[Any], Adapted]:
        """Return the function that makes such a value for an adapter."""
        return partial(cls, name)


def registered(name: str) -> Callable[[Any], Any] | None:
    """Return the function of this process that makes the values of an adapter."""
    adapter = ADAPTERS.of_name(name)
    return None if adapter is None else adapter.from_plain


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


#: The most levels of nested containers, in a state and in a skeleton.
MAX_DEPTH = 100

Handler = Callable[["Encoder", Any, Link, int], Json]

#: Exact type -> handler. Types of tensors and arrays are added when their library is loaded.
HANDLERS: dict[type, Handler] = {}


class Encoder:
    """Turns the values of one component into nodes of its skeleton."""

    __slots__ = ("active", "leaves", "role")

    def __init__(self) -> None:
        self.leaves: list[ArrayLeaf] = []  # the arrays found so far, in order of their index
        self.role = ""  # the part around the value that can hold no array ("a set"), or empty
        self.active: set[int] = set()  # identities of the containers around the value

    def node(self, value: Any, link: Link, depth: int) -> Json:
        """Encode a value."""
        handler = HANDLERS.get(type(value))
        if handler is not None:
            return handler(self, value, link, depth)
        return self.other(value, link, depth)

    def key(self, key: Any, link: Link, depth: int) -> tuple[Json, Any]:
        """Encode a key of a dict at `link`; return its node and its step in a path."""
        if type(key) is int and -MAX_INTEGER <= key <= MAX_INTEGER:
            return key, key  # optimizers have thousands of them
        with self.plain("a key of a dict"):
            node = self.node(key, link, depth)
        if type(node) is str or type(node) is int:
            return node, node
        return node, OddKey(canonical.encode(node).decode(), f"[{clip(key)}]")

    @contextmanager
    def plain(self, role: str) -> Iterator[None]:
        """Allow only values that the skeleton holds as a whole, and no leaves."""
        outer, self.role = self.role, role
        try:
            yield
        finally:
            self.role = outer

    def add(self, leaf: ArrayLeaf, link: Link) -> int:
        """Add a leaf and return its index."""
        if self.role:
            self.refuse_array(link)
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def refuse_array(self, link: Link) -> NoReturn:
        """Raise the error for an array in a part that can hold none."""
        self.refuse(link, f"an array cannot be part of {self.role}", "Store it as a value.")

    @contextmanager
    def inside(self, container: object, link: Link, depth: int) -> Iterator[None]:
        """Encode a container: check for cycles and depth, and clean up at the end."""
        self.enter(container, link, depth)
        try:
            yield
        finally:
            self.active.discard(id(container))

    def enter(self, container: object, link: Link, depth: int) -> None:
        """Begin a container; `leave` must follow unless an error stops the encoding."""
        if id(container) in self.active:
            self.refuse(
                link,
                "a circular reference: this container holds itself",
                "Break the cycle before saving.",
            )
        if depth >= MAX_DEPTH:
            self.refuse(link, f"nested more than {MAX_DEPTH} levels deep", "Flatten the structure.")
        self.active.add(id(container))

    def leave(self, container: object) -> None:
        """End a container."""
        self.active.discard(id(container))

    def text(self, value: str, link: Link) -> str:
        """Return a string that UTF-8 can express, or refuse it."""
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                self.refuse(
                    link,
                    f"a string with a lone surrogate at character {error.start}",
                    "Store the bytes instead (os.fsencode), or repair the string.",
                )
        return value

    def refuse(self, link: Link, what: str, hint: str) -> NoReturn:
        """Raise the error that names the path."""
        raise UnsupportedValue(what, where=shown(link), hint=hint)

    def other(self, value: Any, link: Link, depth: int) -> Json:
        """Encode a value of none of the types above."""
        adapted = self.adapted(value)
        if adapted is not None:
            with self.inside(value, link, depth):
                name = self.text(adapted.name, link)
                return {"ad": [name, self.node(adapted.plain, link, depth + 1)]}
        for kind, handler in FAMILIES.items():
            if isinstance(value, kind):
                return handler(self, value, link, depth)
        if has_state_dict(value):
            with self.inside(value, link, depth):
                return self.node(state_dict_of(value, shown(link)), link, depth + 1)
        what, hint = refusals.explain(value)
        return self.refuse(link, what, hint)

    def adapted(self, value: Any) -> Adapted | None:
        """Return the plain value of a value that has an adapter, with the adapter's name."""
        if type(value) is Adapted:
            return value
        adapter = ADAPTERS.of_type(type(value))
        return None if adapter is None else Adapted(adapter.name, adapter.to_plain(value))


#: Base type -> handler, for values with many exact types (numpy's dtype classes).
FAMILIES: dict[type, Handler] = {}


def has_state_dict(value: object) -> bool:
    """Return whether `state_dict()` is stored in place of a value."""
    if isinstance(value, type) or refusals.is_tensor_like(value):
        return False
    try:
        return callable(getattr(value, "state_dict", None))
    except Exception:  # from a foreign property
        return False


def state_dict_of(value: Any, where: str) -> Any:
    """Return the result of a foreign `state_dict()`."""
    try:
        return value.state_dict()
    except RegistryError:
        raise
    except Exception as error:
        _, hint = refusals.explain(value)
        raise UnsupportedValue(
            f"{refusals.full_name(type(value))}.state_dict() failed",
            where=where,
            found=clip(error),
            hint=hint,
        ) from error
