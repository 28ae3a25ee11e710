"""Pause Python's cycle collector while many objects are allocated.

Flattening a state of thousands of tensors makes tens of thousands of objects, none of them in a
cycle. They trigger a full collection. In a process with torch that takes longer than the rest of
the bookkeeping of a save (docs/design/speed.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector; afterwards it is on only if it was on before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
