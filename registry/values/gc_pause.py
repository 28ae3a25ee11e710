"""Bursts of allocation: Python's cycle collector kept from running in the middle of one.

Taking a state of thousands of tensors apart makes tens of thousands of objects, none of them in a
cycle. They bring on a full collection, which in a process with torch loaded walks everything and
takes longer than the rest of the bookkeeping of a save (docs/design/speed.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector; leave it as it was found."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
