"""Backends around a backend: each changes one thing and keeps the methods."""

from backends.wrappers.base import ReadOnly, Wrapper
from backends.wrappers.cached import Cached
from backends.wrappers.faulty import Fault, Faulty, InjectedCrash
from backends.wrappers.metered import Call, Metered, Usage
from backends.wrappers.retrying import Retrying

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
