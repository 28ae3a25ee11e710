"""The adapters of this process, by exact type and by stored name; `adapters` fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.registry.errors import InvalidInput


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


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
