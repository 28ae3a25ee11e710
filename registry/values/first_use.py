"""Names that a module offers and imports only when one of them is used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

_LISTED = re.compile(r"^    from ([\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)


def at_first_use(module: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a module that offers names which other modules define.

    The module lists them once, as imports below `if TYPE_CHECKING:`, for type checkers, readers and
    this function. Python calls the result for a name that the module does not have yet; the name is
    an ordinary global of the module from then on.
    """
    homes: dict[str, tuple[str, str]] = {}

    def find(name: str) -> object:
        if not homes and not name.startswith("__"):
            homes.update(_listed(module))
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, there = homes[name]
        if home == module:  # a module of this package
            return import_module(f"{home}.{there}")
        value = getattr(import_module(home), there)
        setattr(sys.modules[module], name, value)
        return value

    return find


def _listed(module: str) -> dict[str, tuple[str, str]]:
    """Return the home of each name that the module lists, and its name there."""
    spec = find_spec(module)
    source = getattr(spec.loader, "get_source", lambda _: None)(module) if spec else None
    homes: dict[str, tuple[str, str]] = {}
    for home, several, one in _LISTED.findall(source or ""):
        for listed in re.sub(r"#.*", "", several or one).split(","):
            there, _, name = listed.strip().partition(" as ")
            if there:
                homes[name or there] = (home, there)
    return homes
