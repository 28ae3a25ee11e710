"""Backends around a backend: each changes one behaviour and passes on every other call.

`ReadOnly` refuses writes, `Metered` counts calls and bytes, `Watched` tells
how many bytes have moved, `Faulty` fails on purpose.
"""

from holdfast.backends.wrappers.base import ReadOnly, Wrapper
from holdfast.backends.wrappers.faulty import Fault, Faulty, InjectedCrash
from holdfast.backends.wrappers.metered import Call, Metered, Usage
from holdfast.backends.wrappers.watched import Watched

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
