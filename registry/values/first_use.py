"""Names that a module offers and imports only when one is used; pauses of the cycle collector."""

from __future__ import annotations

import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from time import monotonic

from holdfast.registry.values.renamed import renaming

_LISTED = re.compile(r"^    from ([\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
#: To move more bytes may take so long that other threads need the cycle collector meanwhile.
_BRIEF_BYTES = 2**24
#: Pauses that overlap are joined by others for this long.
_LONGEST_S = 1.0


def at_first_use(
    module: str, renamed: Mapping[str, tuple[str, str]] | None = None
) -> Callable[[str], object]:
    """Return the `__getattr__` of a module that offers names which other modules define.

    The module lists them once, as imports below `if TYPE_CHECKING:`, for type checkers, readers and
    this function. Python calls the result for a name that the module does not have yet; the name is
    an ordinary global of the module from then on.

    Each use of a renamed one is warned of: it has the new name and the version in which it ends.
    """
    homes: dict[str, tuple[str, str]] = {}

    def find(name: str) -> object:
        if not homes and not name.startswith("__"):
            homes.update(_listed(module))
        if renamed and name in renamed:
            now, ends = renamed[name]
            text = renaming(f"{module}.{name}", f"{module}.{now}", ends)
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return attrgetter(now)(sys.modules[module])
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, there = homes[name]
        if home == module:  # a module of this package
            return _imported(f"{home}.{there}")
        value = getattr(_imported(home), there)
        setattr(sys.modules[module], name, value)
        return value

    return find


def _imported(module: str) -> object:
    # In a process with torch the collection that imports begin takes longer than they do.
    with collector_paused():
        return import_module(module)


def _listed(module: str) -> dict[str, tuple[str, str]]:
    """Return the home of each name that the module lists, and its name there."""
    spec = sys.modules[module].__spec__
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(module)
    homes: dict[str, tuple[str, str]] = {}
    for home, several, one in _LISTED.findall(re.sub(r"#.*", "", source or "")):
        for listed in (several or one).split(","):
            there, _, name = listed.strip().partition(" as ")
            if there:
                homes[name or there] = (home, there)
    return homes


@contextmanager
def collector_paused(moved_bytes: float = 0) -> Iterator[None]:
    """Pause the cycle collector; after the last of pauses that overlap it is on, if it was before.

    Flattening a state of thousands of tensors makes tens of thousands of objects, none of them in a
    cycle. They trigger a full collection. In a process with torch that takes longer than the rest
    of the bookkeeping of a save (docs/design/speed.md). The collector stays on while many bytes
    are moved. Threads whose pauses overlap do not keep it off for more than a second longer.
    """
    began = next(iter(_pauses), monotonic())
    is_off = not gc.isenabled() and not _pauses  # by the program
    if is_off or moved_bytes > _BRIEF_BYTES or monotonic() > began + _LONGEST_S:
        yield
        return
    _pauses.append(began)
    gc.disable()
    try:
        yield
    finally:
        del _pauses[-1:]  # in a forked child there may be none
        if not _pauses:
            gc.enable()


def _resume_collector() -> None:
    if _pauses:  # of threads that a forked child does not have
        _pauses.clear()
        gc.enable()


#: One for each pause, in any thread: when the first of those that overlap began. Python changes a
#: list at once. The collector is turned off only between the two changes of one pause, and on after
#: the last of all: so it cannot stay off.
_pauses: list[float] = []
os.register_at_fork(after_in_child=_resume_collector)
