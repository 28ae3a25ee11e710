"""Backends around a backend: each changes one behaviour and passes on every other call.

`ReadOnly` refuses writes, `Metered` counts calls and bytes, `Faulty` fails on purpose.
"""

from holdfast.backends.wrappers.base import ReadOnly, Wrapper
from holdfast.backends.wrappers.faulty import Fault, Faulty, InjectedCrash
from holdfast.backends.wrappers.metered import Call, Metered, Usage

__all__ = [
    "Call",
    "Fault",
    "Faulty",
    "InjectedCrash",
    "Metered",
    "ReadOnly",
    "Usage",
    "Wrapper",
]
