"""Backends around a backend: each changes one behaviour and passes on every other call.

`ReadOnly` refuses writes, `Cached` remembers objects that never change, `Retrying` tries again,
`Metered` counts calls and bytes, `Faulty` fails on purpose.
"""

from holdfast.backends.wrappers.base import ReadOnly, Wrapper
from holdfast.backends.wrappers.cached import Cached
from holdfast.backends.wrappers.faulty import Fault, Faulty, InjectedCrash
from holdfast.backends.wrappers.metered import Call, Metered, Usage
from holdfast.backends.wrappers.retrying import Retrying

__all__ = [
    "Cached",
    "Call",
    "Fault",
    "Faulty",
    "InjectedCrash",
    "Metered",
    "ReadOnly",
    "Retrying",
    "Usage",
    "Wrapper",
]
