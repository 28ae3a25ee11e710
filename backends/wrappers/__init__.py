"""Backends around a backend: each changes one behaviour and passes on every other call.

`ReadOnly` refuses writes, `Metered` counts calls and bytes, `Watched` tells
how many bytes have moved, `Faulty` fails on purpose. All but the first are loaded when they are
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.backends.wrappers.base import ReadOnly, Wrapper

if TYPE_CHECKING:
    from holdfast.backends.wrappers.faulty import Fault, Faulty, InjectedCrash
    from holdfast.backends.wrappers.metered import Call, Metered, Usage
    from holdfast.backends.wrappers.watched import Watched
else:
    _HOMES = {
        **dict.fromkeys(("Fault", "Faulty", "InjectedCrash"), "faulty"),
        **dict.fromkeys(("Call", "Metered", "Usage"), "metered"),
        "Watched": "watched",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found


__all__ = [
    "Call",
    "Fault",
    "Faulty",
    "InjectedCrash",
    "Metered",
    "ReadOnly",
    "Usage",
    "Watched",
    "Wrapper",
]
