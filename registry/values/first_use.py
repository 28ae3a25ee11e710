"""Names that a module offers and imports only when one of them is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

_PACKAGE = "holdfast.registry"


def at_first_use(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a module that offers names which other modules define.

    Python calls it for a name that the module does not have yet. A name is looked up once: it is
    an ordinary global of the module from then on.

    Args:
        module: The module's own name.
        homes: For each name the module that defines it, below `holdfast.registry`; empty for a
            module of this name below `module` itself.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = homes[name]
        if not home:
            return import_module(f"{module}.{name}")
        value = getattr(import_module(f"{_PACKAGE}.{home}"), name)
        setattr(sys.modules[module], name, value)
        return value

    return find
